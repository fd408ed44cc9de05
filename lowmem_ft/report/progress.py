"""The live view: a header, one bar a phase, and plain lines where the output is not a terminal."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from lowmem_ft.units import format_bytes, format_seconds

PLAIN_EVERY_SECONDS = 15.0
SPEED_WINDOW_STEPS = 20


class StepLine(Protocol):
    """The numbers of the live line; `lowmem_ft.training.reporter.StepLine` says what each is."""

    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def trained_tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def memory_now(self) -> int: ...
    @property
    def memory_peak(self) -> int: ...


@dataclass
class Display:
    """Everything that is printed. A terminal gets bars; a file or pipe gets a line at most every 15 seconds."""

    console: Console = field(default_factory=lambda: Console(highlight=False))

    @property
    def is_live(self) -> bool:
        """Whether bars are drawn."""
        return self.console.is_terminal

    def line(self, text: str) -> None:
        """One line, as it is; long ones are not broken where the output is a file."""
        self.console.print(Text(text), soft_wrap=not self.is_live)

    def block(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """A title and aligned rows of name and text."""
        width = max(len(name) for name, _ in rows)
        self.console.print(f"[bold]{escape(title)}[/bold]")
        for name, text in rows:
            self.console.print(Text.assemble(("  " + name.ljust(width) + "  ", "cyan"), text), soft_wrap=True)

    @contextmanager
    def working(self, what: str) -> Iterator[_Work]:
        """A task without a known length: a spinner while it runs, and one line with its duration."""
        start = time.perf_counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
        progress = Progress(*columns, console=self.console, transient=True)
        task = progress.add_task(escape(what), total=None)
        work = _Work(what, progress, task, None if self.is_live else self)
        with progress if self.is_live else _nothing():
            yield work
        self.line(f"{work.result or what} ({format_seconds(time.perf_counter() - start)})")

    @contextmanager
    def steps(self, total: int) -> Iterator[_Steps]:
        """The training bar."""
        progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
            console=self.console,
        )
        task = progress.add_task("", total=total, numbers="")
        with progress if self.is_live else _nothing():
            yield _Steps(self, progress, task)


@dataclass
class _Work:
    what: str
    progress: Progress
    task: object
    plain: Display | None
    result: str = ""
    words: str | None = None
    printed: float = 0.0

    def now(self, text: str) -> None:
        """What is being done within the task. Plain lines come with each new kind of work, not with each number."""
        if self.plain is None:
            self.progress.update(self.task, description=escape(f"{self.what}: {text}"))  # type: ignore[arg-type]
            return
        now, words = time.monotonic(), re.sub(r"\d[\d,]*", "", text)
        if words != self.words or now - self.printed >= PLAIN_EVERY_SECONDS:
            self.words, self.printed = words, now
            self.plain.line(f"{self.what}: {text}")


@dataclass
class _Steps:
    display: Display
    progress: Progress
    task: object
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SPEED_WINDOW_STEPS))
    printed: float = 0.0

    def show(self, line: StepLine) -> None:
        """Take the numbers of a step that is done."""
        self.recent.append((line.trained_tokens, line.seconds))
        tokens, seconds = (sum(values) for values in zip(*self.recent, strict=True))
        left = (line.steps - line.step) * seconds / len(self.recent)
        text = (
            f"loss {line.loss:.4f}  lr {line.lr:.2e}  {tokens / seconds:,.0f} trained tokens/s  "
            f"memory {format_bytes(line.memory_now)} / peak {format_bytes(line.memory_peak)}  "
            f"{format_seconds(left)} left"
        )
        if self.display.is_live:
            self.progress.update(self.task, completed=line.step, numbers=text)  # type: ignore[arg-type]
            return
        now = time.monotonic()
        if line.step in (1, line.steps) or now - self.printed >= PLAIN_EVERY_SECONDS:
            self.printed = now
            self.display.line(f"step {line.step}/{line.steps}  {text}")


@contextmanager
def _nothing() -> Iterator[None]:
    yield
