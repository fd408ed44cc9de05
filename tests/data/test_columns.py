"""The map, the decision of `format: auto`, and the map that an error proposes."""

from __future__ import annotations

from typing import Any

import pytest

from lowmem_ft.data.columns import ColumnMap, as_written, decide_format, propose_map
from lowmem_ft.data.messages import BadRecordError
from lowmem_ft.errors import DataError


def test_a_map_renames_and_reaches_into_nested_values() -> None:
    columns = ColumnMap({"instruction": "task", "input": "cases.0.given", "output": "cases.0.out"}, "alpaca")
    record = {"task": "Add.", "cases": [{"given": "2", "out": "3"}, {"given": "4", "out": "5"}], "id": 1}
    renamed = columns.apply(record, ("instruction", "output"))
    assert renamed == {"instruction": "Add.", "input": "2", "output": "3", "id": 1}
    assert columns.never_found() == []
    assert [note for note in columns.notes() if "1 of 1 records" in note and "cases.0.out" in note]


def test_a_column_with_a_dot_in_its_name_is_found_first() -> None:
    assert ColumnMap({"text": "a.b"}, "text").apply({"a.b": "x", "a": {"b": "y"}}, ()) == {"text": "x", "a": {"b": "y"}}


def test_a_mapped_name_hides_the_column_that_had_it() -> None:
    record = {"prompt": "old", "question": "new", "completion": "x"}
    assert ColumnMap({"prompt": "question"}, "auto").apply(record, ()) == {"prompt": "new", "completion": "x"}


def test_a_required_column_that_is_not_there_is_named() -> None:
    with pytest.raises(BadRecordError) as error:
        ColumnMap({"completion": "anser"}, "auto").apply({"prompt": "a", "answer": "b"}, ("prompt", "completion"))
    assert '"anser"' in str(error.value)
    assert "completion: answer" in str(error.value)


@pytest.mark.parametrize("column", ["cases.1.out", "cases.x", "cases.0.out.deeper", "none", "none.0"])
def test_an_optional_column_may_be_missing_and_is_reported_if_it_always_is(column: str) -> None:
    columns = ColumnMap({"input": column}, "alpaca")
    assert "input" not in columns.apply({"cases": [{"out": "3"}]}, ("instruction", "output"))
    assert columns.never_found() == ["input"]


@pytest.mark.parametrize(
    ("mapping", "format", "words"),
    [
        ({"complettion": "answer"}, "prompt_completion", ["complettion", "completion"]),
        ({"question": "prompt"}, "auto", ["question", "prompt: question"]),
        ({"text": "body"}, "messages", ["text", "messages"]),
    ],
)
def test_a_name_that_no_format_wants_is_refused(mapping: dict[str, str], format: str, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        ColumnMap(mapping, format)
    for word in words:
        assert word in str(error.value)


def _decided(*records: dict[str, Any], mapping: dict[str, str] | None = None) -> str:
    sample = [(f"x.jsonl line {line}", record) for line, record in enumerate(records, 1)]
    return decide_format(sample, mapping or {})


@pytest.mark.parametrize(
    ("records", "format"),
    [
        ([{"messages": [1]}], "messages"),
        ([{"conversations": [1]}], "sharegpt"),
        ([{"instruction": "a", "output": "b"}], "alpaca"),
        ([{"prompt": "a", "completion": "b"}], "prompt_completion"),
        ([{"text": "a"}], "text"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "preference"),
        ([{"messages": [1], "text": None}], "messages"),
        ([{"messages": [1]}, {"prompt": "a", "completion": "b"}, {"text": "c"}], "messages"),
        ([{"prompt": "a"}, {"prompt": "a", "completion": "b"}], "prompt_completion"),
        ([{"text": "a"}, {"messages": [1]}, {"messages": [2]}], "messages"),
        ([{"prompt": "a", "completion": None}], "prompt_completion"),
    ],
)
def test_auto_takes_what_most_of_the_first_records_are(records: list[dict[str, Any]], format: str) -> None:
    assert _decided(*records) == format


def test_auto_refuses_two_usable_columns_and_names_both() -> None:
    with pytest.raises(DataError) as error:
        _decided({"messages": [1]}, {"messages": [1], "text": "a"})
    for word in ("line 2", '"messages"', '"text"', "format: messages"):
        assert word in str(error.value)


def test_auto_with_a_map_takes_the_format_that_wants_its_names() -> None:
    record = {"prompt": "a", "completion": "b", "text": "c"}
    assert _decided(record, mapping={"completion": "answer"}) == "prompt_completion"


@pytest.mark.parametrize(
    ("record", "proposed"),
    [
        ({"question": "a", "answer": "b"}, "{prompt: question, completion: answer}"),
        ({"id": "7", "Query": "a", "Response": "b"}, "{prompt: Query, completion: Response}"),
        ({"body": "a"}, "{text: body}"),
        ({"anything": "a"}, "{text: anything}"),
        ({"chat": [{"role": "user", "content": "a"}]}, "{messages: chat}"),
        ({"data": {"turns": [{"from": "human", "value": "a"}]}}, "{conversations: data.turns}"),
        (
            {"instruction": "a", "cases": [{"input": "b", "output": "c"}]},
            "{instruction: instruction, input: cases.0.input, output: cases.0.output}",
        ),
    ],
)
def test_auto_proposes_a_map_for_columns_it_does_not_know(record: dict[str, Any], proposed: str) -> None:
    assert as_written(propose_map(record) or {}) == f"map: {proposed}"
    with pytest.raises(DataError) as error:
        _decided(record)
    assert f"Write map: {proposed}" in str(error.value)
    assert "line 1" in str(error.value)


@pytest.mark.parametrize("record", [{}, {"a": 1}, {"x": "a", "y": "b"}])
def test_auto_lists_the_formats_where_nothing_is_alike(record: dict[str, Any]) -> None:
    assert propose_map(record) is None
    with pytest.raises(DataError, match="prompt_completion: prompt, completion"):
        _decided(record)
