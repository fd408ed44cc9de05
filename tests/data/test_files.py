"""One data file becomes raw records, whatever kind of file it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_ft.data.files import read_file
from lowmem_ft.data.json_text import Bad


def _read(path: Path, content: bytes | str) -> list[tuple[int, Any]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_file(path))


def _one_bad(path: Path, content: bytes | str, line: int, *words: str) -> Bad:
    bad = [(at, value) for at, value in _read(path, content) if isinstance(value, Bad)]
    assert [at for at, _ in bad] == [line], bad
    text = f"{bad[0][1].what} {bad[0][1].instead}"
    for word in words:
        assert word in text
    assert bad[0][1].instead
    return bad[0][1]


A, B, C = ({"text": letter} for letter in "abc")
LINES = [json.dumps(record) for record in (A, B, C)]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_a_byte_that_is_not_utf8_is_named_with_its_position(tmp_path: Path, name: str) -> None:
    contents = {
        "x.jsonl": b'{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "b"}\n',
        "x.json": b'[{"text": "a"},\n{"text": "caf\xe9"},\n{"text": "b"}]\n',
        "x.csv": b"text\ncaf\xe9\n",
    }
    position = {"x.jsonl": 14, "x.json": 14, "x.csv": 4}[name]
    _one_bad(tmp_path / name, contents[name], 2, "0xE9", f"position {position} ", "UTF-8", "iconv")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", ["LFS", "git lfs pull"]),
        (b"<!DOCTYPE html>\n<html></html>", ["HTML", "<!DOCTYPE html>"]),
        (b"\n  <html><body>Sign in</body>", ["HTML", "<html>"]),
        (b'<?xml version="1.0"?><Error/>', ["XML"]),
        ("text".encode("utf-16"), ["UTF-16", "iconv", "0xFF at position 1"]),
        (b"abc\x00def", ["binary", "0x00", "position 4"]),
        (b"PK\x03\x04rest", ["zip"]),
        (b"\x28\xb5\x2f\xfdrest", ["zstd"]),
        (b"ARROW1\x00\x00", ["Arrow"]),
        (b'{"text": "a"}\r{"text": "b"}\r', ["carriage return"]),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, content: bytes, words: list[str]) -> None:
    assert _one_bad(tmp_path / "x.jsonl", content, 1, *words).ends_file


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    good = gzip.compress("\n".join(LINES * 500).encode())
    assert len(_read(tmp_path / "x.jsonl", good)) == 1500
    _one_bad(tmp_path / "a.jsonl.gz", LINES[0], 1, "not gzip")
    cut = _read(tmp_path / "b.jsonl.gz", good[: len(good) // 2])
    assert isinstance(cut[-1][1], Bad)
    assert cut[-1][1].ends_file
    assert "cut off" in cut[-1][1].what
    _one_bad(tmp_path / "c.jsonl.gz", gzip.compress(good), 1, "twice")
    assert _read(tmp_path / "d.jsonl.gz", b"") == []


def test_a_line_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_ft.data.files.MOST_RECORD_BYTES", 100)
    _one_bad(tmp_path / "x.jsonl", f'{LINES[0]}\n{{"text": "{"x" * 200}"}}\n', 2, "longer than 100 bytes")


def test_other_endings(tmp_path: Path) -> None:
    assert _read(tmp_path / "x.txt", LINES[0]) == [(1, A)]
    _one_bad(tmp_path / "x.md", "# Title", 1, "no known kind", ".jsonl")
    assert _read(tmp_path / "x.jsonl", b"") == []
    assert _read(tmp_path / "y.jsonl", b" \n\n") == []
    assert _read(tmp_path / "y.json", b"[]") == []


def test_csv_rows_start_on_their_lines(tmp_path: Path) -> None:
    content = '\ufeffprompt,completion\r\n1,"a ""b""\n, c"\r\n\r\n007,2024-01-11\r\ntrue,\r\n'
    assert _read(tmp_path / "x.csv", content) == [
        (2, {"prompt": "1", "completion": 'a "b"\n, c'}),
        (5, {"prompt": "007", "completion": "2024-01-11"}),
        (6, {"prompt": "true", "completion": ""}),
    ]
    assert _read(tmp_path / "x.tsv", "text\tmore\na,b\tc\n") == [(2, {"text": "a,b", "more": "c"})]
    assert len(_read(tmp_path / "y.csv", f'text\n"{"x" * 200_000}"\n')[0][1]["text"]) == 200_000
    assert _read(tmp_path / "z.csv.gz", gzip.compress(b"text\na\n")) == [(2, {"text": "a"})]


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("a,b\n1,2\n3\n", 3, ["1 values", "2 columns"]),
        ("a,b\n1,2,3\n", 2, ["3 values"]),
        ("a,a\n1,2\n", 1, ["twice"]),
        ('a,b\n1,2\n3,"never closed\n5,6\n', 3, ["CSV"]),
        ('a,b\n"x"y,2\n', 2, ["CSV"]),
    ],
)
def test_faults_in_csv(tmp_path: Path, content: str, line: int, words: list[str]) -> None:
    _one_bad(tmp_path / "x.csv", content, line, *words)


def test_parquet_rows_and_null_inside_them(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [1]}]},
        {"messages": [{"role": "user", "content": "c"}]},
    ] * 400
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=300)
    found = list(read_file(tmp_path / "x.parquet"))
    assert [row for row, _ in found] == list(range(1, 801))
    assert [value for _, value in found] == rows
    raw = (tmp_path / "x.parquet").read_bytes()
    assert _read(tmp_path / "y.parquet.gz", gzip.compress(raw)) == found
    assert _read(tmp_path / "z.jsonl", raw) == found
    assert _one_bad(tmp_path / "cut.parquet", raw[:-100], 1, "Parquet").ends_file
    assert _one_bad(tmp_path / "text.parquet", LINES[0], 1, "Parquet").ends_file


def test_a_parquet_text_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    text = pa.array([b"good", b"caf\xe9", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet")
    found = list(read_file(tmp_path / "x.parquet"))
    assert [row for row, value in found if isinstance(value, dict)] == [1, 3]
    assert "0xE9" in found[1][1].what


def test_a_file_that_cannot_be_opened_is_a_fault(tmp_path: Path) -> None:
    (missing,) = read_file(tmp_path / "none.jsonl")
    assert "cannot be read" in missing[1].what
    (folder,) = read_file(tmp_path)
    assert folder[1].ends_file


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(["x.jsonl", "x.json", "x.csv", "x.tsv", "x.parquet", "x.jsonl.gz", "x.txt"]),
    st.one_of(st.binary(max_size=200), st.text(alphabet='[]{}",:\\ntuf0\n\t e1ud8', max_size=80).map(str.encode)),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"[", b"PAR1", b"\x1f\x8b", b'{"text": "a"}\n']),
)
def test_random_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, start: bytes
) -> None:
    for _, value in _read(tmp_path_factory.mktemp("random") / name, start + content):
        assert isinstance(value, (dict, Bad))
