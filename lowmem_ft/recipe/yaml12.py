"""YAML text to a tree that knows its lines. Values are left as text: what they are, the setting decides (`convert`).

PyYAML scans and parses; it does not resolve. So no YAML 1.1 value (`off`, `010`, `1:30`) is guessed, no object
is built, and every key keeps its line. Refused here, with the line: a repeated key, a key that is not a text, tags
other than `!!str`, `!!seq` and `!!map`, a second document, tabs as indentation, aliases that contain themselves or that
grow the recipe beyond `MOST_NODES`, and more than `DEEPEST` levels. Anchors, aliases and merge keys (`<<`) work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import yaml

from lowmem_ft.recipe.emit import quoted
from lowmem_ft.recipe.places import Place, Problems
from lowmem_ft.recipe.yaml_errors import CHARACTERS, explain

MOST_NODES = 20_000
DEEPEST = 30

NULLS = frozenset(("", "~", "null", "Null", "NULL"))
TRUE_WORDS = frozenset(form for word in ("true", "yes", "on") for form in (word, word.title(), word.upper()))
FALSE_WORDS = frozenset(form for word in ("false", "no", "off") for form in (word, word.title(), word.upper()))
_NUMBER = re.compile(
    r"[-+]?([0-9]+|0o[0-7]+|0x[0-9a-fA-F]+|(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN)"
)
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_TAGS = {"!!str": "tag:yaml.org,2002:str", "!!seq": "tag:yaml.org,2002:seq", "!!map": "tag:yaml.org,2002:map"}


@dataclass(frozen=True)
class Scalar:
    """A single value as text. `plain` is False for one in quotes, of a block (`|`, `>`) or tagged `!!str`."""

    text: str
    plain: bool
    place: Place

    @property
    def is_null(self) -> bool:
        """Whether it is empty, `~` or `null`, without quotes."""
        return self.plain and self.text in NULLS

    @property
    def shown(self) -> str:
        """The value as messages show it, sixty characters at most."""
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return text if self.plain else quoted(text)


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    place: Place


@dataclass(frozen=True)
class Table:
    """A mapping; each value has the place of its key. `refused`: a key in it was none, and is a problem already."""

    entries: Mapping[str, Node]
    place: Place
    refused: bool = False


Node: TypeAlias = Scalar | Items | Table


def not_a_text(plain: str) -> str | None:
    """What YAML readers take an unquoted text for, where it is not (or not for all of them) a text."""
    if plain in NULLS:
        return "empty" if not plain else "null"
    if plain in TRUE_WORDS:
        return "true" if plain.lower() == "true" else "true in YAML 1.1"
    if plain in FALSE_WORDS:
        return "false" if plain.lower() == "false" else "false in YAML 1.1"
    return "a number" if _NUMBER.fullmatch(plain) else None


def read_tree(text: str, place_of: Callable[[int], Place], problems: Problems) -> Node | None:
    """The tree of a YAML text.

    Args:
        text: the YAML, without byte order mark.
        place_of: the place of a line of the text, counted from 1.
        problems: receives all that is wrong.

    Returns:
        The tree, or None if the text is not YAML at all. An empty text gives an empty plain scalar.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    odd = CHARACTERS.search(text)
    if odd:
        place = place_of(text.count("\n", 0, odd.start()) + 1)
        problems.add(place, "", f"an invisible character, U+{ord(odd[0]):04X}", "Remove it")
        return None
    try:
        return _Builder(text, place_of, problems).document()
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        line, what, instead = explain(error, text)
        problems.add(place_of(line), "", what, instead)
    except _RefusedError as refusal:
        problems.add(refusal.place, "", refusal.what, refusal.instead)
    return None


class _RefusedError(Exception):
    def __init__(self, place: Place, what: str, instead: str) -> None:
        super().__init__(what)
        self.place, self.what, self.instead = place, what, instead


Event: TypeAlias = Any  # types-PyYAML gives events no anchor and no tag, and lets a mark be None


