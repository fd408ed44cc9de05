"""A list of turns in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

import pytest

from lowmem_ft.data.messages import ROLES, BadRecordError, check_messages, check_tools

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "clock", "arguments": {}}}


def _refused(turns: Any, *words: str) -> None:
    with pytest.raises(BadRecordError) as error:
        check_messages(turns, "messages")
    for word in words:
        assert word in str(error.value)
    assert error.value.instead


@pytest.mark.parametrize("role", ROLES)
def test_each_role_is_kept(role: str) -> None:
    assert check_messages([{"role": role, "content": "x"}], "messages") == ({"role": role, "content": "x"},)


def test_text_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]
    assert check_messages([{"role": "user", "content": parts}], "messages")[0]["content"] == "One two"
    assert check_messages([{"role": "user", "content": []}], "messages")[0]["content"] == ""


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video_url"])
def test_other_parts_are_refused_by_name(kind: str) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": kind, kind: {}}]}
    _refused([USER, turn], "turn 2", kind, "not supported")


@pytest.mark.parametrize("turn", [{"content": None}, {}])
def test_null_content_is_allowed_beside_tool_calls_only(turn: dict[str, Any]) -> None:
    checked = check_messages([{"role": "assistant", **turn, "tool_calls": [CALL]}], "messages")
    assert checked == ({"role": "assistant", "content": None, "tool_calls": [CALL]},)
    _refused([{"role": "assistant", **turn}], "content", "assistant")
    _refused([{"role": "assistant", **turn, "tool_calls": []}], "content")
    _refused([{"role": "user", **turn}], "content")


@pytest.mark.parametrize("arguments", ['{"city": "Linz"}', ' {"city":"Linz"}\n', {"city": "Linz"}])
def test_arguments_come_out_as_an_object(arguments: Any) -> None:
    call = {"id": "1", "function": {"name": "rain", "arguments": arguments}}
    (turn,) = check_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], "messages")
    assert turn["tool_calls"] == [{"id": "1", "function": {"name": "rain", "arguments": {"city": "Linz"}}}]


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ("text", ["tool_calls", "list"]),
        (["text"], ["tool call 1", "function"]),
        ([{"name": "f", "arguments": {}}], ["tool call 1", '"function"']),
        ([{"type": "code", "function": {"name": "f", "arguments": {}}}], ["type", "code"]),
        ([CALL, {"function": {"arguments": {}}}], ["tool call 2", "name"]),
        ([{"function": {"name": "f"}}], ["arguments", "missing", "{}"]),
        ([{"function": {"name": "f", "arguments": None}}], ["arguments", "null"]),
        ([{"function": {"name": "f", "arguments": "no json"}}], ["arguments", "no json"]),
        ([{"function": {"name": "f", "arguments": "[1]"}}], ["arguments", "object"]),
        ([{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}], ["arguments", "twice"]),
    ],
)
def test_faults_in_tool_calls(calls: Any, words: list[str]) -> None:
    _refused([USER, {"role": "assistant", "content": "", "tool_calls": calls}], "turn 2", *words)


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([], ["messages", "empty"]),
        (None, ["messages", "null"]),
        ("text", ["messages", "list"]),
        ({"role": "user"}, ["messages", "list"]),
        (["text"], ["turn 1", "the text"]),
        ([None], ["turn 1", "null"]),
        ([USER, {"content": "x"}], ["turn 2", 'no "role"']),
        ([{"role": "Assistant", "content": "x"}], ['"Assistant"', '"assistant"']),
        ([{"role": "narrator", "content": "x"}], ["narrator", *ROLES]),
        ([{"role": 7, "content": "x"}], ["7"]),
        ([{"role": None, "content": "x"}], ["null"]),
        ([{"role": ["user"], "content": "x"}], ["a list of 1"]),
        ([{"from": "human", "value": "x"}], ["sharegpt", "conversations"]),
        ([{"role": "user", "content": 7}], ["7", "text is wanted"]),
        ([{"role": "user", "content": {"text": "x"}}], ["object", "text is wanted"]),
        ([{"role": "user", "content": ["x"]}], ["part", '{"type": "text"']),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], ["part"]),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], ["tool_calls", "user"]),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], ["function_call", "tool_calls"]),
        ([{"role": "assistant", "content": "x", "weight": 0.5}], ["weight", "0.5"]),
        ([{"role": "user", "content": "x", "weight": 0}], ["weight", "assistant"]),
    ],
)
def test_faults_in_turns(turns: Any, words: list[str]) -> None:
    _refused(turns, *words)


def test_further_keys_stay_and_null_goes() -> None:
    turn = {"role": "tool", "content": "wet", "tool_call_id": "1", "name": "rain", "audio": None}
    assert check_messages([turn], "messages") == (
        {"role": "tool", "content": "wet", "tool_call_id": "1", "name": "rain"},
    )


def test_tools_from_a_list_or_from_text() -> None:
    tool = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
    assert check_tools({"tools": [tool]}) == (tool,)
    assert check_tools({"tools": '[{"name": "rain"}]'}) == ({"name": "rain"},)
    for none in ({}, {"tools": None}, {"tools": []}, {"tools": ""}, {"tools": "[]"}):
        assert check_tools(none) is None


@pytest.mark.parametrize("tools", ["text", {"name": "f"}, [7], [{}], [{"function": "f"}], 7, ["f"], "{}"])
def test_faults_in_tools(tools: Any) -> None:
    with pytest.raises(BadRecordError, match="tool"):
        check_tools({"tools": tools})
