"""Strict JSON: decoding that refuses what would change meaning, and errors in the words of a person.

Repeated keys, NaN, numbers beyond a float, half characters and deep nesting are refused; Python's decoder lets them
through. Nothing is lenient: no comments, no trailing commas.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

MOST_DEPTH = 100
_ESCAPES = {"\t": r"\t", "\n": r"\n", "\r": r"\r", "\b": r"\b", "\f": r"\f"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Bad:
    """What stands in the place of a record that cannot be read.

    Attributes:
        what: what was found.
        instead: what to write.
        ends_file: nothing after it in the file can be read, so it cannot be skipped.
    """

    what: str
    instead: str
    ends_file: bool = False


class RefusedError(ValueError):
    """A value that is JSON for Python's decoder and is not for us."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.bad = Bad(what, instead)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RefusedError(f'the key "{shorten(key)}" stands twice in one object', "Keep one of them.")
            seen.add(key)
    return made


def _refuse_constant(word: str) -> NoReturn:
    raise RefusedError(f"{word} is not a JSON value", 'Write null, or a text such as "NaN".')


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise RefusedError(f"the number {shorten(digits)} is too large", f'Write it as a text: "{shorten(digits)}".')
    return number


def _bounded(digits: str) -> int:
    if len(digits) > 4000:  # Python itself refuses from 4300 digits on, with a setting of its own
        raise RefusedError(f"a number of {len(digits)} digits", "Write it as a text, in quotes.")
    return int(digits)


STRICT = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_bounded
)
LENIENT = json.JSONDecoder(parse_int=len)  # len: the number itself is of no interest, and a long one would be refused
TOO_DEEP = f"it is nested more than {MOST_DEPTH} levels deep"


def shorten(text: str, most: int = 40) -> str:
    """`text` on one line, printable everywhere, and no longer than about `most` characters."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def parse_json(text: str) -> Any:
    """Decodes one JSON value as strictly as a line of a data file.

    Returns:
        The value, or a `Bad`.
    """
    try:
        value = STRICT.decode(text)
    except json.JSONDecodeError as error:
        return Bad(*explain(text, error))
    except RefusedError as refused:
        return refused.bad
    except RecursionError:
        return Bad(TOO_DEEP, "Flatten it.")
    return deep_faults(value, text, 0, len(text)) or value


def describe(value: Any) -> str:
    """A value as an error names it: its kind in words, and the value where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {shorten(str(value))}"
    if isinstance(value, str):
        return f'the text "{shorten(value)}"'
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {name_keys(value)}" if value else "an empty object"
    return f"a value of type {type(value).__name__} ({shorten(str(value))})"


def name_keys(keys: Iterable[Any], most: int = 8) -> str:
    """Keys in quotes, `most` of them, the rest counted."""
    named = [f'"{shorten(str(key))}"' for key in keys]
    more = len(named) - most
    return ", ".join(named[:most]) + (f" and {more} more" if more > 0 else "")


def bad_bytes(byte: int, position: int) -> Bad:
    """What a byte that is not UTF-8 comes out as; `position` is from 0 in its line."""
    return Bad(
        f"byte 0x{byte:02X} at position {position + 1} of the line is not valid UTF-8",
        "Save the file as UTF-8, for example: iconv -f latin1 -t utf-8 FILE > NEW",
    )


def explain(text: str, error: json.JSONDecodeError) -> tuple[str, str]:
    """What a person would say about a JSON error, and what to write."""
    position = error.pos
    found, before = text[position : position + 200], text[max(0, position - 200) : position].rstrip()
    at = f"column {position - text.rfind(chr(10), 0, position)}"
    word = re.match(r"[\w+.-]*", found)
    bare = word.group() if word else ""
    if error.msg.startswith("Invalid control character"):
        name = {"\t": "tab", "\n": "line break", "\r": "carriage return"}.get(found[:1], "control character")
        escape = _ESCAPES.get(found[:1], f"\\u{ord(found[:1] or ' '):04x}")
        return f"{at}: a raw {name} (control character U+{ord(found[:1] or ' '):04X}) inside a text", f"Write {escape}"
    if error.msg.startswith("Illegal trailing comma") or (before.endswith(",") and found.lstrip()[:1] in ("}", "]")):
        return f"{at}: a trailing comma before the closing bracket", "Remove the comma."
    if found.startswith(("//", "#", "/*")):
        return f'"{shorten(found)}" is a comment, and JSON has none', "Remove it."
    if error.msg.startswith("Extra data"):
        if found.startswith(","):
            return f"{at}: a comma after the record", "Remove it: in JSONL records are parted by line breaks alone."
        return f'{at}: "{shorten(found, 20)}" follows the end of the record', "Write one record a line."
    if error.msg.startswith("Invalid \\"):
        return f'{at}: "{shorten(found, 6)}" is not a JSON escape', r"Write a backslash as \\"
    if error.msg.startswith("Unterminated string"):
        return f"the text that starts at {at} is not closed", "Close it with a double quote."
    if found.startswith("'"):
        return f"{at}: a text in single quotes, as Python writes it", "Write JSON (json.dumps): double quotes."
    if bare in _PYTHON_WORDS:
        return f"{at}: {bare} is Python, not JSON", f"Write {_PYTHON_WORDS[bare]}"
    if error.msg.startswith("Expecting value") and bare:
        return f'{at}: not JSON: "{shorten(found, 20)}" has no quotes', f'Write "{shorten(bare, 20)}" in quotes.'
    if not found:
        return "it ends before it is finished", "Close its quotes and brackets."
    return f'{at}: not JSON: {error.msg.lower()}, found "{shorten(found, 20)}"', "Write one JSON object a line."


def deep_faults(value: Any, text: str, start: int, end: int) -> Bad | None:
    """Faults that the decoder lets through. The two searches are cheap, the walks are only for records they pick."""
    if text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            return Bad(
                f"\\u{half:04x} is half of a character (a lone surrogate) and cannot be written as UTF-8",
                "Write the whole character, or its two escapes together.",
            )
    if text.count("{", start, end) + text.count("[", start, end) > MOST_DEPTH and _depth_exceeds(value, MOST_DEPTH):
        return Bad(TOO_DEEP, "Flatten it.")
    return None


def _depth_exceeds(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most + 1):
        nested = [item for item in level if isinstance(item, (dict, list))]
        if not nested:
            return False
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
    return True
