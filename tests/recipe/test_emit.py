from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.recipe.emit import quoted, text_as_yaml, yaml_block, yaml_of
from lowmem_ft.recipe.yaml12 import not_a_text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (2e-5, "2.0e-05"),
        (1.5e-7, "1.5e-07"),
        (0.03, "0.03"),
        ("q_proj", "q_proj"),
        ("./a-b/c.jsonl", "./a-b/c.jsonl"),
        ("off", '"off"'),
        ("1e-4", '"1e-4"'),
        (".inf", '".inf"'),
        ("", '""'),
        ('a "b"\n', r'"a \"b\"\n"'),
        ("\u2028\x7f", r'"\u2028\x7f"'),
        (["a", 1], "[a, 1]"),
        ({"path": "a b", "weight": 2.0}, '{path: "a b", weight: 2.0}'),
    ],
)
def test_value_on_one_line(value: Any, shown: str) -> None:
    assert yaml_of(value) == shown


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_quoted_text_is_read_back_by_any_reader(text: str) -> None:
    assert yaml.safe_load(quoted(text)) == text
    assert quoted(text).isprintable()


@given(st.text("aenotrufys01.-_/x~", max_size=6))
def test_text_never_looks_like_another_type(text: str) -> None:
    shown = text_as_yaml(text)
    assert yaml.safe_load(shown) == text
    assert shown.startswith('"') or not_a_text(shown) is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_back_exactly_by_yaml_1_1_too(number: float) -> None:
    assert yaml.safe_load(yaml_of(number)) == number


def test_block_indents_one_level() -> None:
    assert yaml_block({"seed": 1, "train": {"lr": 0.1, "x": {"a": 1}}, "map": {}}) == (
        "seed: 1\ntrain:\n  lr: 0.1\n  x: {a: 1}\nmap: {}\n"
    )
