"""Streams of JSON become raw records, each with the physical line on which it starts.

Two forms: one object a line (JSONL), and one array over a whole file, which is read in pieces so that its size does not
matter. What is wrong comes out as a `Bad` in the place of the record, so that one pass finds all of it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from lowmem_ft.data.json_text import (
    LENIENT,
    STRICT,
    TOO_DEEP,
    Bad,
    RefusedError,
    bad_bytes,
    deep_faults,
    describe,
    explain,
    shorten,
)

MOST_RECORD_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20
# An unfinished value fails at the end of what was read, or a few characters before it ("-Infinity", "\\ud83d\\ude00").
_TAIL_CHARACTERS = 16
_SPACE = re.compile(r"[ \t\n\r]*")

Raw = tuple[int, Any]
"""Line from 1, and the decoded value or a `Bad`."""


def read_json_lines(lines: Iterable[tuple[int, bytes]]) -> Iterator[Raw]:
    """Reads one object a line; lines of white space are passed over.

    Args:
        lines: line from 1 and its bytes, without a byte order mark.

    Yields:
        Line and dict, or line and `Bad`.
    """
    numbered = iter(lines)
    first, held = True, next(numbered, None)
    while held is not None:
        line, raw = held
        held = None
        if raw.strip(b" \t\r\n"):
            value = _decode_line(raw)
            if isinstance(value, _Unfinished):
                followed, held = _skip_rest(numbered)
                value = _explain_unfinished(value, first, followed)
            yield line, value
            if isinstance(value, Bad) and value.ends_file:
                return
            first = False
        if held is None:
            held = next(numbered, None)


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A record that goes on after its line."""

    inside_text: bool
    column: int


