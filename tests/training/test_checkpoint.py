"""Which checkpoints are there, which is taken, which stay."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_ft.errors import CheckpointError
from lowmem_ft.training.checkpoint import Checkpoints, checked
from lowmem_ft.training.whole_folder import why_not_whole


def write(part: Path, position: Any) -> None:
    (part / "state.json").write_text(f"{position}")


LIVE: Any = SimpleNamespace(write=write, needed_bytes=lambda: 10)


def names(store: Checkpoints) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_the_newest_by_number_stay_and_others_are_not_touched(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-000001.aside-1").mkdir()
    for step in (5, 90, 100, 1_000_000):
        store.save(step, LIVE, {})
    assert names(store) == ["step-000001.aside-1", "step-000100", "step-1000000", "step-notes"]
    assert [step for step, _ in store.saved()] == [100, 1_000_000]


def test_a_clock_that_jumps_back_changes_neither_which_is_the_newest_nor_which_stay(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        path = store.save(step, LIVE, {})
        for written in (path, *path.iterdir()):
            os.utime(written, (1_000_000 - step, 1_000_000 - step))  # a later checkpoint looks older
    assert names(store) == ["step-000004", "step-000005"]
    assert store.newest_whole() == (store.path(5), [])


def test_the_best_and_the_latest_always_stay(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=1)
    for step in range(1, 6):
        store.save(step, LIVE, {})
        if step == 2:
            store.mark_best({"step": 2, "by": "loss", "value": 0.5})
    assert names(store) == ["best.json", "step-000002", "step-000005"]
    assert store.best() == {"step": 2, "by": "loss", "value": 0.5}
    store.mark_best({"step": 5, "by": "loss", "value": 0.4})
    store.save(6, LIVE, {})
    assert names(store) == ["best.json", "step-000005", "step-000006"]
    store.mark_best(None)
    assert store.best() is None


def test_old_ones_are_deleted_only_after_the_new_one_is_whole(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=1)
    store.save(1, LIVE, {})

    def fail(part: Path, position: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError):
        store.save(2, SimpleNamespace(write=fail, needed_bytes=lambda: 10), {})  # type: ignore[arg-type]
    assert names(store) == ["step-000001"]
    assert why_not_whole(store.path(1)) is None


def test_the_newest_whole_one_is_taken_and_the_others_named_with_the_reason(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=9)
    for step in range(1, 5):
        store.save(step, LIVE, {"step": step})
    (store.path(4) / "manifest.json").unlink()
    (store.path(3) / "state.json").write_text("broken")
    path, skipped = store.newest_whole()
    assert path == store.path(2)
    assert len(skipped) == 2
    assert "step-000004 is not used: it has no manifest.json" in skipped[0]
    assert "step-000003 is not used: state.json" in skipped[1]
    assert Checkpoints(tmp_path / "none", 1).newest_whole() == (None, [])


def test_one_that_is_named_must_be_whole(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=9)
    store.save(1, LIVE, {})
    store.save(2, LIVE, {})
    assert checked(store.path(2)) == store.path(2)
    (store.path(2) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state.json is missing. The newest whole one is .*step-000001"):
        checked(store.path(2))


def test_later_ones_are_set_aside_not_deleted(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=9)
    for step in (1, 2, 3):
        store.save(step, LIVE, {})
    assert len(store.set_aside_after(1)) == 2
    store.save(2, LIVE, {})
    store.set_aside_after(1)
    assert names(store) == ["step-000001", "step-000002.aside-1", "step-000002.aside-2", "step-000003.aside-1"]
