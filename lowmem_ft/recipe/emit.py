"""Values as YAML text that every YAML version reads alike: numbers with a dot before the exponent, texts in quotes
where they could be taken for anything else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PLAIN_TEXT = re.compile(r"(\.{0,2}/)?[A-Za-z_][A-Za-z0-9_./@+-]*")
_WORDS_OF_YAML = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])


def yaml_of(value: Any) -> str:
    """One value on one line: `2.0e-05`, `[q_proj, v_proj]`, `"on"`, `{path: a.jsonl, weight: 2.0}`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        shown = repr(value)
        return shown.replace("e", ".0e") if "e" in shown and "." not in shown else shown
    if isinstance(value, str):
        return text_as_yaml(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text_as_yaml(key)}: {yaml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_of(item) for item in value) + "]"
    return str(value)


def text_as_yaml(text: str) -> str:
    """A text, in quotes unless it is plainly a word or a path."""
    if _PLAIN_TEXT.fullmatch(text) and text.lower() not in _WORDS_OF_YAML:
        return text
    return quoted(text)


def quoted(text: str) -> str:
    """A text in double quotes; what does not print is escaped."""
    return '"' + "".join(map(_escaped, text)) + '"'


def yaml_block(value: Mapping[str, Any], indent: int = 0) -> str:
    """A mapping as indented lines; what is nested deeper than one level stays on its line."""
    lines = []
    for key, item in value.items():
        head = " " * indent + text_as_yaml(key) + ":"
        if isinstance(item, Mapping) and item and indent == 0:
            lines.append(f"{head}\n{yaml_block(item, indent + 2)}")
        else:
            lines.append(f"{head} {yaml_of(item)}\n")
    return "".join(lines)


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character == "\n":
        return "\\n"
    if character == "\t":
        return "\\t"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
