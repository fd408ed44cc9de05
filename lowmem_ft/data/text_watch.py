"""What texts of records hold that may not be meant: control tokens, and tool schemas outside `tools`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.data.formats import Example
from lowmem_ft.data.pieces import ControlTokens

_MOST_PLACES = 3
_SCHEMA = "a tool schema"


@dataclass
class TextWatch:
    """Counts records with suspicious texts while they pass by.

    Args:
        control: the control tokens to look for.

    Attributes:
        records: number of records by what was found: a control token, or a tool schema.
        places: the first places of each.
    """

    control: ControlTokens
    records: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def through(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Hands on the examples, unchanged and in order.

        Args:
            examples: taken as they are needed.
        """
        for example in examples:
            self.look_at(example)
            yield example

    def look_at(self, example: Example) -> None:
        """Counts what one example holds.

        Args:
            example: of any kind.
        """
        found: set[str] = set()
        asked = [str(message.get("content") or "") for message in example.messages if message["role"] != "assistant"]
        if isinstance(example.prompt, str):
            asked.append(example.prompt)
        if any('"parameters"' in text and '"name"' in text for text in asked):
            found.add(_SCHEMA)
        answers = [message.get("content") for message in example.messages if message["role"] == "assistant"]
        for text in (*asked, *answers, example.completion, example.text):
            if text and self.control.any_in(text):
                found.update(self.control.quoted_in(text))
        for one in sorted(found):
            self.records[one] = self.records.get(one, 0) + 1
            places = self.places.setdefault(one, [])
            if len(places) < _MOST_PLACES:
                places.append(example.where())

    def to_dict(self) -> dict[str, Any]:
        """The counts, as JSON can hold them."""
        return {"records": dict(self.records), "places": {name: list(places) for name, places in self.places.items()}}


def watch_lines(counts: Mapping[str, Any]) -> list[str]:
    """The lines to print about what `TextWatch.to_dict` gave, most frequent first; none if nothing was found.

    Args:
        counts: what `TextWatch.to_dict` gave.
    """
    lines = []
    for name, count in sorted(counts["records"].items(), key=lambda one: (-one[1], one[0])):
        records = f"{count} record{'s' if count != 1 else ''}"
        places = ", ".join(counts["places"][name]) + (", ..." if count > len(counts["places"][name]) else "")
        if name == _SCHEMA:
            lines.append(f'A tool schema stands in the text of {records} ({places}): templates render "tools" only.')
        else:
            lines.append(f"{name} is quoted in the text of {records} ({places}): it is encoded as letters.")
    return lines
