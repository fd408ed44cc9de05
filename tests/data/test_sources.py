"""Paths, folders, globs and hub ids of a recipe become pieces to read."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from lowmem_ft.data.sources import digest_sources, is_hub_id, locate_sources, shown_name
from lowmem_ft.errors import DataError
from lowmem_ft.recipe.data_section import Source

RECORD = '{"text": "a"}\n'


def _files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(RECORD)
    return folder


def _names(path: str | Path) -> list[str]:
    (located,) = locate_sources(str(path))
    return [os.path.basename(piece.shown) for piece in located.pieces]


def _refused(source: Any, *words: str) -> None:
    with pytest.raises(DataError) as error:
        locate_sources(source)
    for word in words:
        assert word in str(error.value)


def test_shards_come_in_natural_order(tmp_path: Path) -> None:
    names = ["part-1.jsonl", "part-2.jsonl", "part-10.jsonl", "part-11.jsonl.gz"]
    _files(tmp_path, *reversed(names), ".hidden", "_SUCCESS")
    assert _names(tmp_path) == names
    assert _names(tmp_path / "part-*") == names
    assert _names(tmp_path / "part-?.jsonl") == names[:2]


def test_a_glob_goes_into_folders_where_it_says_so(tmp_path: Path) -> None:
    _files(tmp_path, "2/b.jsonl", "10/a.jsonl", "1/c.jsonl")
    assert _names(tmp_path / "**" / "*.jsonl") == ["c.jsonl", "b.jsonl", "a.jsonl"]
    _refused(str(tmp_path), "holds folders", "**")
    _refused(str(tmp_path / "*"), "folders only")


def test_a_name_with_glob_characters_is_a_file_first(tmp_path: Path) -> None:
    _files(tmp_path, "x[1].jsonl")
    assert _names(tmp_path / "x[1].jsonl") == ["x[1].jsonl"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.jsonl", "README.md"], ["README.md", "no known kind", "*.jsonl"]),
        (["a.jsonl", "b.csv"], ["several kinds", "a.jsonl", "b.csv"]),
        (["a.jsonl", "dataset_info.json"], ["several kinds", "dataset_info.json"]),
        (["notes.txt"], ["notes.txt", "no known kind"]),
        ([], ["no files"]),
    ],
)
def test_a_folder_of_other_things_is_refused(tmp_path: Path, names: list[str], words: list[str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    _refused(str(_files(folder, *names)), *words)


def test_a_missing_file_is_named_with_the_nearest_name(tmp_path: Path) -> None:
    _files(tmp_path, "train.jsonl")
    _refused(str(tmp_path / "trian.jsonl"), str(tmp_path / "trian.jsonl"), "train.jsonl?")
    _refused(str(tmp_path / "nowhere" / "x.jsonl"), "no folder")
    _refused(str(tmp_path / "*.csv"), "matches no file")
    _refused(["./no.jsonl", str(tmp_path / "x1"), Source(path="../y.json")], "no.jsonl", "x1", "y.json")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    _refused(str(tmp_path / "pipe.jsonl"), "regular file", "pipe")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    _refused(str(tmp_path / "link.jsonl"), "link to nothing")
    _refused(Source(path=str(_files(tmp_path, "a.jsonl") / "a.jsonl"), split="train"), "split", "train")
    _refused(Source(path=str(tmp_path / "a.jsonl"), config="main"), "config", "main")


def test_names_are_relative_below_the_current_folder_and_printable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_name(tmp_path / "data" / "x.jsonl") == "data/x.jsonl"
    assert shown_name(tmp_path.parent / "x.jsonl") == str(tmp_path.parent / "x.jsonl")
    assert shown_name(Path(os.fsdecode(b"caf\xe9.jsonl"))) == r"caf\xe9.jsonl"


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("owner/name", True),
        ("owner-1/name_2.v3", True),
        ("./owner/name", False),
        ("/owner/name", False),
        ("data/train.jsonl", False),
        ("data/train.parquet.gz", False),
        ("name", False),
        ("a/b/c", False),
        ("~/name", False),
        ("owner/*", False),
    ],
)
def test_hub_ids(path: str, is_id: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(path) is is_id
    _files(tmp_path, "owner/name")
    assert not is_hub_id("owner/name")


def _hub(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[Any]:
    calls: list[Any] = []

    def load(path: str, config: str | None, *, split: str | None) -> Any:
        calls.append((path, config, split))
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_a_hub_data_set_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [{"role": "user", "content": str(number), "name": None}]} for number in range(600)]
    datasets.Dataset.from_list(rows, split="train").save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    calls = _hub(monkeypatch, datasets.DatasetDict({"train": saved}))
    monkeypatch.chdir(tmp_path)
    (located,) = locate_sources(Source(path="owner/name"))
    assert calls == [("owner/name", None, None)]
    locate_sources(Source(path="owner/name", config="main", split="train"))
    assert calls[1] == ("owner/name", "main", "train")
    (piece,) = located.pieces
    assert piece.shown == "owner/name (train)"
    assert piece.where(3) == "owner/name (train) row 3"
    assert piece.files
    expected = [(n + 1, {"messages": [{"role": "user", "content": str(n)}]}) for n in range(600)]
    assert list(piece.read()) == expected
    assert list(piece.read()) == expected


def test_hub_faults_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    _hub(monkeypatch, {"train": SimpleNamespace(), "test": SimpleNamespace()})
    _refused("owner/name", "splits train, test", "split: train")
    _hub(monkeypatch, ConnectionError("no network"))
    _refused(Source(path="owner/name", split="train"), "owner/name", "no network", "hf download", "HF_HUB_OFFLINE")


def test_the_digest_follows_the_bytes_names_and_settings(tmp_path: Path) -> None:
    path = _files(tmp_path, "a.jsonl") / "a.jsonl"

    def digest(source: Any = str(path), **options: Any) -> str:
        return digest_sources(locate_sources(source), **options)

    first = digest()
    assert digest() == first
    os.utime(path, (1, 1))
    assert digest() == first
    seen = {first, digest(Source(path=str(path), format="text")), digest(Source(path=str(path), map={"text": "b"}))}
    seen |= {digest(default_format="text"), digest([str(path), str(path)])}
    path.write_text(RECORD.replace("a", "b"))
    seen.add(digest())
    path.rename(tmp_path / "b.jsonl")
    seen.add(digest(str(tmp_path / "b.jsonl")))
    assert len(seen) == 7
    assert digest(Source(path=str(tmp_path / "b.jsonl"), weight=3)) in seen
