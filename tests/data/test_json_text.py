"""Strict JSON, and what values are called."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.data.json_text import Bad, bad_bytes, describe, name_keys, parse_json, shorten


@given(st.text(max_size=60))
def test_parse_json_gives_a_value_or_a_fault(text: str) -> None:
    value = parse_json(text)
    if not isinstance(value, Bad):
        assert value == json.loads(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "twice"),
        ("NaN", "NaN"),
        ("[1e400]", "too large"),
        ('{"a": ', "before it is finished"),
        ('["\\ud800"]', "surrogate"),
        ("[" * 150 + "]" * 150, "deep"),
        ("[" * 100_000, "deep"),
        ('{"a": 1} x', "follows the end"),
        ("", "before it is finished"),
        ("\ufeff{}", "not JSON"),
    ],
)
def test_what_python_lets_through_is_refused(text: str, words: str) -> None:
    bad = parse_json(text)
    assert isinstance(bad, Bad)
    assert words in bad.what
    assert bad.instead


def test_depth_up_to_the_limit_is_accepted() -> None:
    assert parse_json("[" * 100 + "]" * 100) == json.loads("[" * 100 + "]" * 100)
    wide = [[1]] * 200
    assert parse_json(json.dumps(wide)) == wide


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (7, "the number 7"),
        ("a\nb", r'the text "a\nb"'),
        ([1, 2], "a list of 2"),
        ({}, "an empty object"),
        ({"b": 1}, 'an object with "b"'),
        (b"raw", "bytes"),
    ],
)
def test_values_are_called_by_their_kind(value: Any, words: str) -> None:
    assert words in describe(value)


def test_names_stay_short_and_printable() -> None:
    assert shorten("x" * 100) == "x" * 39 + "…"
    assert shorten("a\x1b[31m") == r"a\x1b[31m"
    assert shorten("\ud800") == r"\ud800"
    assert name_keys("abcdefghij") == '"a", "b", "c", "d", "e", "f", "g", "h" and 2 more'
    assert "position 1 " in bad_bytes(0xFF, 0).what