class _Builder:
    """Builds the tree from parser events. `_build` gives a node and how many nodes it stands for, aliases expanded."""

    def __init__(self, text: str, place_of: Callable[[int], Place], problems: Problems) -> None:
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self._place_of = place_of
        self._problems = problems
        self._anchors: dict[str, tuple[Node, int] | None] = {}

    def document(self) -> Node:
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return Scalar("", True, self._place_of(1))
        root, _ = self._build(next(self._events), "", DEEPEST)
        next(self._events)
        end = next(self._events)
        if not isinstance(end, yaml.StreamEndEvent):
            self._problems.add(
                self._place(end), "", "a second document begins here (---)", "A recipe is one document: remove the rest"
            )
        return root

    def _place(self, event: Event) -> Place:
        return self._place_of(event.start_mark.line + 1)

    def _build(self, event: Event, path: str, levels_left: int) -> tuple[Node, int]:
        place = self._place(event)
        if isinstance(event, yaml.AliasEvent):
            return self._aliased(str(event.anchor), place)
        if levels_left == 0:
            raise _RefusedError(place, f"nested more than {DEEPEST} levels deep", "A recipe needs three")
        if event.anchor:
            self._anchors[event.anchor] = None
        self._check_tag(event)
        if isinstance(event, yaml.ScalarEvent):
            built: tuple[Node, int] = self._scalar(event), 1
        elif isinstance(event, yaml.SequenceStartEvent):
            built = self._items(place, path, levels_left - 1)
        else:
            built = self._table(place, path, levels_left - 1)
        if built[1] > MOST_NODES:
            raise _RefusedError(place, f"aliases grow this to more than {MOST_NODES:,} values", "Write the values out")
        if event.anchor:
            self._anchors[event.anchor] = built
        return built

    def _aliased(self, name: str, place: Place) -> tuple[Node, int]:
        if name not in self._anchors:
            raise _RefusedError(place, f"the alias *{name} has no anchor above it", f"Mark a value with &{name} first")
        built = self._anchors[name]
        if built is None:
            raise _RefusedError(place, f"the alias *{name} contains itself", "Write the value out")
        return replace(built[0], place=place), built[1]

    def _check_tag(self, event: Event) -> None:
        if event.tag is not None and event.tag not in _TAGS.values() and event.tag != "!":
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._problems.add(
                self._place(event), "", f"the tag {tag} is not read", "Remove it: a recipe is plain values"
            )

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        place = self._place(event)
        odd = NOT_TEXT.search(event.value)
        if odd:
            raise _RefusedError(place, f"U+{ord(odd[0]):04X} is no character of a text", "Write the character itself")
        return Scalar(event.value, event.style is None and event.tag not in (_TAGS["!!str"], "!"), place)

    def _items(self, place: Place, path: str, levels_left: int) -> tuple[Node, int]:
        items: list[Node] = []
        size = 1
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            item, item_size = self._build(event, f"{path}[{len(items)}]", levels_left)
            items.append(item)
            size += item_size
        return Items(tuple(items), place), size

    def _table(self, place: Place, path: str, levels_left: int) -> tuple[Node, int]:
        written: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        merge_place: Place | None = None
        size, refused = 1, False
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key_place = self._place(event)
            key, _ = self._build(event, path, levels_left)
            name = key.text if isinstance(key, Scalar) else "?"
            value_path = f"{path}.{name}" if path else name
            value, value_size = self._build(next(self._events), value_path, levels_left)
            size += 1 + value_size
            if isinstance(key, Scalar) and key.plain and key.text == "<<":
                if merge_place:
                    self._repeated(value_path, key_place, merge_place)
                merge_place = merge_place or key_place
                merged = dict(self._merge(value, key_place)) | merged
            elif not isinstance(key, Scalar) or (key.plain and not_a_text(key.text)):
                refused = True
                self._refuse_key(key, key_place)
            elif key.text in written:
                self._repeated(value_path, key_place, written[key.text].place)
            else:
                written[key.text] = replace(value, place=key_place)
        return Table(merged | written, place, refused), size

    def _merge(self, value: Node, place: Place) -> Mapping[str, Node]:
        tables = value.items if isinstance(value, Items) else (value,)
        merged: dict[str, Node] = {}
        for table in tables:
            if not isinstance(table, Table):
                self._problems.add(
                    place, "<<", "only mappings can be merged", "Write <<: *NAME, with &NAME at a mapping"
                )
                continue
            merged = dict(table.entries) | merged
        return merged

    def _repeated(self, key: str, place: Place, first: Place) -> None:
        what = "this key is given twice"
        if first.line != place.line:
            what += f", on line {first.line} and on line {place.line}"
        self._problems.add(place, key, what, "Remove one of them")

    def _refuse_key(self, key: Node, place: Place) -> None:
        if isinstance(key, Scalar):
            what = f"the key {key.shown or '(nothing)'} is {not_a_text(key.text)}, and keys are texts"
            self._problems.add(place, "", what, f"Write {quoted(key.text)}: in quotes" if key.text else "Write a name")
        else:
            self._problems.add(place, "", "a list or mapping stands where a key belongs", "Write key: value")
