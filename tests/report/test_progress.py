"""The live view: bars on a terminal, few plain lines elsewhere, and texts printed as they are."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from lowmem_ft.report import progress
from lowmem_ft.report.progress import Display


@dataclass(frozen=True)
class Line:
    step: int
    steps: int = 100
    loss: float = 1.0
    lr: float = 1e-4
    trained_tokens: int = 100
    seconds: float = 1.0
    memory_now: int = 0
    memory_peak: int = 0


def _plain() -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(Console(file=out, width=60)), out


def test_without_a_terminal_lines_come_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    display, out = _plain()
    with display.steps(100) as bar:
        for step in range(1, 101):
            now[0] += 1.0
            bar.show(Line(step))
    steps = [line.split()[1] for line in out.getvalue().splitlines()]
    assert steps == ["1/100", "16/100", "31/100", "46/100", "61/100", "76/100", "91/100", "100/100"]


def test_time_left_follows_the_recent_speed() -> None:
    display, out = _plain()
    with display.steps(100) as bar:
        for step in range(1, 100):
            bar.show(Line(step, seconds=100.0 if step < 50 else 1.0))
        bar.printed = -1e9
        bar.show(Line(99))
    assert out.getvalue().splitlines()[-1].endswith("1 s left")


def test_a_terminal_gets_one_bar() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=160))
    assert display.is_live
    with display.steps(2) as bar:
        bar.show(Line(1, 2))
        bar.show(Line(2, 2))
    assert "2/2" in out.getvalue()
    assert "loss 1.0000" in out.getvalue()


def test_markup_in_texts_is_not_interpreted_and_long_lines_are_not_broken() -> None:
    display, out = _plain()
    text = "[bold]not markup[/bold] " + "x" * 100
    display.line(text)
    display.block("[run]", [("a", text), ("bcd", "y")])
    lines = out.getvalue().splitlines()
    assert lines[0] == text
    assert lines[1:] == ["[run]", f"  a    {text}", "  bcd  y"]


def test_work_without_a_result_says_what_it_was() -> None:
    display, out = _plain()
    with display.working("loading"):
        pass
    assert out.getvalue() == "loading (0 s)\n"


def test_on_a_narrow_terminal_no_number_is_cut_off() -> None:
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=True, width=80)).steps(2) as bar:
        bar.show(Line(1, 2, memory_now=2**30, memory_peak=2**31))
    words = out.getvalue().split()
    assert all(word in words for word in ("1.0000", "1.00e-04", "100", "tokens/s", "2.00", "GiB", "left"))
    assert "…" not in out.getvalue()


def test_without_a_terminal_a_count_is_not_a_line_each_and_a_new_stage_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    display, out = _plain()
    with display.working("reading") as work:
        for count in range(256, 100_000, 256):
            now[0] += 0.08
            work.now(f"{count:,} examples")
        work.now("saving")
    assert out.getvalue().splitlines()[:4] == [
        "reading: 256 examples",
        "reading: 48,384 examples",
        "reading: 96,512 examples",
        "reading: saving",
    ]
