"""What the run tells while it works; `lowmem_ft.report.progress.Display` is one that prints."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """A task that goes on.

    Attributes:
        result: one line, said when the task is done.
    """

    result: str

    def now(self, text: str) -> None:
        """What is being done within the task."""


class Reporter(Protocol):
    """Gets told of tasks, and of what is worth a line."""

    def line(self, text: str) -> None:
        """One line."""

    def working(self, what: str) -> AbstractContextManager[Work]:
        """A task begins; it ends with the context."""


@dataclass(frozen=True)
class StepLine:
    """The numbers of the live line.

    Attributes:
        step: counted from 1.
        steps: of the run.
        loss: mean of the step over its trained tokens.
        lr: learning rate.
        trained_tokens: of the step.
        seconds: wall time of the step.
        memory_now: bytes in use.
        memory_peak: highest bytes so far.
    """

    step: int
    steps: int
    loss: float
    lr: float
    trained_tokens: int
    seconds: float
    memory_now: int
    memory_peak: int
