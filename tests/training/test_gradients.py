"""The runner's check: its row, its line, and that it leaves no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lowmem_ft.data.batches import Row, StepOrder
from lowmem_ft.data.formats import TokenizedExample
from lowmem_ft.model.adapters import AdapterSettings, add_adapters
from lowmem_ft.train import main
from lowmem_ft.training import gradients
from lowmem_ft.training.causal import CausalLoss
from tests.flow.recipes import write_run
from tests.tiny import tiny_llama


def _example(length: int, weight: float) -> Any:
    return TokenizedExample(tuple(range(length)), (weight,) * length, "a.jsonl", length)


def _split(*examples: Any) -> Any:
    class Tokens(list[Any]):
        lengths = np.array([len(example.input_ids) for example in examples])

    return SimpleNamespace(tokens=Tokens(examples))


def test_the_shortest_example_that_trains_anything_is_the_row() -> None:
    order = StepOrder(size=3, batch_size=3, steps=1, seed=0)
    row = gradients.shortest_row(_split(_example(9, 1.0), _example(3, 0.0), _example(6, 1.0)), order)
    assert row is not None
    assert row.lengths == (6,)
    assert gradients.shortest_row(_split(*[_example(4, 0.0)] * 3), order) is None


def test_a_run_is_the_same_with_and_without_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    recipe = write_run(tmp_path / "work")
    assert main([str(recipe), "adapter.dropout=0.3"]) == 0
    assert "gradients reach all 28 trained tensors" in capsys.readouterr().out
    monkeypatch.setattr(gradients, "check_gradients", lambda *arguments: None)
    assert main([str(recipe), "adapter.dropout=0.3"]) == 0
    assert "gradients reach" not in capsys.readouterr().out
    runs = [tmp_path / "work" / "runs" / name / "adapter" / "adapter_model.safetensors" for name in ("tiny", "tiny-2")]
    assert runs[0].read_bytes() == runs[1].read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        ["adapter.kind=dora"],
        ["adapter.kind=vera", "adapter.alpha=32"],
        ["adapter.kind=ia3", "adapter.alpha=32", "adapter.rank=16"],
        ["adapter.kind=rslora", 'adapter.targets=["/[qv]_proj/", mlp.up_proj]', "adapter.layers=[-1]"],
        ["adapter.rank_pattern={q_proj: 2}", "adapter.trainable_tokens=[5]"],
    ],
)
def test_each_adapter_runs_by_recipe_as_its_dry_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], settings: list[str]
) -> None:
    from lowmem_ft.export.generate import generate

    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    recipe = write_run(tmp_path / "work")
    trains = []
    for arguments in (["--dry-run"], []):
        assert main([str(recipe), *settings, *arguments]) == 0, capsys.readouterr().err
        lines = capsys.readouterr().out.splitlines()
        trains.append(next(line for line in lines if line.startswith("  trains")))
    assert trains[0] == trains[1]
    assert " in layers " in trains[0]
    run = tmp_path / "work" / "runs" / "tiny"
    assert all(isinstance(answer, str) for answer in generate(run, "hello", max_new_tokens=2))


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (True, AdapterSettings(rank=4, trainable_tokens=[5, 7])),
        (False, AdapterSettings(rank=4, trainable_tokens=[5, 7])),
        (False, AdapterSettings(rank=4, modules_to_save=["lm_head"])),
        (False, AdapterSettings(rank=4, targets=["q_proj", "lm_head"])),
    ],
)
def test_the_loss_of_the_run_gives_head_and_embedding_the_gradients_of_the_plain_loss(
    tied: bool, settings: AdapterSettings
) -> None:
    base = tiny_llama(tie_word_embeddings=tied).requires_grad_(False)
    model, _ = add_adapters(base, settings, autocast=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    ids = torch.arange(3, 20)[None]
    labels = torch.cat([ids[:, 1:], ids.new_full((1, 1), -100)], dim=1)
    row = Row(ids, torch.arange(17)[None], labels, None, (17,), 16, 16.0, ("x",))
    CausalLoss(model, packed=False)(row).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ours = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    model.zero_grad()
    logits = model(input_ids=ids).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
    assert len(ours) == len(trained)
    for name, parameter in trained.items():
        assert parameter.grad is not None
        # fp32 sums in another order
        assert (ours[name] - parameter.grad).abs().max() <= 1e-4 * parameter.grad.abs().max(), name
