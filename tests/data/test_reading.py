"""Files become examples, or one error with places and what to write."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_ft.data.formats import FORMATS, Example
from lowmem_ft.data.reading import MOST_COLLECTED, SourceReport, read_examples
from lowmem_ft.errors import DataError
from lowmem_ft.recipe.data_section import Source

PAIR = '{"prompt": "Name a river.", "completion": "Inn."}\n'
OTHER = '{"prompt": "Name a lake.", "completion": "Attersee."}\n'
CHAT = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'


def _chat(content: str) -> str:
    return f'{{"messages": [{{"role": "user", "content": {content}}}, {{"role": "assistant", "content": "Ok."}}]}}\n'


def _share(speaker: str) -> str:
    return f'{{"conversations": [{{"from": "{speaker}", "value": "Go"}}, {{"from": "gpt", "value": "On."}}]}}\n'


# Kinds of input seen in the wild: name, content, and a number of examples or line and words of the error.
CASES: list[tuple[str, str | bytes, int | tuple[int, list[str]]]] = [
    ("blank lines", f"\n{PAIR}   \n{OTHER}\n\t\n{PAIR}\n", 3),
    ("bad after blank lines", f"\n{PAIR}\n\n{{'prompt'}}\n{OTHER}", (5, ["single quotes"])),
    ("byte order mark", "\ufeff" + PAIR + OTHER, 2),
    ("windows line ends", (PAIR + OTHER).replace("\n", "\r\n"), 2),
    ("no final newline", PAIR + OTHER.rstrip(), 2),
    ("cut last line", PAIR + OTHER[:30], (2, ["cut off"])),
    (
        "trailing comma and comment",
        f'{PAIR}{{"prompt": "a", "completion": "b",}}\n// x\n',
        (2, ["comma", "line 3", "//"]),
    ),
    ("array", json.dumps([json.loads(PAIR), json.loads(OTHER)], indent=1), 2),
    ("pretty-printed", json.dumps(json.loads(PAIR), indent=2) * 2, (1, ["pretty-printed"])),
    ("raw tab", PAIR + '{"prompt": "a\tb", "completion": "c"}\n', (2, ["tab"])),
    ("dates", '{"prompt": "When?", "completion": "2023-05-06"}\n' * 3, 3),
    ("numbers as texts", '{"prompt": "Room?", "completion": "007"}\n{"prompt": "?", "completion": "null"}\n', 2),
    ("a number as answer", PAIR + '{"prompt": "2+2?", "completion": 4}\n', (2, ["completion", "number 4"])),
    ("null input", '{"instruction": "a", "input": null, "output": "b"}\n{"instruction": "a", "output": "b"}\n', 2),
    ("null answer", PAIR + '{"prompt": "a", "completion": null}\n', (2, ["completion", "null"])),
    ("missing answer", PAIR + OTHER + '{"prompt": "a"}\n', (3, ["completion", '"prompt"', "prompt_completion"])),
    ("mixed forms", CHAT + PAIR, (2, ["began as messages", "prompt_completion"])),
    ("sharegpt", _share("human") + _share("user"), 2),
    ("unknown speaker", _share("human") + _share("chorus"), (2, ["chorus", "human, user, gpt"])),
    (
        "list of turns",
        '[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]\n' * 2,
        (1, ["conversations"]),
    ),
    ("role in capitals", CHAT.replace('"user"', '"User"'), (1, ["User", '"user"'])),
    ("text parts", _chat('[{"type": "text", "text": "a"}]'), 1),
    ("image part", CHAT + _chat('[{"type": "image_url", "image_url": {}}]'), (2, ["image", "not supported"])),
    ("null content", _chat("null"), (1, ["turn 1", "content", "null"])),
    ("empty messages", CHAT + '{"messages": []}\n', (2, ["messages", "empty"])),
    ("repeated key", PAIR + '{"prompt": "a", "prompt": "b", "completion": "c"}\n', (2, ["prompt", "twice"])),
    ("scalar lines", f'{PAIR}"text"\n42\n', (2, ["object", "text", "line 3", "42"])),
    ("latin-1", PAIR.encode() + b'{"prompt": "\xfc", "completion": "a"}\n', (2, ["0xFC", "position 13 ", "UTF-8"])),
    (
        "joined emoji and scripts",
        '{"prompt": "\U0001f468\u200d\U0001f469 e\u0301 \u05e9", "completion": "\u4f60"}\n',
        1,
    ),
    ("lfs pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:1\n", (1, ["LFS"])),
    ("web page", "<!DOCTYPE html><title>Moved</title>", (1, ["HTML", "<!DOCTYPE"])),
    ("two usable columns", CHAT.replace("]}", '], "text": "a"}'), (1, ['"messages"', '"text"', "format: messages"])),
    ("unknown columns", '{"question": "a", "answer": "b"}\n', (1, ["map: {prompt: question, completion: answer}"])),
]


@pytest.mark.parametrize(("content", "outcome"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_kinds_of_input(tmp_path: Path, content: str | bytes, outcome: Any) -> None:
    path = tmp_path / ("train.json" if str(content).startswith("[\n") else "train.jsonl")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(outcome, int):
        examples = list(read_examples(str(path)))
        assert len(examples) == outcome
        assert all(example.file == str(path) for example in examples)
        return
    line, words = outcome
    with pytest.raises(DataError) as error:
        list(read_examples(str(path)))
    text = str(error.value)
    assert text.startswith(f"{path} line {line}: ")
    for word in words:
        assert word in text


def test_a_given_format_with_other_columns_proposes_the_map(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(DataError, match=r'line 1: "prompt" is missing.*map: {prompt: question, completion: answer}'):
        list(read_examples(str(tmp_path / "x.jsonl"), default_format="prompt_completion"))
    with pytest.raises(DataError, match=r'line 1: "text" is missing.*Write "text" in each record'):
        list(read_examples(str(tmp_path / "x.jsonl"), default_format="text"))


@pytest.mark.parametrize("content", ["", "\n \n", "[]"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.json"])
def test_a_file_without_records_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content if name == "x.json" or content != "[]" else "\n")
    with pytest.raises(DataError, match=f"{name}: .*no examples"):
        list(read_examples(str(tmp_path / name)))


def test_texts_stay_as_they_are_in_the_file(tmp_path: Path) -> None:
    completions = ["2023-05-06", "007", "1e5", "true", "null", " a ", "a\u2028b", "e\u0301", "\U0001f600", ""]
    for ensure_ascii in (False, True):
        path = tmp_path / "x.jsonl"
        lines = [json.dumps({"prompt": "?", "completion": text}, ensure_ascii=ensure_ascii) for text in completions]
        path.write_text("\n".join(lines), "utf-8", newline="")
        assert [example.completion for example in read_examples(str(path))] == completions


def test_ten_problems_are_printed_and_the_rest_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(PAIR + '{"prompt": "a"}\n' * 30 + "{\n" + PAIR)
    with pytest.raises(DataError) as error:
        list(read_examples(str(path)))
    assert [problem.where for problem in error.value.problems] == [f"{path} line {line}" for line in range(2, 33)]
    assert str(error.value).endswith("... and 21 more problems of this kind")


def test_reading_stops_after_very_many_problems(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(PAIR + "1\n" * 2 * MOST_COLLECTED)
    with pytest.raises(DataError) as error:
        list(read_examples(str(path)))
    assert f"line {MOST_COLLECTED + 1}: reading stopped here" in str(error.value)
    assert len(error.value.problems) == 10


def test_problems_of_all_sources_come_at_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(PAIR + ("" if name == "b" else "{}\n"))
    with pytest.raises(DataError) as error:
        list(read_examples([str(tmp_path / f"{name}.jsonl") for name in "abc"]))
    assert [problem.where[-14:] for problem in error.value.problems] == ["a.jsonl line 2", "c.jsonl line 2"]


def test_nothing_comes_out_after_the_first_problem(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(PAIR + "1\n" + PAIR * 50)
    reading = read_examples(str(tmp_path / "x.jsonl"), default_format="prompt_completion")
    assert next(reading).line == 1
    with pytest.raises(DataError, match="line 2"):
        next(reading)


def test_skip_leaves_out_counts_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(PAIR + "{oh\n" + '{"prompt": "a"}\n' + OTHER + '{"prompt": "x\n')
    reports: list[SourceReport] = []
    examples = list(read_examples(str(path), on_bad_record="skip", reports=reports))
    assert [example.line for example in examples] == [1, 4]
    (report,) = reports
    assert (report.records, report.examples, report.skipped) == (5, 2, 3)
    assert [problem.where for problem in report.listed] == [f"{path} line {line}" for line in (2, 3, 5)]
    assert SourceReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize("content", ["<html>", '[{"text": "a"},\n{"text": }]', ""])
def test_skip_does_not_pass_over_a_whole_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError):
        list(read_examples(str(tmp_path / "x.json"), on_bad_record="skip"))


def test_skip_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(DataError, match="all 3 records"):
        list(read_examples(str(tmp_path / "x.jsonl"), default_format="prompt_completion", on_bad_record="skip"))


def test_auto_says_what_it_decided_for_each_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(CHAT * 30)
    (tmp_path / "b.jsonl").write_text(PAIR)
    (tmp_path / "c.jsonl").write_text('{"text": "a", "prompt": "b"}\n')
    sources = [
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
        Source(path=str(tmp_path / "c.jsonl"), format="text"),
    ]
    reports: list[SourceReport] = []
    examples = list(read_examples(sources, reports=reports))  # fmt: skip
    assert [report.decided for report in reports] == [
        "auto decided: messages, from the keys of the first 20 records",
        "auto decided: prompt_completion, from the keys of the first 1 records",
        "",
    ]
    assert [report.format for report in reports] == ["messages", "prompt_completion", "text"]
    assert [example.source for example in examples] == [0] * 30 + [1, 2]


def test_a_folder_of_shards_is_one_source_with_one_format(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / f"part-{number}.jsonl").write_text(f'{{"text": "{number}"}}\n')
    assert [example.text for example in read_examples(str(tmp_path))] == ["1", "2", "10"]
    (tmp_path / "part-2.jsonl").write_text(PAIR)
    with pytest.raises(DataError, match=r"part-2.jsonl line 1: .*began as text"):
        list(read_examples(str(tmp_path)))


def test_map_of_the_section_and_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "a", "extra": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"task": "t", "runs": [{"in": "i", "out": "o"}]}\n')
    nested = {"instruction": "task", "input": "runs.0.in", "output": "runs.0.out"}
    sources = [str(tmp_path / "a.jsonl"), Source(path=str(tmp_path / "b.jsonl"), map=nested)]
    first, second = read_examples(sources, default_map={"prompt": "question", "completion": "answer"})
    assert (first.prompt, first.completion) == ("q", "a")
    assert [message["content"] for message in second.messages] == ["t\n\ni", "o"]


def test_a_mapped_column_that_no_record_has_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"instruction": "a", "context": "b", "output": "c"}\n' * 2)
    with pytest.raises(DataError, match=r'"contxt", named for input, is in none of 2 records'):
        list(read_examples(str(tmp_path / "x.jsonl"), default_map={"input": "contxt"}))


def test_null_first_and_text_late_is_read(tmp_path: Path) -> None:
    records = [{"instruction": "a", "input": None, "output": "b"}] * 5000
    records.append({"instruction": "a", "input": "late", "output": "b"})  # type: ignore[dict-item]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    examples = list(read_examples(str(tmp_path / "x.jsonl")))
    assert len(examples) == 5001
    assert examples[-1].messages[0]["content"] == "a\n\nlate"
    assert "None" not in examples[0].messages[0]["content"]


@pytest.mark.parametrize("form", ["lines", "array"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    records = [json.dumps({"text": f"{number} " + "word " * 200}) for number in range(10_000)]
    path = tmp_path / ("x.json" if form == "array" else "x.jsonl")
    path.write_text("[" + ",\n".join(records) + "]" if form == "array" else "\n".join(records))
    del records
    assert path.stat().st_size > 10_000_000
    list(read_examples(str(path), default_format="text"))[:0]
    tracemalloc.start()
    assert sum(1 for _ in read_examples(str(path))) == 10_000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Measured: 0.1 MB for lines, 4 MB for an array, whose pieces are 1 MiB.
    assert peak_bytes < 6_000_000


VALUES = st.one_of(
    st.none(),
    st.text(max_size=8),
    st.integers(),
    st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=4)), max_size=2),
)
COLUMNS = st.sampled_from(["messages", "prompt", "completion", "text", "instruction", "output", "conversations", "x"])
LINES = st.one_of(
    st.dictionaries(COLUMNS, VALUES).map(json.dumps).map(str.encode),
    st.binary(max_size=30),
    st.just(PAIR.encode()),
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(LINES, max_size=6),
    st.sampled_from(["auto", *FORMATS]),
    st.sampled_from(["jsonl", "json", "csv", "jsonl.gz"]),
    st.sampled_from(["error", "skip"]),
)
def test_random_files_give_examples_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], format: str, ending: str, on_bad: Any
) -> None:
    path = tmp_path_factory.mktemp("random") / f"x.{ending}"
    path.write_bytes(b"\n".join(lines))
    try:
        outcome: Any = list(read_examples(str(path), default_format=format, on_bad_record=on_bad))
    except DataError as error:
        outcome = list(error.problems)
    assert outcome
    assert all(isinstance(one, Example) or (one.where.startswith(str(path)) and one.what) for one in outcome)
