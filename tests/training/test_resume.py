"""Which checkpoint a run goes on from, and which changes of the recipe stop it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowmem_ft.errors import CheckpointError
from lowmem_ft.recipe.data_section import DataSection
from lowmem_ft.recipe.schema import CheckpointSection, EvalSection, ModelSection, Recipe
from lowmem_ft.recipe.train_section import MemorySection, TrainSection
from lowmem_ft.training import resume
from lowmem_ft.training.checkpoint import Checkpoints
from lowmem_ft.training.resume import LAYOUT, Past, changed_settings, check_same_inputs, find_past, library_versions
from tests.training.small_run import Silent
from tests.training.test_checkpoint import LIVE


def recipe(asked: str | None = "auto", **changes: Any) -> Recipe:
    parts = {"model": ModelSection(path="m"), "data": DataSection(train="t"), **changes}
    return Recipe(checkpoint=CheckpointSection(resume=asked), **parts)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    state = {"recipe": recipe().model_dump(mode="json"), "step": 2, "layout": LAYOUT}
    monkeypatch.setattr(resume, "read_state", lambda path: {**state, "step": int(path.name[5:])})
    store = Checkpoints(tmp_path / "run" / "checkpoints", 9)
    for step in (1, 2, 3):
        store.save(step, LIVE, {})
    return store


def test_nothing_is_resumed_unasked_and_auto_begins_where_nothing_is(store: Checkpoints, tmp_path: Path) -> None:
    assert find_past(recipe(None), store, Silent()) is None
    assert find_past(recipe(), Checkpoints(tmp_path / "new", 1), Silent()) is None


def test_auto_takes_the_newest_whole_one_and_names_what_it_skips(store: Checkpoints) -> None:
    (store.path(3) / "state.json").unlink()
    said = Silent()
    past = find_past(recipe(), store, said)
    assert past is not None
    assert (past.step, past.checkpoint) == (2, store.path(2))
    assert said.lines == [f"{store.path(3)} is not used: state.json is missing"]


def test_another_layout_is_refused(store: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "LAYOUT", 2)
    with pytest.raises(CheckpointError, match="has layout 1, and this version reads layout 2"):
        find_past(recipe(), store, Silent())


def test_where_all_are_broken_auto_does_not_begin_anew_in_silence(store: Checkpoints) -> None:
    for _, path in store.saved():
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="none of its checkpoints is whole"):
        find_past(recipe(), store, Silent())


def test_a_named_one_is_taken_or_is_an_error(store: Checkpoints) -> None:
    past = find_past(recipe(str(store.path(1))), store, Silent())
    assert past is not None
    assert past.step == 1
    for named in (store.folder, store.folder.parent):
        past = find_past(recipe(str(named)), store, Silent())
        assert past is not None
        assert past.step == 3
    (store.path(1) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000001: it has no manifest.json"):
        find_past(recipe(str(store.path(1))), store, Silent())


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": MemorySection(recompute="none", loss_chunk_tokens=7)},
        {"train": TrainSection(micro_batch_tokens=512, max_seconds=60)},
        {"output": "elsewhere", "name": "other"},
        {"model": ModelSection(path="moved/m")},
        {"data": DataSection(train="moved/t", eval="e", packing=False)},
    ],
)
def test_what_cannot_alter_what_is_learned_may_change(store: Checkpoints, changes: dict[str, Any]) -> None:
    assert find_past(recipe(**changes), store, Silent()) is not None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"train": TrainSection(lr=1e-3)}, "train.lr: 0.0002 -> 0.001"),
        ({"train": TrainSection(batch_size=8)}, "train.batch_size: 16 -> 8"),
        ({"seed": 3}, "seed: 17 -> 3"),
        ({"data": DataSection(train="t", max_tokens=7)}, "data.max_tokens: 1024 -> 7"),
        ({"model": ModelSection(path="m", quantization="int8")}, "model.quantization: nf4 -> int8"),
    ],
)
def test_what_alters_what_is_learned_is_shown_and_refused_or_accepted(
    store: Checkpoints, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(CheckpointError, match="--accept-changes") as error:
        find_past(recipe(**changes), store, Silent())
    assert line in str(error.value)
    said = Silent()
    assert find_past(recipe(**changes), store, said, accept_changes=True) is not None
    assert said.lines == [f"changed since the checkpoint, and accepted: {line}"]


def test_when_a_run_may_stop_early_what_decides_that_may_not_change(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"data": DataSection(train="t", eval="e"), "eval": EvalSection(every_steps=5)}
    assert find_past(recipe(**changes), store, Silent()) is not None
    changes["eval"] = EvalSection(every_steps=5, patience=2)
    with pytest.raises(CheckpointError) as error:
        find_past(recipe(**changes), store, Silent())
    assert [text in str(error.value) for text in ("eval.patience: null -> 2", "eval.every_steps", "data.eval")] == [
        True
    ] * 3
    state = {"recipe": recipe(**changes).model_dump(mode="json"), "step": 3, "layout": LAYOUT}
    monkeypatch.setattr(resume, "read_state", lambda path: state)
    changes["eval"] = EvalSection(every_steps=5, patience=2, samples=0, generate_tokens=9)
    assert find_past(recipe(**changes), store, Silent()) is not None
    changes["eval"] = EvalSection(every_steps=5)
    with pytest.raises(CheckpointError, match=r"eval\.patience: 2 -> null"):
        find_past(recipe(**changes), store, Silent())


def test_another_model_or_other_data_is_refused_and_other_versions_are_said() -> None:
    saved = {"digests": {"base model": "a", "training data": "b"}, "versions": {**library_versions(), "torch": "1.0"}}
    past, said = Past(Path("step-000002"), saved), Silent()
    check_same_inputs(past, {"base model": "a", "training data": "b"}, False, said)
    assert said.lines[0].startswith("saved with torch 1.0, now ")
    with pytest.raises(CheckpointError, match="the training data is not that of the checkpoint"):
        check_same_inputs(past, {"base model": "a", "training data": "c"}, False, said)
    check_same_inputs(past, {"base model": "z", "training data": "b"}, True, said)
    assert said.lines[-2] == "changed since the checkpoint, and accepted: the base model is not that of the checkpoint"


def test_settings_that_came_or_went_are_changes() -> None:
    lines = changed_settings({"a": {"b": 1, "old": 2}}, {"a": {"b": 1, "new": None}})
    assert lines == [("a.new", "a.new: (not there) -> null"), ("a.old", "a.old: 2 -> (not there)")]


def test_every_harmless_setting_is_one_that_exists() -> None:
    known = recipe().model_dump()
    for name in (*resume.HARMLESS, *resume.PLACES, *resume.DECIDING):
        value: Any = known
        for part in name.split("."):
            assert part in value, name
            value = value[part]
