"""Numbers that go wrong: steps that were not applied, losses that jump; counted, said, and the end after three."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from lowmem_ft.errors import Problem, TrainingError
from lowmem_ft.training.loop import StepResult
from lowmem_ft.training.reporter import Reporter

MOST_IN_A_ROW = 3
MOST_OVERFLOWS_IN_A_ROW = 20
"""A loss scale starts at 2^16 and halves with each overflow: after so many it is not the scale that overflows."""
WINDOW_STEPS = 20
FEWEST_STEPS = 8
SPIKE_DEVIATIONS = 6.0
SPIKE_SHARE = 0.2


class NumberWatch:
    """Looks at each step.

    A spike is a loss above the median of the last 20 steps by six times their median deviation (scaled to a standard
    deviation) and by a fifth. It is marked, and nothing else follows from it.

    Attributes:
        not_applied: steps without an update because loss or gradient was not finite.
        nothing_trained: steps without an update because no token of theirs is trained.
        spikes: marked steps.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._in_a_row = self._overflows_in_a_row = 0
        self.not_applied = self.nothing_trained = self.spikes = 0

    def look(self, result: StepResult, reporter: Reporter) -> bool:
        """Take in a step, and say what is wrong with it.

        Returns:
            Whether its loss is a spike.
        """
        if result.trained_tokens == 0:
            self.nothing_trained += 1
            reporter.line(f"step {result.step}: {result.refused}; {self.nothing_trained} such steps so far")
            return False
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if result.skipped else 0
        if result.refused is not None:
            self.not_applied += 1
            self._in_a_row += 1
            reporter.line(f"step {result.step}: {result.refused}; {self.not_applied} such steps so far")
            return False
        self._in_a_row = 0
        spike = self._is_spike(result.loss)
        if spike:
            self.spikes += 1
            usual = f"the {len(self._losses)} steps before had {median(self._losses):.4f}"
            reporter.line(f"step {result.step}: the loss jumped to {result.loss:.4f}; {usual}")
        self._losses = [*self._losses, result.loss][-WINDOW_STEPS:]
        return spike

    def stop_if_lost(self, step: int, way_back: Callable[[], str]) -> None:
        """End the run where its numbers do not come back by themselves: after three such steps in a row.

        Args:
            step: that was looked at.
            way_back: names the last good checkpoint.

        Raises:
            TrainingError: the run is lost.
        """
        if self._in_a_row >= MOST_IN_A_ROW:
            what = f"{self._in_a_row} steps in a row had no finite loss or gradient, and none was applied"
            raise TrainingError(Problem(f"step {step}", what, f"Lower train.lr. {way_back()}"))
        if self._overflows_in_a_row >= MOST_OVERFLOWS_IN_A_ROW:
            what = f"{self._overflows_in_a_row} steps in a row overflowed at every loss scale"
            raise TrainingError(Problem(f"step {step}", what, f"Write precision: bf16 or fp32. {way_back()}"))

    def lines(self) -> Sequence[str]:
        """The counts, for the end of the run; none where all went well."""
        counts = [
            (self.not_applied, "without a finite loss or gradient were not applied"),
            (self.nothing_trained, "without a trained token were left out"),
            (self.spikes, "had a loss that jumped"),
        ]
        return [f"{count} steps {what}" for count, what in counts if count]

    def state(self) -> dict[str, Any]:
        """Counts and the last losses."""
        return {
            "losses": list(self._losses),
            "in_a_row": self._in_a_row,
            "overflows_in_a_row": self._overflows_in_a_row,
            "counts": [self.not_applied, self.nothing_trained, self.spikes],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Back to a state."""
        self._losses = [float(loss) for loss in state["losses"]]
        self._in_a_row, self._overflows_in_a_row = state["in_a_row"], state["overflows_in_a_row"]
        self.not_applied, self.nothing_trained, self.spikes = state["counts"]

    def _is_spike(self, loss: float) -> bool:
        if len(self._losses) < FEWEST_STEPS:
            return False
        middle = median(self._losses)
        deviation = 1.4826 * median(abs(other - middle) for other in self._losses)
        return loss > middle + max(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * abs(middle)) and math.isfinite(loss)
