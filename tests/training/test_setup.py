"""From settings to objects: rows for each process, sizes, and texts about a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_ft.data.batches import StepOrder
from lowmem_ft.data.dataset import Split, load_split
from lowmem_ft.data.template import make_encoder
from lowmem_ft.memory import products
from lowmem_ft.recipe.load import load_recipe
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training import setup
from tests.data.tiny_tokenizers import with_template
from tests.flow.recipes import write_run


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    return load_recipe(write_run(tmp_path / "work"), ["train.steps=null", "train.epochs=1"]).recipe


def _split(recipe: Recipe, tmp_path: Path) -> Split:
    encoder = make_encoder(with_template("regex", "chatml"), template=None, max_tokens=128)
    return load_split(recipe.data.train, recipe.data, encoder, tmp_path / "cache")


def _process(rank: int, world: int) -> Any:
    return SimpleNamespace(process_index=rank, num_processes=world)


def test_the_processes_share_the_examples_of_a_step(recipe: Recipe, tmp_path: Path) -> None:
    split = _split(recipe, tmp_path)
    order = setup.make_order(recipe, split)
    assert (order.size, order.steps) == (12, 3)
    one = [
        source for row in setup.rows_of_step(recipe, split, order, 1, _process(0, 1), True) for source in row.sources
    ]
    two = [
        source
        for rank in range(2)
        for row in setup.rows_of_step(recipe, split, order, 1, _process(rank, 2), True)
        for source in row.sources
    ]
    assert len(one) == 5
    assert sorted(one) == sorted(two)


def test_a_process_without_an_example_gets_a_row_that_trains_nothing(recipe: Recipe, tmp_path: Path) -> None:
    split = _split(recipe, tmp_path)
    order = setup.make_order(recipe, split)
    assert len(order.examples(3)) == 2
    (row,) = setup.rows_of_step(recipe, split, order, 3, _process(2, 3), True)
    assert set(row.labels.flatten().tolist()) == {-100}
    assert (row.trained_tokens, row.weight_sum) == (0, 0.0)


def test_held_out_rows_hold_every_example_once(recipe: Recipe, tmp_path: Path) -> None:
    split = _split(recipe, tmp_path)
    rows = list(setup.held_out_rows(recipe, split, packed=True))
    assert sum(len(row.lengths) for row in rows) == 12
    assert sum(row.trained_tokens for row in rows) == int(split.tokens.trained.sum())
    assert all(sum(row.lengths) <= 128 or len(row.lengths) == 1 for row in rows)


def test_a_step_is_described_by_the_rows_it_has(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = _split(recipe, tmp_path)
    order = setup.make_order(recipe, split)
    counts = [len(setup.rows_of_step(recipe, split, order, step, _process(0, 1), True)) for step in (1, 2, 3)]
    prepared: Any = SimpleNamespace(packed=True, not_packed=None)
    batch = setup.describe_batch(recipe, split, order, prepared, torch.device("cuda"))
    assert batch.micro_batches == pytest.approx(sum(counts) / 3)
    assert (batch.steps, batch.epochs, batch.micro_batch_tokens, batch.row_multiple) == (3, 1.0, 128, 1)
    for able, multiple in ((True, 128 // 16), (False, 1)):
        monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda able=able: able)
        assert setup.describe_batch(recipe, split, order, prepared, torch.device("cpu")).row_multiple == multiple


def test_auto_micro_batches_hold_max_tokens(tmp_path: Path) -> None:
    file = write_run(tmp_path / "work")
    loaded = load_recipe(file, ["train.micro_batch_tokens=auto", "data.max_tokens=77"])
    assert setup.micro_batch_tokens(loaded.recipe) == 77


@pytest.mark.parametrize(("every", "due"), [(None, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_what_is_due_after_a_step(every: int | None, due: list[int]) -> None:
    assert [step for step in range(1, 5) if setup.is_due(every, step)] == due


def test_length_grouping_reaches_the_order(tmp_path: Path) -> None:
    loaded = load_recipe(write_run(tmp_path / "work"), ["data.length_grouping=true"])
    order: StepOrder = setup.make_order(loaded.recipe, _split(loaded.recipe, tmp_path))
    assert order.lengths is not None
