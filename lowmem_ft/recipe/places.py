"""Where things in a recipe were written, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.errors import Problem


@dataclass(frozen=True)
class Place:
    """Where something was written: a physical line of the recipe file, or an override on the command line.

    Attributes:
        file: the recipe file as the user named it.
        line: line in the file, from 1; 0 where the whole file is meant, or for an override.
        override: the override as typed; empty for the file.
        number: the override's position on the command line, from 1; 0 for the file.
    """

    file: str
    line: int = 0
    override: str = ""
    number: int = 0

    def of(self, key: str = "") -> str:
        """The place as messages show it, with the setting in question."""
        if self.override:
            shown = f"command line: {self.override}"
            return shown if not key or self.override.startswith(f"{key}=") else f"{shown}: {key}"
        shown = f"{self.file} line {self.line}" if self.line else self.file
        return f"{shown}: {key}" if key else shown


class Problems:
    """All that is wrong with a recipe, collected by the passes of loading and shown in the order of the file."""

    def __init__(self) -> None:
        self._found: list[tuple[Place, str, Problem]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, place: Place, key: str, what: str, instead: str = "") -> None:
        """Keeps one problem with the setting `key` (dotted; empty for the file as a whole)."""
        self._found.append((place, key, Problem(place.of(key), what, instead)))

    def touch(self, key: str) -> bool:
        """Whether something is wrong with the setting or with a part of it."""
        return any(found == key or found.startswith((f"{key}.", f"{key}[")) for _, found, _ in self._found)

    def in_order(self) -> list[Problem]:
        """The problems by line, those of the command line last."""
        return [problem for _, _, problem in sorted(self._found, key=lambda found: (found[0].number, found[0].line))]
