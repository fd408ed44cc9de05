"""Settings from the command line: `section.key=value`, put into the tree of the file before anything is converted.

So an override follows the same rules as a line of the file, and a wrong value that it replaces is no longer a problem.
It replaces its setting as a whole, except that sections are given key by key. Of settings that exclude each other
(`train.epochs`, `train.steps`) the one on the command line replaces the one in the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowmem_ft.recipe.allowed import sections
from lowmem_ft.recipe.places import Place, Problems
from lowmem_ft.recipe.schema import EXCLUSIVE
from lowmem_ft.recipe.yaml12 import Items, Node, Scalar, Table, read_tree

_KEY = re.compile(r"[^\s.=]+(\.[^\s.=]+)*")


@dataclass(frozen=True)
class Override:
    """One override: its dotted key and the tree of its value."""

    key: str
    value: Node


def read_overrides(texts: Sequence[str], file: str, problems: Problems) -> list[Override]:
    """Reads overrides; the same key twice is an error, as it is in a file."""
    found: dict[str, Override] = {}
    for number, text in enumerate(texts, start=1):
        place = Place(file, 0, text, number)
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key) or key.startswith("-"):
            bare = key.strip().lstrip("-")
            better = text.strip().lstrip("-") if equals and _KEY.fullmatch(bare) else "train.lr=2e-4"
            problems.add(place, "", "this is not section.key=value", f"Write for example {better}")
            continue
        if key in found:
            problems.add(place, key, "this setting is given twice on the command line", "Remove one of them")
            continue
        tree = read_tree(value, lambda line, place=place: place, problems)  # type: ignore[misc]
        if tree is None:
            continue
        if key in sections() and "." not in key and not (isinstance(tree, Scalar) and tree.is_null):
            problems.add(place, key, f"{key} is a section", f"Give its settings one by one: {key}.KEY=VALUE")
            continue
        found[key] = Override(key, tree)
    return list(found.values())


def apply_overrides(root: Table, overrides: Sequence[Override], problems: Problems) -> Table:
    """The tree with the overrides in it."""
    given = {
        override.key for override in overrides if not (isinstance(override.value, Scalar) and override.value.is_null)
    }
    for group in EXCLUSIVE:
        if given.intersection(group):
            for key in group:
                root = _without(root, key.split("."))
    for override in overrides:
        root = _with(root, override.key.split("."), override, problems)
    return root


def _without(table: Table, path: list[str]) -> Table:
    inner = table.entries.get(path[0])
    entries = dict(table.entries)
    if len(path) == 1:
        entries.pop(path[0], None)
    elif isinstance(inner, Table):
        entries[path[0]] = _without(inner, path[1:])
    return replace(table, entries=entries)


def _with(table: Table, path: list[str], override: Override, problems: Problems) -> Table:
    name, place = path[0], override.value.place
    inner = override.value
    if len(path) > 1:
        inner = table.entries.get(name, Table({}, place))
        if isinstance(inner, Scalar) and inner.is_null:
            inner = Table({}, place)
        if not isinstance(inner, Table):
            outer = override.key.removesuffix("." + ".".join(path[1:]))
            kind = "a list" if isinstance(inner, Items) else "one value"
            where = f" on line {inner.place.line}" if inner.place.line else ""
            what = f"{outer} is {kind}{where}, and has no {path[1]}"
            problems.add(place, override.key, what, f"Replace it as a whole: {outer}=VALUE")
            return table
        inner = _with(inner, path[1:], override, problems)
    return replace(table, entries={**table.entries, name: inner})
