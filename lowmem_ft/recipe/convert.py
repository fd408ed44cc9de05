"""From the tree of a recipe to values of the right types. What is wrong is said here, one problem for one mistake.

How a value is read depends on its setting:

- true or false: `true`, `false`, `yes`, `no`, `on`, `off` without quotes. In quotes they are texts, and refused.
- a number: any exact form, also in quotes (`"2"`), and `8.0` where a whole number is wanted; see `numerals`.
- a text or a fixed word: as written. What some YAML version takes for something else (`off`, `2024`) needs quotes.
- `${NAME}` and `${NAME:-default}` are replaced in every value, before it is read; `$${` is a literal `${`.
  A variable that is unset or empty takes the default, as in a shell. For what a variable holds, quotes do not matter.
- an empty or null section is an absent one; an empty or null setting is only right where null is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from lowmem_ft.errors import nearest
from lowmem_ft.recipe.allowed import Allowed, Setting, settings_of
from lowmem_ft.recipe.emit import quoted, yaml_of
from lowmem_ft.recipe.names import unknown_name
from lowmem_ft.recipe.numerals import NotANumberError, read_number
from lowmem_ft.recipe.places import Place, Problems
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.recipe.section import Section
from lowmem_ft.recipe.yaml12 import FALSE_WORDS, NOT_TEXT, NULLS, TRUE_WORDS, Items, Node, Scalar, Table, not_a_text

INVALID: Final = object()
"""Stands where a value was refused, so that the rest keeps its place."""

_VARIABLE = re.compile(r"\$\$\{|\$\{([^{}]*)\}?")
_VARIABLE_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


class Converter:
    """Converts one recipe and notes where each setting was written.

    Args:
        environment: variables for `${NAME}`.
        problems: receives all that is wrong.

    Attributes:
        places: the place of each setting that was written, by dotted key; list items as `data.train[0]`.
    """

    def __init__(self, environment: Mapping[str, str], problems: Problems) -> None:
        self.places: dict[str, Place] = {}
        self._environment = environment
        self._problems = problems

    def recipe(self, root: Table) -> dict[str, Any]:
        """The values that were written, as nested dicts and lists with `INVALID` where one was refused."""
        return self._section(root, Recipe, "")

    def _section(self, table: Table, section: type[Section], path: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        settings = settings_of(section)
        meant = set()
        for name, node in table.entries.items():
            key = f"{path}.{name}" if path else name
            if name not in settings:
                wrong = unknown_name(section, path, name, node)
                meant.add(wrong.meant)
                self._problems.add(node.place, key, wrong.what, wrong.instead)
                continue
            self.places[key] = node.place
            if settings[name].is_section and isinstance(node, Scalar) and node.is_null:
                continue
            values[name] = self._value(node, settings[name], key)
        for setting in settings.values():
            if setting.required and setting.name not in values and setting.name not in meant:
                self._missing(table, setting, f"{path}.{setting.name}" if path else setting.name)
        return values

    def _missing(self, table: Table, setting: Setting, key: str) -> None:
        place = self.places.get(key, table.place if "." in key else replace(table.place, line=0))
        self._problems.add(place, key, "this is needed, and not given", f"Write for example {setting.paste}")

    def _value(self, node: Node, setting: Setting, key: str) -> Any:
        self.places[key] = node.place
        allowed = setting.allowed
        match node:
            case Scalar():
                return self._scalar(node, setting, key)
            case Table() if allowed.section:
                return self._section(node, allowed.section, key)
            case Table() if allowed.values and len(node.entries) >= allowed.shortest:
                inner = replace(setting, allowed=allowed.values)
                return {name: self._value(item, inner, f"{key}.{name}") for name, item in node.entries.items()}
            case Items() if allowed.items and len(node.items) >= allowed.shortest:
                inner = replace(setting, allowed=allowed.items)
                return [self._value(item, inner, f"{key}[{index}]") for index, item in enumerate(node.items)]
        return self._wrong_shape(node, setting, key)

    def _wrong_shape(self, node: Table | Items, setting: Setting, key: str) -> Any:
        if isinstance(node, Table) and node.refused:
            return INVALID
        empty = not (node.entries if isinstance(node, Table) else node.items)
        kind = "a list" if isinstance(node, Items) else "a mapping (key: value)"
        what = f"{'an empty' + kind[1:] if empty else kind} is not {self._wanted(setting)}"
        if setting.is_section and isinstance(node, Items):
            return self._refuse(node, key, what, f"Write its keys without dashes, for example {setting.paste}")
        return self._refuse(node, key, what, f"Write for example {_example(node, setting, key)}")

    def _refuse(self, node: Node, key: str, what: str, instead: str) -> Any:
        self._problems.add(node.place, key, what, instead)
        return INVALID

    def _scalar(self, node: Scalar, setting: Setting, key: str) -> Any:
        allowed = setting.allowed
        text = self._expanded(node, key)
        if text is None:
            return INVALID
        plain = node.plain or text != node.text
        if plain and text in NULLS and allowed.null:
            return None
        if allowed.flag and plain and text in TRUE_WORDS | FALSE_WORDS:
            return text in TRUE_WORDS
        if text in allowed.words:
            return text
        why = better = ""
        if allowed.items and not allowed.text and "," in text:
            why = "this is one text"
        if allowed.number:
            try:
                number = read_number(text, allowed.number.whole)
            except NotANumberError as error:
                why, better = error.why, error.better
            else:
                if allowed.number.holds(number):
                    return number
        if allowed.text and not self._looks_different(node, text) and text.strip():
            return text
        if text.strip():
            what = f"{self._shown(node, text, setting)} is not {self._wanted(setting)}" + (f": {why}" if why else "")
        else:
            what = f"the value is empty; {setting.name} is {self._wanted(setting)}"
        return self._refuse(node, key, what, self._instead(node, text, setting, key, better))

    def _looks_different(self, node: Scalar, text: str) -> bool:
        """Whether a YAML reader would not take it for a text; what a variable held is one in any case."""
        return node.plain and not_a_text(text) is not None and text == node.text

    @staticmethod
    def _shown(node: Scalar, text: str, setting: Setting) -> str:
        if text != node.text:
            return f"{node.shown}, which is {quoted(text)} here,"
        taken_for = not_a_text(text) if node.plain else None
        if node.plain and " " in text:
            return quoted(node.shown)
        if not taken_for or taken_for == text.lower() or (setting.allowed.number and taken_for == "a number"):
            return node.shown
        return f"{node.shown} ({taken_for})"

    @staticmethod
    def _wanted(setting: Setting) -> str:
        allowed = setting.allowed
        if setting.is_section:
            return f"a section. {setting.name} holds {', '.join(settings_of(allowed.section or Recipe))}"
        if len(allowed.words) > 1 and allowed == Allowed(words=allowed.words):
            return f"one of {', '.join(allowed.words)}"
        return str(replace(allowed, null=False))

    @staticmethod
    def _instead(node: Scalar, text: str, setting: Setting, key: str, better: str) -> str:
        allowed = setting.allowed
        example = _example(node, setting, key)
        if better:
            return f"Write {_line(node, setting, key, better)}"
        if setting.is_section and re.match(r"\w+:\S", text):
            return f"Put a space after the colon, for example {example}"
        if not text.strip() or node.is_null:
            return f"Write for example {example}" + ("" if setting.required else ", or remove the key")
        close = nearest(text.lower(), allowed.words)
        if close:
            return f"Write {_line(node, setting, key, close)}"
        if allowed.items and not allowed.text:
            parts = [part.strip("[]\"' ") for part in text.split(",")]
            return f"Write {_line(node, setting, key, yaml_of([part for part in parts if part]))}"
        if allowed.text:
            return f"Write {_line(node, setting, key, quoted(text))} if this text is meant"
        if allowed.flag and not node.plain and text in TRUE_WORDS | FALSE_WORDS:
            return f"Write {_line(node, setting, key, text)}, without quotes"
        taken_for = not_a_text(text) if node.plain else None
        if allowed.words and taken_for and not (allowed.number and taken_for == "a number"):
            return f'Write for example {example}; a text that looks like something else needs quotes: "{text}"'
        return f"Write for example {example}"

    def _expanded(self, node: Scalar, key: str) -> str | None:
        """The text with variables replaced; None if that failed."""
        failed = False

        def value_of(match: re.Match[str]) -> str:
            nonlocal failed
            if match[0] == "$${":
                return "${"
            parts = _VARIABLE_NAME.fullmatch(match[1])
            if not parts or not match[0].endswith("}"):
                what = f"{node.shown} has a ${{ that is not ${{NAME}} or ${{NAME:-default}}"
                self._problems.add(node.place, key, what, "Write $${ for a literal ${")
            elif parts[2] is not None:
                return self._environment.get(parts[1]) or parts[2]
            elif parts[1] in self._environment:
                return self._environment[parts[1]]
            else:
                what = f"the environment variable {parts[1]} in {node.shown} is not set"
                self._problems.add(node.place, key, what, f"Set it, or give a default: ${{{parts[1]}:-...}}")
            failed = True
            return ""

        text = _VARIABLE.sub(value_of, node.text)
        if not failed and NOT_TEXT.search(text):
            failed = True
            self._problems.add(node.place, key, f"a variable in {node.shown} holds what is no text", "Set it to a text")
        return None if failed else text


def _line(node: Node, setting: Setting, key: str, value: str) -> str:
    """What to write: `lr: 2e-4` in a file, `train.lr=2e-4` on the command line, the bare value for a list's item."""
    if key != setting.name and not key.endswith(f".{setting.name}"):
        return value
    return f"{key}={value}" if node.place.override.startswith(f"{key}=") else f"{setting.name}: {value}"


def _example(node: Node, setting: Setting, key: str) -> str:
    """A line that would be right; for a wrong item the whole list or mapping."""
    if node.place.override.startswith(f"{key}="):
        return f"{key}={yaml_of(setting.example)}"
    return setting.paste
