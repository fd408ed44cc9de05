"""What a template leaves out is noticed."""

from __future__ import annotations

import pytest

from lowmem_ft.data.unseen import not_rendered, unseen_extras, unseen_tools

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " first\nquestion "},
    {"role": "assistant", "content": "answer"},
    {"role": "tool", "content": 'say "x"'},
]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('Be kind. first\nquestion answer say "x"', None),
        ('first question say "x" Be kind.', None),
        (r"Be kind. first question say \"x\"", None),
        ("Be kind. first question", "does not render turn 4 (tool)"),
        ('first question say "x"', "does not render turn 1 (system)"),
        ('Be kind. say "x" first\nquestion', "moves turn 4 (tool)"),
    ],
)
def test_turns_that_are_lost_or_moved_are_named(text: str, found: str | None) -> None:
    said = not_rendered(MESSAGES, text)
    assert said is None if found is None else said is not None and found in said


def test_tool_calls_and_reasoning_that_are_not_in_the_answer_are_named() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "clock"}}], "reasoning_content": "so  it is"}
    assert unseen_extras(message, "clock() so it is") == []
    assert len(unseen_extras(message, "so it is")) == 1
    assert len(unseen_extras(message, "")) == 2


def test_tools_are_unseen_if_none_of_their_names_is_shown() -> None:
    tools = [{"function": {"name": "clock"}}, {"name": "calendar"}]
    assert unseen_tools(tools, "nothing")
    assert not unseen_tools(tools, "a calendar")
    assert not unseen_tools(None, "nothing")
