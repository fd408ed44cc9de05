from __future__ import annotations

import pytest
import yaml

from lowmem_ft.recipe.yaml_errors import explain


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 'x\nb: 1\n", 1, "never closed"),
        ('a: 1\nb: "x\n---\n', 2, "never closed"),
        ('a: "b\nc: 1\nd: "e"\n', 1, "closes only on line 3"),
        ("a:\n\tb: 1", 2, "tab"),
        ("a: x\t# note", 1, "tab"),
        ("a: [1,\n 2\nb: 3", 1, "list that opens here"),
        ("a: {b: 1\nc: 2", 1, "mapping that opens here"),
        ("a:\n  - x: ${Y}\n    z: {s: ${T:-1}}", 3, "${...}"),
        ("a: b: c", 1, "second `key: value`"),
        ("a: 1\n b: 2", 2, "second `key: value`"),
        ("lr:2\nb: 3", 2, "space after the colon"),
        ("a: 1\nword\n", 2, "not `key: value`"),
        ("a: @x", 1, "cannot begin with @"),
        ("a: `x`", 1, "cannot begin with `"),
        ("a: - b", 1, "list item"),
        ('a: "\\q"', 1, "backslash"),
        ("a: ,b", 1, "value is missing before ','"),
        ("a: 'it's'", 1, "follows a closing quote"),
        ("a:\n  b: 1\n c: 2", 3, "indentation"),
        ("%YAML 2.0\n---\na: 1", 1, "YAML version"),
        ('a: 1\nb: "\\UFFFFFFFF"', 2, "out of range"),
        ("a: >x\n  y", 1, "not YAML"),
    ],
)
def test_line_of_the_mistake_and_its_name(text: str, line: int, words: str) -> None:
    with pytest.raises((yaml.YAMLError, ValueError, OverflowError)) as caught:
        list(yaml.parse(text, Loader=yaml.SafeLoader))
    found_line, what, instead = explain(caught.value, text)
    assert found_line == line
    assert words in f"{what}. {instead}"
    assert instead
