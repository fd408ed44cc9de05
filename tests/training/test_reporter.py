"""What the run tells fits what the display shows."""

from __future__ import annotations

import io

from rich.console import Console

from lowmem_ft.report.progress import Display
from lowmem_ft.training.reporter import Reporter, StepLine


def test_the_display_is_a_reporter() -> None:
    out = io.StringIO()
    reporter: Reporter = Display(Console(file=out))
    with reporter.working("reading") as work:
        work.now("half")
        work.result = "read 5"
    assert out.getvalue().splitlines()[0] == "reading: half"
    assert out.getvalue().splitlines()[1].startswith("read 5 (")


def test_a_step_line_can_be_shown() -> None:
    out = io.StringIO()
    with Display(Console(file=out)).steps(2) as bar:
        bar.show(StepLine(1, 2, 0.5, 1e-4, 300, 2.0, 2**30, 2**31))
    assert out.getvalue().split("  ")[:4] == ["step 1/2", "loss 0.5000", "lr 1.00e-04", "150 trained tokens/s"]
    assert "memory 1.00 GiB / peak 2.00 GiB" in out.getvalue()
    assert "2 s left" in out.getvalue()