def _decode_line(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8").strip(" \t\r\n")
    except UnicodeDecodeError as error:
        return bad_bytes(error.object[error.start], error.start)
    try:
        value = STRICT.decode(text)
    except json.JSONDecodeError as error:
        inside_text = error.msg.startswith("Unterminated string")
        if text[0] in "{[" and (inside_text or error.pos >= len(text)):
            return _Unfinished(inside_text, error.pos + 1)
        return Bad(*explain(text, error))
    except RefusedError as refused:
        return refused.bad
    except RecursionError:
        return Bad(TOO_DEEP, "Flatten it.")
    return _not_an_object(value) if type(value) is not dict else deep_faults(value, text, 0, len(text)) or value


def _skip_rest(numbered: Iterator[tuple[int, bytes]]) -> tuple[bool, tuple[int, bytes] | None]:
    """Passes over the lines that an unfinished record goes on with, so that they are not reported one by one.

    Returns:
        Whether any line that is not blank follows, and the line on which the next record starts.
    """
    followed = False
    for line, raw in numbered:
        followed = followed or bool(raw.strip())
        if raw.startswith(b"{"):
            return followed, (line, raw)
    return followed, None


def _explain_unfinished(unfinished: _Unfinished, first: bool, followed: bool) -> Bad:
    if not followed:
        return Bad(
            "the record looks cut off: the file ends in the middle of it",
            "Download or write the file again, or delete this line.",
        )
    if unfinished.inside_text:
        return Bad(
            f"the text that starts at column {unfinished.column} is not closed on this line",
            r"Close it with a double quote; a line break inside a text is written \n.",
        )
    if first:
        return Bad(
            "the file looks pretty-printed: the record goes on after this line, and each record must be on one line",
            "Write one record a line (jq -c . FILE), or one array of records: [{...}, {...}].",
            ends_file=True,
        )
    return Bad("the record does not end on this line", "Write each record on one line, with its closing brackets.")


def _not_an_object(value: Any) -> Bad:
    if isinstance(value, list):
        wrap = "messages" if value and isinstance(value[0], dict) and "role" in value[0] else "conversations"
        return Bad(
            f"a record must be an object, got a list of {len(value)}",
            f'Wrap it, {{"{wrap}": [...]}}; if the whole file is one array of records, give it the ending .json.',
        )
    return Bad(f"a record must be an object, got {describe(value)}", 'Write for example {"text": "..."}.')


class _Window:
    """The part of a JSON text that is being decoded: `text` from `position` on, which lies on `line`."""

    def __init__(self, stream: BinaryIO) -> None:
        self.text, self.position, self.line = "", 0, 1
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8")()
        self._lines_read, self._at_end = 0, False

    def more(self) -> bool:
        """Reads on, at least as much again as is held: the retries of a large record then cost no more than twice.

        Raises:
            RefusedError: for bytes that are not UTF-8, with `line` set to theirs.
        """
        if self._at_end:
            return False
        self.text = self.text[self.position :]
        self.position = 0
        raw = self._stream.read(max(_CHUNK_BYTES, len(self.text)))
        self._at_end = not raw
        try:
            new = self._decoder.decode(raw, final=self._at_end)
        except UnicodeDecodeError as error:
            before = error.object[: error.start]
            self.line = self._lines_read + before.count(b"\n") + 1
            bad = bad_bytes(error.object[error.start], error.start - before.rfind(b"\n") - 1)
            raise RefusedError(bad.what, bad.instead) from None
        self._lines_read += new.count("\n")
        self.text += new
        return True

    def advance(self, end: int) -> None:
        """Moves on to `end`."""
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def next_character(self) -> str:
        """The next character that is no white space, not consumed; empty at the end of the text."""
        while True:
            space = _SPACE.match(self.text, self.position)
            self.advance(space.end() if space else self.position)
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.more():
                return ""


def read_json_array(stream: BinaryIO) -> Iterator[Raw]:
    """Reads the elements of one array, one at a time.

    Memory: the text of the longest element, twice, and pieces of 1 MiB.

    Args:
        stream: bytes whose first character that is no white space is `[`, without a byte order mark.

    Yields:
        The line on which an element starts, and it or a `Bad`. After an error of syntax nothing more comes.
    """
    window = _Window(stream)
    try:
        yield from _elements(window)
    except RefusedError as refused:
        yield window.line, Bad(refused.bad.what, refused.bad.instead, ends_file=True)


def _elements(window: _Window) -> Iterator[Raw]:
    if window.next_character() != "[":
        raise RefusedError("the file holds no array", "Write [{...}, {...}].")
    window.advance(window.position + 1)
    number = 0
    while (character := window.next_character()) != "]":
        if number:
            if character != ",":
                found = shorten(window.text[window.position :][:80], 20)
                what = f'"{found}" follows element {number} of the array' if character else "the array looks cut off"
                raise RefusedError(what, "Write a comma between two elements, and ] after the last.")
            window.advance(window.position + 1)
            if window.next_character() == "]":
                raise RefusedError(f"a trailing comma after element {number} of the array", "Remove the comma.")
        number += 1
        window.next_character()
        line = window.line
        value, end = _decode_element(window, number)
        if not isinstance(value, (dict, Bad)):
            value = _not_an_object(value)
        window.advance(end)
        yield line, value
    window.advance(window.position + 1)
    if window.next_character():
        found = shorten(window.text[window.position :][:80], 20)
        raise RefusedError(
            f'"{found}" follows the end of the array',
            "Remove it; if each line is a record, give the file the ending .jsonl.",
        )


def _decode_element(window: _Window, number: int) -> tuple[Any, int]:
    """Decodes the element at the window's position; `RefusedError` for what cannot be read past."""
    decoder, refused = STRICT, None
    while True:
        try:
            value, end = decoder.raw_decode(window.text, window.position)
        except json.JSONDecodeError as error:
            if len(window.text) - window.position > MOST_RECORD_BYTES:
                raise RefusedError(
                    f"element {number} is longer than {MOST_RECORD_BYTES:,} bytes", "Split it."
                ) from None
            unfinished = error.msg.startswith("Unterminated") or error.pos >= len(window.text) - _TAIL_CHARACTERS
            if unfinished and window.more():
                continue
            what, instead = explain(window.text, error)
            if error.msg.startswith("Unterminated") or error.pos >= len(window.text.rstrip()):
                what, instead = "it looks cut off: the file ends in the middle of it", "Download or write it again."
            window.advance(error.pos)
            raise RefusedError(f"element {number} of the array: {what}", instead) from None
        except RefusedError as found:
            # Decode it again without our own rules, only to learn where it ends.
            decoder, refused = LENIENT, found
            continue
        except RecursionError:
            raise RefusedError(f"element {number} of the array: {TOO_DEEP}", "Flatten it.") from None
        if end >= len(window.text) - 1 and window.more():
            continue  # a number may go on in what was not read yet
        if refused is not None:
            return Bad(f"element {number} of the array: {refused.bad.what}", refused.bad.instead), end
        return deep_faults(value, window.text, window.position, end) or value, end
