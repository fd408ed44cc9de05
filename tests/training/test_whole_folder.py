"""A folder is there whole or not at all, and any change of it is found."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors import SafetensorError

from lowmem_ft.errors import CheckpointError
from lowmem_ft.training import whole_folder
from lowmem_ft.training.whole_folder import mend, why_not_whole, write_text_whole, write_whole

USAGE = namedtuple("usage", "total used free")


def fill(part: Path) -> None:
    (part / "a.bin").write_bytes(bytes(range(200)))
    (part / "b.json").write_text('{"step": 3}\n')


def test_what_was_written_is_whole_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    size = write_whole(tmp_path / "x" / "one", fill, 10)
    assert why_not_whole(tmp_path / "x" / "one") is None
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["one"]
    assert size == sum(path.stat().st_size for path in (tmp_path / "x" / "one").iterdir())


@pytest.mark.parametrize("name", ["a.bin", "b.json", "manifest.json"])
def test_every_truncation_and_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    write_whole(tmp_path / "one", fill, 10)
    path = tmp_path / "one" / name
    whole = path.read_bytes()
    changes = [whole[:length] for length in range(0, len(whole), 7)]
    changes += [whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :] for at in range(len(whole))]
    changes += [whole + b" ", whole[::-1]]
    for changed in changes:
        path.write_bytes(changed)
        reason = why_not_whole(tmp_path / "one")
        assert reason is not None
        assert name in reason
    path.unlink()
    assert name in (why_not_whole(tmp_path / "one") or "")
    path.write_bytes(whole)
    assert why_not_whole(tmp_path / "one") is None
    assert len(changes) > 12


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: full")])
def test_a_write_that_fails_leaves_all_as_it_was_and_names_the_bytes(tmp_path: Path, error: Exception) -> None:
    write_whole(tmp_path / "one", fill, 10)

    def fail(part: Path) -> None:
        fill(part)
        raise error

    with pytest.raises(CheckpointError, match=r"one: cannot be written: .*(it needs 2.00 KiB, and .* are free)"):
        write_whole(tmp_path / "one", fail, 2048)
    assert why_not_whole(tmp_path / "one") is None
    assert os.listdir(tmp_path) == ["one"]


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_folder.shutil, "disk_usage", lambda _: USAGE(10, 9, 1000))
    called: list[Path] = []
    with pytest.raises(CheckpointError, match=r"No space left on device \(it needs 4.00 KiB, and 1000 B are free\)"):
        write_whole(tmp_path / "one", called.append, 4096)
    assert called == []
    assert os.listdir(tmp_path) == []


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(1, 4))
def test_killed_at_any_rename_the_old_or_the_new_is_there_whole(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the first rename, between the two, and before the old one is deleted."""
    write_whole(tmp_path / "one", lambda part: (part / "old").write_text("old"), 10)
    calls: list[int] = []
    rename = os.rename

    def killed(source: Path, target: Path) -> None:
        calls.append(1)
        if len(calls) == at:
            raise _Killed
        rename(source, target)

    monkeypatch.setattr(whole_folder.os, "rename", killed)
    monkeypatch.setattr(whole_folder.shutil, "rmtree", lambda *_, **__: None)  # a killed process clears nothing away
    if at < 3:
        with pytest.raises(_Killed):
            write_whole(tmp_path / "one", fill, 10)
    else:
        write_whole(tmp_path / "one", fill, 10)
    monkeypatch.undo()
    mend(tmp_path)
    assert os.listdir(tmp_path) == ["one"]
    assert why_not_whole(tmp_path / "one") is None
    assert (tmp_path / "one" / "old").exists() == (at < 3)


def test_a_part_that_a_kill_left_is_cleared_away_and_never_taken_for_whole(tmp_path: Path) -> None:
    (tmp_path / ".one.part").mkdir()
    fill(tmp_path / ".one.part")
    assert "no manifest.json" in (why_not_whole(tmp_path / ".one.part") or "")
    mend(tmp_path)
    assert os.listdir(tmp_path) == []
    mend(tmp_path / "not there")


def test_a_text_is_replaced_at_once(tmp_path: Path) -> None:
    write_text_whole(tmp_path / "t", "one")
    write_text_whole(tmp_path / "t", "two")
    assert (tmp_path / "t").read_text() == "two"
    assert os.listdir(tmp_path) == ["t"]
