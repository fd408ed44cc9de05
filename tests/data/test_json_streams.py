"""JSONL and arrays become raw records with the lines an editor shows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_ft.data import json_streams
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


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("\n".join(LINES) + "\n", [1, 2, 3]),
        ("\n".join(LINES), [1, 2, 3]),
        ("\r\n".join(LINES) + "\r\n", [1, 2, 3]),
        ("\ufeff" + "\n".join(LINES), [1, 2, 3]),
        ("\n  \n" + "\n\t\n\r\n".join(LINES) + "\n\n", [3, 6, 9]),
        ("[" + ",\n".join(LINES) + "]", [1, 2, 3]),
        (" \n[\n" + ",\n\n".join(LINES) + "\n]\n\n", [3, 5, 7]),
        ("\ufeff[" + ", ".join(LINES) + "\n]", [1, 1, 1]),
        (json.dumps([A, B, C], indent=2), [2, 5, 8]),
        (json.dumps([A, B, C], indent=2).replace("\n", "\r\n"), [2, 5, 8]),
    ],
    ids=[
        "plain",
        "no-final-newline",
        "crlf",
        "bom",
        "blank-lines",
        "array",
        "spaced-array",
        "bom-array",
        "pretty",
        "crlf-array",
    ],
)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_three_records_and_their_lines(tmp_path: Path, content: str, lines: list[int], zipped: bool) -> None:
    name, raw = ("x.jsonl.gz", gzip.compress(content.encode())) if zipped else ("x.jsonl", content.encode())
    assert _read(tmp_path / name, raw) == list(zip(lines, [A, B, C], strict=True))


@pytest.mark.parametrize("space", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, space: str) -> None:
    inside = json.dumps(space) if space < " " else f'"{space}"'
    found = _read(tmp_path / "x.jsonl", f'{{"text": {inside}}}\n{{"text": "next"}}\n')
    assert found == [(1, {"text": space}), (2, {"text": "next"})]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a", "text": "b"}', ["twice", '"text"']),
        ('{"text": {"a": 1, "a": 1}}', ["twice", '"a"']),
        ('{"text": "a",}', ["trailing comma"]),
        ('{"text": "a"},', ["comma after the record"]),
        ("// note", ["comment"]),
        ("# note", ["comment"]),
        ("{'text': 'a'}", ["single quotes"]),
        ('{"text": "a\tb"}', ["tab", "U+0009", r"\t"]),
        ('{"text": "a\x00b"}', ["U+0000"]),
        ('{"text": Trout}', ["Trout", "quotes"]),
        ('{"text": None}', ["None", "null"]),
        ('{"text": NaN}', ["NaN"]),
        ('{"text": -Infinity}', ["-Infinity"]),
        ('{"text": 1e999}', ["1e999", "too large"]),
        ('{"text": ' + "9" * 5000 + "}", ["5000 digits"]),
        ('{"text": "\\ud83d"}', ["d83d", "surrogate"]),
        ('{"text": "\\uDE00 x"}', ["de00", "surrogate"]),
        ('{"text": "a\\q"}', ["escape"]),
        ('{"text": "\\u12"}', ["escape"]),
        ('{"text": ' + "[" * 200 + "]" * 200 + "}", ["deep"]),
        ('{"text": ' + "[" * 5000 + "]" * 5000 + "}", ["deep"]),
        ('{"text": "a"}{"text": "b"}', ["one record a line"]),
        ('"a text"', ["must be an object", "a text"]),
        ("42", ["must be an object", "42"]),
        ("null", ["must be an object", "null"]),
        ("true", ["must be an object", "true"]),
        ('[{"from": "human", "value": "x"}]', ["must be an object", "conversations"]),
        ('[{"role": "user", "content": "x"}]', ["must be an object", "messages"]),
        ("}", ["not JSON"]),
    ],
)  # fmt: skip
def test_a_bad_line_between_good_ones(tmp_path: Path, line: str, words: list[str]) -> None:
    content = f"{LINES[0]}\n\n{line}\n{LINES[1]}\n"
    if "\x00" in line:  # far behind the start, where a zero byte would mean a binary file
        content = "\n" * 10000 + content
    _one_bad(tmp_path / "x.jsonl", content, content[: content.index(f"\n{line}\n")].count("\n") + 2, *words)
    good = [value for _, value in read_file(tmp_path / "x.jsonl") if isinstance(value, dict)]
    assert good == [A, B]


@pytest.mark.parametrize("ending", ["", "\n", "\n\n  \n"])
@pytest.mark.parametrize("cut", ['{"text": "no en', '{"text": ', '{"text": "x"', "{", '{"te', '{"text": "x\\'])
def test_a_cut_last_line_is_named_so(tmp_path: Path, cut: str, ending: str) -> None:
    _one_bad(tmp_path / "x.jsonl", f"{LINES[0]}\n{LINES[1]}\n{cut}{ending}", 3, "cut off")


def test_a_record_over_several_lines_is_one_fault(tmp_path: Path) -> None:
    broken = '{"text": "first line\nsecond line"}'
    _one_bad(tmp_path / "x.jsonl", f"{LINES[0]}\n{broken}\n{LINES[1]}", 2, "not closed", r"\n")
    spread = json.dumps(B, indent=1)
    _one_bad(tmp_path / "x.jsonl", f"{LINES[0]}\n{spread}\n{LINES[2]}", 2, "one line")
    assert [at for at, value in read_file(tmp_path / "x.jsonl") if value == C] == [5]


def test_pretty_printed_objects_are_named_once(tmp_path: Path) -> None:
    content = "\n".join(json.dumps(record, indent=2) for record in (A, B, C))
    _one_bad(tmp_path / "x.jsonl", content, 1, "pretty-printed", "one line")
    _one_bad(tmp_path / "x.json", content, 1, "pretty-printed")


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ('[\n{"text": "a"},\n{"text": "b",}\n]', 3, ["element 2", "trailing comma"]),
        ('[\n{"text": "a"},\n{"text": "b"},\n]', 4, ["trailing comma after element 2"]),
        ('[\n{"text": "a"}\n{"text": "b"}\n]', 3, ["element 1", "comma between"]),
        ('[\n{"text": "a"},\n{"text":\n"b\tc"}]', 4, ["element 2", "tab"]),
        ('[\n{"text": "a"},\n{"text": "b', 3, ["cut off"]),
        ('[\n{"text": "a"},\n', 3, ["element 2", "cut off"]),
        ('[\n{"text": "a"}\n', 3, ["cut off"]),
        ('[\n{"text": "a"}\n]\nmore', 4, ["follows the end"]),
        ('[{"text": "a"},\n{"text": 1e999},\n{"text": "c"}]', 2, ["element 2", "too large"]),
        ('[{"text": "a"},\n{"text": 1, "text": 2},\n{"text": "c"}]', 2, ["element 2", "twice"]),
        ('[{"text": "a"},\n{"text": NaN},\n{"text": "c"}]', 2, ["element 2", "NaN"]),
        ('[{"text": "a"},\n17,\n{"text": "c"}]', 2, ["must be an object", "17"]),
        ('[{"text": "a"},\n{"text": "\\ud800"},\n{"text": "c"}]', 2, ["surrogate"]),
        ("[" + "[" * 3000, 1, ["deep"]),
    ],
)
def test_faults_in_an_array_name_the_element_and_the_line(
    tmp_path: Path, content: str, line: int, words: list[str]
) -> None:
    _one_bad(tmp_path / "x.json", content, line, *words)


def test_an_array_of_scalars_names_each_once(tmp_path: Path) -> None:
    found = _read(tmp_path / "x.json", "[1,\n22, 333 ]")
    assert [line for line, _ in found] == [1, 2, 2]
    assert [value.what.rpartition(" ")[2] for _, value in found] == ["1", "22", "333"]


SCALARS = st.one_of(
    st.text(max_size=30), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.dictionaries(st.text(max_size=4), SCALARS), max_size=8),
    st.integers(1, 40),
    st.sampled_from([None, 0, 2]),
)
def test_an_array_reads_the_same_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], chunk: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("array") / "x.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=False), "utf-8", newline="")
    whole = list(read_file(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_streams, "_CHUNK_BYTES", chunk)
        assert list(read_file(path)) == whole
    assert [value for _, value in whole] == records
