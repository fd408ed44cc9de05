"""A record becomes an example, or an error that says what to write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.data.formats import FORMATS, Example, make_example
from lowmem_ft.data.messages import BadRecordError

USER, ANSWER = {"role": "user", "content": "Capital of Peru?"}, {"role": "assistant", "content": "Lima."}
SYSTEM = {"role": "system", "content": "Be brief."}


def _made(record: dict[str, Any], format: str) -> Example:
    return make_example(record, format, "train.jsonl", 14, 2)


@pytest.mark.parametrize(
    ("format", "record", "kind", "fields"),
    [
        ("messages", {"messages": [USER, ANSWER], "id": 7}, "chat", {"messages": (USER, ANSWER)}),
        (
            "messages",
            {"messages": [USER], "tools": [{"name": "f"}]},
            "chat",
            {"messages": (USER,), "tools": ({"name": "f"},)},
        ),
        (
            "messages",
            {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]},
            "chat",
            {"messages": (USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}), "untrained": (1,)},
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "Capital of Peru?"}, {"from": "gpt", "value": "Lima."}]},
            "chat",
            {"messages": (USER, ANSWER)},
        ),
        (
            "sharegpt",
            {"system": "Be brief.", "conversations": [{"from": "user", "value": "Capital of Peru?"}]},
            "chat",
            {"messages": (SYSTEM, USER)},
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "observation", "value": "wet"}]},
            "chat",
            {"messages": (SYSTEM, {"role": "tool", "content": "wet"})},
        ),
        ("alpaca", {"instruction": "Capital of Peru?", "output": "Lima."}, "chat", {"messages": (USER, ANSWER)}),
        (
            "alpaca",
            {"instruction": "Capital of Peru?", "input": None, "output": "Lima."},
            "chat",
            {"messages": (USER, ANSWER)},
        ),
        (
            "alpaca",
            {"instruction": "Capital of Peru?", "input": "", "output": "Lima."},
            "chat",
            {"messages": (USER, ANSWER)},
        ),
        (
            "alpaca",
            {"instruction": "Add.", "input": "2, 3", "output": "5", "system": "Be brief."},
            "chat",
            {"messages": (SYSTEM, {"role": "user", "content": "Add.\n\n2, 3"}, {"role": "assistant", "content": "5"})},
        ),
        (
            "prompt_completion",
            {"prompt": "Room?", "completion": "007"},
            "completion",
            {"prompt": "Room?", "completion": "007"},
        ),
        (
            "prompt_completion",
            {"prompt": "", "completion": " null"},
            "completion",
            {"prompt": "", "completion": " null"},
        ),
        (
            "prompt_completion",
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
            "chat",
            {"messages": (USER, ANSWER, USER, ANSWER), "untrained": (1,)},
        ),
        ("text", {"text": " A line.\n"}, "text", {"text": " A line.\n"}),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        (
            "preference",
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [SYSTEM]},
            "preference",
            {"prompt": (USER,), "chosen": (ANSWER,), "rejected": (SYSTEM,)},
        ),
        (
            "preference",
            {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, USER]},
            "preference",
            {"prompt": (SYSTEM, USER), "chosen": (ANSWER,), "rejected": (USER,)},
        ),
    ],
)
def test_records_in_their_form(format: str, record: dict[str, Any], kind: Any, fields: dict[str, Any]) -> None:
    assert _made(record, format) == Example(kind, "train.jsonl", 14, source=2, **fields)


@pytest.mark.parametrize(
    ("format", "record", "words"),
    [
        ("messages", {}, ["messages", "missing", "empty"]),
        ("messages", {"messages": []}, ['"messages" is empty']),
        (
            "messages",
            {"prompt": "a", "completion": "b"},
            ["messages", "missing", '"prompt"', "form of prompt_completion"],
        ),
        ("messages", {"messages": [USER], "functions": [{}]}, ["functions", "tools"]),
        ("sharegpt", {"conversations": []}, ['"conversations" is empty']),
        (
            "sharegpt",
            {"conversations": [{"from": "narrator", "value": "x"}]},
            ["narrator", "human", "gpt", "observation"],
        ),
        ("sharegpt", {"conversations": [{"from": "Human", "value": "x"}]}, ['"Human"']),
        ("sharegpt", {"conversations": [{"from": ["gpt"], "value": "x"}]}, ["a list of 1"]),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": None}]}, ["turn 1", "value", "null"]),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, ["value", "missing"]),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": 7}]}, ["value", "7"]),
        ("sharegpt", {"conversations": ["x"]}, ["turn 1"]),
        ("sharegpt", {"conversations": [USER]}, ["map: {messages: conversations}"]),
        ("sharegpt", {"conversations": [{"from": "system", "value": "x"}], "system": "y"}, ["system", "one of them"]),
        ("alpaca", {"instruction": "a", "output": None}, ["output", "null"]),
        ("alpaca", {"instruction": "a", "output": 5}, ["output", "5"]),
        ("alpaca", {"instruction": "a", "input": 5, "output": "b"}, ["input", "5"]),
        ("alpaca", {"instruction": "", "output": "b"}, ["instruction", "empty"]),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["q", "a"]]}, ["history", "messages"]),
        ("prompt_completion", {"prompt": "a"}, ["completion", "missing", '"prompt"']),
        ("prompt_completion", {"prompt": "a", "completions": "b"}, ["completion", "map: {completion: completions}"]),
        ("prompt_completion", {"prompt": "a", "completion": None}, ["completion", "null"]),
        ("prompt_completion", {"prompt": "a", "completion": 2.5}, ["completion", "2.5", "text"]),
        ("prompt_completion", {"prompt": "a", "completion": True}, ["completion", "true"]),
        ("prompt_completion", {"prompt": [USER], "completion": "b"}, ["prompt", "completion", "both"]),
        ("text", {"text": ["a"]}, ["text", "a list of 1"]),
        ("preference", {"prompt": "a", "chosen": "b"}, ["rejected", "missing"]),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, ["same"]),
        ("preference", {"prompt": "a", "chosen": "", "rejected": "b"}, ["chosen", "empty"]),
        ("preference", {"chosen": "b", "rejected": "c"}, ["prompt", "missing"]),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": [ANSWER]}, ["one form"]),
        ("preference", {"prompt": "a", "chosen": [{"role": "x"}], "rejected": [ANSWER]}, ["chosen", "role"]),
    ],
)
def test_records_not_in_their_form(format: str, record: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadRecordError) as error:
        _made(record, format)
    for word in words:
        assert word in str(error.value)
    assert error.value.instead


def test_an_example_says_where_it_stands() -> None:
    assert _made({"text": "a"}, "text").where() == "train.jsonl line 14"


COLUMNS = sorted({name for one in FORMATS.values() for name in (*one.required, *one.optional)})
KEYS = st.sampled_from(
    [
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "type",
        "text",
        "weight",
        "user",
        "assistant",
    ]
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), KEYS, st.floats()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(st.sampled_from(COLUMNS), VALUES))
def test_any_record_is_an_example_or_a_fault(format: str, record: dict[str, Any]) -> None:
    try:
        outcome: Any = _made(record, format)
    except BadRecordError as error:
        outcome = error.what and error.instead
    assert outcome
