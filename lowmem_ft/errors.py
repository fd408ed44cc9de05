"""Exceptions of lowmem_ft. Every message says where, what was found, and what to write instead.

LowmemError                 exit 1
├── RecipeError             exit 2   the YAML file or an override on the command line
├── DataError               exit 3   a data file or a record in it
├── ModelError              exit 4   finding, loading, quantizing or adapting a model
├── BudgetError             exit 5   the run does not fit in the memory that there is
├── TrainingError           exit 6   numbers that went wrong during the run
├── ExportError             exit 7   what was trained cannot be written in the form asked for
└── CheckpointError         exit 8   saved state cannot be written, read or continued

Stopped                     exit 130 SIGINT, 143 SIGTERM, 9 train.max_seconds: nothing is wrong, and the run can go on
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_PROBLEMS = 10


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: file and line, module name or setting, as the user would look for it; may be empty.
        what: what was found, with the value.
        instead: what to write or do; may be empty only where `what` already says it.
    """

    where: str
    what: str
    instead: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if not self.instead:
            return text
        return f"{text.rstrip('.')}. {self.instead}"


class LowmemError(Exception):
    """Base of all errors that are the user's to mend. Holds one or several problems.

    Args:
        problems: one text, one `Problem`, or several. Printed one a line, `MOST_PROBLEMS` at most, the rest counted.
    """

    exit_code = 1

    def __init__(self, problems: str | Problem | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [str(problem) for problem in self.problems[:MOST_PROBLEMS]]
        more = len(self.problems) - MOST_PROBLEMS
        if more > 0:
            lines.append(f"... and {more} more problems of this kind")
        return "\n".join(lines)


class RecipeError(LowmemError):
    """The recipe or an override cannot be honoured."""

    exit_code = 2


class DataError(LowmemError):
    """A data file or a record cannot be read as it is."""

    exit_code = 3


class ModelError(LowmemError):
    """A model cannot be found, loaded, quantized, prepared or adapted."""

    exit_code = 4


class BudgetError(LowmemError):
    """The run does not fit in the memory there is."""

    exit_code = 5


class TrainingError(LowmemError):
    """The run cannot go on: its numbers are no longer finite, or it has nothing to train."""

    exit_code = 6


class ExportError(LowmemError):
    """The result cannot be written as asked, or is not what was trained."""

    exit_code = 7


class CheckpointError(LowmemError):
    """Saved state cannot be written or read, or does not belong to this run."""

    exit_code = 8


class Stopped(BaseException):
    """A run leaves because it was told to. As with `KeyboardInterrupt`, no `except Exception` swallows it.

    Args:
        why: what told it to.
        exit_code: of the process.
        saved: what was saved, and how to go on; empty where nothing had to be.
    """

    def __init__(self, why: str, exit_code: int, saved: str = "") -> None:
        self.why, self.exit_code, self.saved = why, exit_code, saved
        super().__init__(f"stopped by {why}" + (f": {saved}" if saved else ""))


def nearest(name: str, valid: Sequence[str]) -> str | None:
    """The valid name closest to `name`, or None where nothing is close."""
    found = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return found[0] if found else None
