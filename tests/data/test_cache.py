"""Tokenized once, found again, and made again where anything changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowmem_ft.data import cache
from lowmem_ft.data.cache import LeftOutCount, TokenizedData, cache_key, tokenize_to_cache
from lowmem_ft.data.formats import Example, LeftOut, TokenizedExample
from lowmem_ft.data.pool import Outcome
from lowmem_ft.errors import DataError, Problem

KEY = "0" * 32


def _examples(count: int) -> list[Example]:
    return [
        Example("text", f"{line % 2}.jsonl", line, text="ab" * (line % 9 + 1), source=line % 2) for line in range(count)
    ]


def tokenize(examples: Sequence[Example]) -> list[Outcome]:
    """One token a letter, weight a half, the first not trained; every tenth is left out."""
    return [
        LeftOut("every tenth" if example.line % 20 else "every twentieth", example.file, example.line, example.line)
        if example.line % 10 == 0
        else TokenizedExample(
            [ord(letter) for letter in example.text],
            [0.0] + [0.5] * (len(example.text) - 1),
            example.file,
            example.line,
        )
        for example in examples
    ]


def _made(folder: Path, examples: Any = None, **options: Any) -> TokenizedData:
    return tokenize_to_cache(_examples(50) if examples is None else examples, tokenize, KEY, folder, **options)


def _rows(data: TokenizedData) -> list[tuple[list[int], list[float], str, int]]:
    return [(list(row.input_ids), list(row.weights), row.file, row.line) for row in data]


def _unread() -> Iterator[Example]:
    raise AssertionError("the examples were read")
    yield


def test_what_was_tokenized_is_what_is_read(tmp_path: Path) -> None:
    data = _made(tmp_path, notes=lambda: {"decided": "text"})
    kept = [example for example in _examples(50) if example.line % 10]
    assert len(data) == len(kept) == 45
    assert data.examples == 50
    for row, example in zip(data, kept, strict=True):
        assert row.input_ids.tolist() == [ord(letter) for letter in example.text]
        assert row.weights.tolist() == [0.0] + [0.5] * (len(example.text) - 1)
        assert (row.file, row.line) == (example.file, example.line)
    assert data.lengths.tolist() == [len(example.text) for example in kept]
    assert data.trained.tolist() == [len(example.text) - 1 for example in kept]
    assert data.sources.tolist() == [example.source for example in kept]
    assert data.notes == {"decided": "text"}
    assert data[-1].line == 49
    assert [row.line for row in data[3:5]] == [4, 5]
    with pytest.raises(IndexError):
        data[45]
    assert (data[0].input_ids.dtype, data[0].weights.dtype) == (np.int32, np.float32)


def test_what_was_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    counts = {one.reason: one for one in _made(tmp_path, _examples(1000)).left_out}
    assert {reason: one.count for reason, one in counts.items()} == {"every tenth": 50, "every twentieth": 50}
    tenth = counts["every tenth"]
    assert isinstance(tenth, LeftOutCount)
    assert tenth.longest_tokens == 990
    assert tenth.first[:2] == (LeftOut("every tenth", "0.jsonl", 10, 10), LeftOut("every tenth", "0.jsonl", 30, 30))
    assert len(tenth.first) == 20


def test_a_second_start_reads_no_example(tmp_path: Path) -> None:
    first = _made(tmp_path)
    second = _made(tmp_path, _unread())
    assert _rows(second) == _rows(first)
    assert (second.left_out, second.notes) == (first.left_out, first.notes)


def test_all_left_out_is_an_entry_too(tmp_path: Path) -> None:
    data = _made(tmp_path, _examples(1))
    assert (len(data), data.examples, data.left_out[0].count) == (0, 1, 1)
    assert list(data) == []


def test_rows_over_several_batches_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _made(tmp_path / "a", _examples(5000), workers=1)
    monkeypatch.setattr(cache, "_FLUSH_TOKENS", 3000)
    parts = _made(tmp_path / "b", _examples(5000), workers=2)
    assert len(parts._batches) > 5
    assert _rows(parts) == _rows(whole)
    for name in ("lengths", "trained", "sources"):
        assert np.array_equal(getattr(parts, name), getattr(whole, name))
    again = _made(tmp_path / "c", _examples(5000), workers=3)
    entries = [folder / KEY / "examples.arrow" for folder in (tmp_path / "b", tmp_path / "c")]
    assert entries[0].read_bytes() == entries[1].read_bytes()
    assert again.left_out == parts.left_out == whole.left_out


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["examples.arrow", "manifest.json"])
@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_entry_is_made_again_with_a_line(tmp_path: Path, name: str, damage: Any) -> None:
    rows = _rows(_made(tmp_path))
    path = tmp_path / KEY / name
    if name == "manifest.json" and damage is _flip:
        path.write_text(path.read_text().replace('"hash": "', '"hash": "0'))
    else:
        damage(path)
    said: list[str] = []
    assert _rows(_made(tmp_path, say=said.append)) == rows
    assert len(said) == 1
    assert "damaged" in said[0]
    assert "tokenizing again" in said[0]
    assert _rows(_made(tmp_path, _unread(), say=said.append)) == rows
    assert len(said) == 1


def test_an_open_entry_survives_being_made_again(tmp_path: Path) -> None:
    data = _made(tmp_path)
    rows = _rows(data)
    (tmp_path / KEY / "manifest.json").unlink()
    _made(tmp_path)
    assert _rows(data) == rows


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[Example]:
        yield from _examples(3000)
        raise DataError("bad line")

    for workers in (1, 2):
        with pytest.raises(DataError, match="bad line"):
            _made(tmp_path, broken(), workers=workers)
        assert list(tmp_path.iterdir()) == []


def test_problems_of_tokenizing_are_collected(tmp_path: Path) -> None:
    def refuse(examples: Sequence[Example]) -> list[Outcome]:
        return [
            DataError(Problem(one.where(), "no")) if one.line in (7, 300, 2000) else tokenize([one])[0]
            for one in examples
        ]

    for workers in (1, 2):
        with pytest.raises(DataError) as error:
            tokenize_to_cache(_examples(4000), refuse, KEY, tmp_path, workers=workers)
        assert [problem.where for problem in error.value.problems] == [
            "1.jsonl line 7",
            "0.jsonl line 300",
            "0.jsonl line 2000",
        ]
    assert list(tmp_path.iterdir()) == []


def _make_slowly(folder: Path, barrier: Any) -> None:
    def examples() -> Iterator[Example]:
        barrier.wait(30)
        yield from _examples(50)
        barrier.wait(30)

    _made(folder, examples(), workers=1)


def test_two_processes_that_make_one_entry_both_finish(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for damaged in (False, True):
        if damaged:
            _truncate(tmp_path / KEY / "examples.arrow")
        barrier = context.Barrier(2)
        processes = [context.Process(target=_make_slowly, args=(tmp_path, barrier)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        assert [path.name for path in tmp_path.iterdir()] == [KEY]
        assert len(_made(tmp_path, _unread())) == 45


def test_only_old_unfinished_folders_are_removed(tmp_path: Path) -> None:
    for name, age in ((".a.1.b.tmp", 2 * 24 * 3600), (".c.1.d.tmp", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    _made(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.1.d.tmp", KEY]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_our_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot be written"):
        _made(tmp_path / "new")


def test_a_file_in_the_place_of_the_folder_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        _made(tmp_path / "cache")


def test_progress_counts_the_examples(tmp_path: Path) -> None:
    seen: list[int] = []
    _made(tmp_path, _examples(600), on_progress=seen.append)
    assert seen == [256, 512, 600]


def test_every_part_of_the_key_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"]
    for file in files:
        file.write_text("{}")
    parts: dict[str, Any] = {
        "sources": "a",
        "tokenizer": files,
        "template": "t",
        "max_tokens": 8,
        "train_on": {"last": 1.0},
        "too_long": "drop",
    }
    key = cache_key(**parts)
    assert cache_key(**parts) == key
    assert cache_key(**{**parts, "tokenizer": files[::-1]}) == key
    changes: dict[str, Any] = {
        "sources": "b",
        "tokenizer": "text",
        "template": None,
        "max_tokens": 9,
        "train_on": "all",
        "too_long": "error",
        "more": 1,
    }
    keys = {cache_key(**{**parts, name: value}) for name, value in changes.items()}
    files[1].write_text("{ }")
    keys.add(cache_key(**parts))
    monkeypatch.setattr(cache, "_code_digest", lambda: "other code")
    keys.add(cache_key(**parts))
    assert len(keys | {key}) == len(changes) + 3
    assert all(len(one) == 32 for one in keys)


def test_the_code_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache._code_digest()
    for path in Path(cache.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    cache._code_digest.cache_clear()
    assert cache._code_digest() == before
    (tmp_path / "formats.py").write_text("# changed\n")
    cache._code_digest.cache_clear()
    assert cache._code_digest() != before
    cache._code_digest.cache_clear()


def test_a_manifest_of_another_key_is_not_taken(tmp_path: Path) -> None:
    _made(tmp_path)
    os.rename(tmp_path / KEY, tmp_path / ("1" * 32))
    manifest = json.loads((tmp_path / ("1" * 32) / "manifest.json").read_text())
    assert manifest["key"] == KEY
    said: list[str] = []
    tokenize_to_cache(_examples(50), tokenize, "1" * 32, tmp_path, say=said.append)
    assert "of another entry" in said[0]
