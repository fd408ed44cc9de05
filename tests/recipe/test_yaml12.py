from __future__ import annotations

from typing import Any

import pytest

from lowmem_ft.recipe.places import Place, Problems
from lowmem_ft.recipe.yaml12 import DEEPEST, MOST_NODES, Items, Node, Scalar, Table, not_a_text, read_tree


def read(text: str) -> tuple[Node | None, list[str]]:
    problems = Problems()
    tree = read_tree(text, lambda line: Place("f", line), problems)
    return tree, [str(problem) for problem in problems.in_order()]


def plain(node: Node | None) -> Any:
    """The tree without places; a quoted text is a tuple."""
    match node:
        case Scalar():
            return node.text if node.plain else (node.text,)
        case Items():
            return [plain(item) for item in node.items]
        case Table():
            return {key: plain(value) for key, value in node.entries.items()}
    return None


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a: off\nb: 'off'\nc: [010, 1:30]", {"a": "off", "b": ("off",), "c": ["010", "1:30"]}),
        ("a: |\n  x\n  y\n", {"a": ("x\ny\n",)}),
        ("a:\nb: ~", {"a": "", "b": "~"}),
        ("a: !!str 1\nb: ! 2", {"a": ("1",), "b": ("2",)}),
        ("a: &x {y: 1}\nb: *x", {"a": {"y": "1"}, "b": {"y": "1"}}),
        ("a: &x 1\nb: &x 2\nc: *x", {"a": "1", "b": "2", "c": "2"}),
        ("a: {<<: {x: 1, y: 2}, x: 3}", {"a": {"x": "3", "y": "2"}}),
        ("<<: [{x: 1}, {x: 2, y: 3}]", {"x": "1", "y": "3"}),
        ("'<<': 1", {"<<": ("1",)} | {"<<": "1"}),
        ("? a\n: b", {"a": "b"}),
        ("", ""),
    ],
)
def test_tree_keeps_texts_as_written(text: str, tree: Any) -> None:
    assert read(text) == (read(text)[0], [])
    assert plain(read(text)[0]) == tree


def test_values_have_the_line_of_their_key_and_aliases_that_of_their_use() -> None:
    tree, _ = read("a: &x\n  b: 1\nc:\n  *x\n<<: {d: 1}\n")
    assert isinstance(tree, Table)
    assert {key: node.place.line for key, node in tree.entries.items()} == {"d": 5, "a": 1, "c": 3}
    inner = tree.entries["c"]
    assert isinstance(inner, Table)
    assert inner.entries["b"].place.line == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: 1\nb:\n  c: 1\n  c: 2",
            "f line 4: b.c: this key is given twice, on line 3 and on line 4. Remove one of them",
        ),
        ("a: [{b: 1, b: 2}]", "f line 1: a[0].b: this key is given twice. Remove one of them"),
        ("<<: {}\n<<: {}", "f line 2: <<: this key is given twice, on line 1 and on line 2. Remove one of them"),
        ("<<: [1]", "f line 1: <<: only mappings can be merged. Write <<: *NAME, with &NAME at a mapping"),
        ("true: 1", 'f line 1: the key true is true, and keys are texts. Write "true": in quotes'),
        ("? \n: 1", "f line 1: the key (nothing) is empty, and keys are texts. Write a name"),
        ("a: !x 1", "f line 1: the tag !x is not read. Remove it: a recipe is plain values"),
        ("a: 1\n---\nb: 2", "f line 2: a second document begins here (---). A recipe is one document: remove the rest"),
    ],
)
def test_problem_is_named_and_the_rest_still_read(text: str, message: str) -> None:
    tree, messages = read(text)
    assert messages == [message]
    assert isinstance(tree, Table)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\r\nb: 2\rc: \x01", "f line 3: an invisible character, U+0001"),
        ("a: \r [x", "f line 2: the list that opens here lacks a comma or its closing ]"),
        ("a: *b", "f line 1: the alias *b has no anchor above it"),
        ("a: &b [*b]", "f line 1: the alias *b contains itself"),
        ("[" * (DEEPEST + 1), f"f line 1: nested more than {DEEPEST} levels deep"),
        ("a: 1\nb: \x01", "f line 2: an invisible character, U+0001"),
        ('a: "\\0"', "f line 1: U+0000 is no character of a text"),
        ('a: "\\ud800"', "f line 1: U+D800 is no character of a text"),
        ("a: {b: 1", "f line 1: the mapping that opens here lacks a comma or its closing }"),
        ("a: {", "f line 1: the text ends inside a list or mapping"),
    ],
)
def test_text_that_is_no_tree_gives_one_problem(text: str, words: str) -> None:
    tree, messages = read(text)
    assert tree is None
    assert len(messages) == 1
    assert messages[0].startswith(words)


def test_aliases_cannot_grow_a_text_without_bound() -> None:
    bomb = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 40))
    tree, messages = read(bomb)
    assert tree is None
    assert messages == [f"f line 5: aliases grow this to more than {MOST_NODES:,} values. Write the values out"]


@pytest.mark.parametrize(
    ("text", "taken_for"),
    [
        ("", "empty"),
        ("~", "null"),
        ("true", "true"),
        ("Yes", "true in YAML 1.1"),
        ("OFF", "false in YAML 1.1"),
        ("12", "a number"),
        ("1e-4", "a number"),
        ("0o7", "a number"),
        ("-.inf", "a number"),
        ("1:30", None),
        ("1_0", None),
        ("2024-05-01", None),
        ("oN", None),
        ("q_proj", None),
    ],
)
def test_what_an_unquoted_text_is_taken_for(text: str, taken_for: str | None) -> None:
    assert not_a_text(text) == taken_for
