"""Which evaluation was the best so far, and whether it is time to stop early."""

from __future__ import annotations

import math
from typing import Any

from lowmem_ft.recipe.eval_section import LOSS


def is_better(by: str, value: float, than: float | None) -> bool:
    """Whether a value is better than another: a lower loss, a higher metric. Nothing is better by not being a number.

    Args:
        by: `loss`, or a metric.
        value: of it.
        than: what it is compared with; None for nothing.
    """
    if math.isnan(value):
        return False
    return than is None or (value < than if by == LOSS else value > than)


class BestSoFar:
    """Counts the evaluations since the best one. Part of a checkpoint, so that a resumed run stops where it would have.

    Args:
        by: `loss`, or a metric.
        patience: so many evaluations in a row that were not better end the run; None: none do.

    Attributes:
        step: of the best one; None before the first.
        value: of it.
        since: evaluations after it.
    """

    def __init__(self, by: str = LOSS, patience: int | None = None) -> None:
        self.by, self.patience = by, patience
        self.step: int | None = None
        self.value: float | None = None
        self.since = 0

    def look(self, step: int, value: float) -> None:
        """Take in an evaluation after a step."""
        if is_better(self.by, value, self.value):
            self.step, self.value, self.since = step, value, 0
        else:
            self.since += 1

    def why_stop(self) -> str | None:
        """Why the run ends early, or None where it goes on."""
        if self.patience is None or self.since < self.patience:
            return None
        if self.value is None:
            return f"none of {self.since} evaluations in a row had a {self.by} that is a number"
        evaluations = "1 evaluation was" if self.since == 1 else f"{self.since} evaluations in a row were"
        return f"{evaluations} not better than {self.by} {self.value:.4g} after step {self.step}"

    def state(self) -> dict[str, Any]:
        """What counting goes on from."""
        return {"by": self.by, "step": self.step, "value": self.value, "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        """Back to a state; of another criterion nothing is known, and it begins anew."""
        if state["by"] == self.by:
            self.step, self.value, self.since = state["step"], state["value"], state["since"]
