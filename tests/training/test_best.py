"""Counting evaluations that were not better, and what better is."""

from __future__ import annotations

import json
import math

import pytest

from lowmem_ft.training.best import BestSoFar, is_better


@pytest.mark.parametrize(
    ("by", "value", "than", "better"),
    [
        ("loss", 1.0, None, True),
        ("loss", 1.0, 2.0, True),
        ("loss", 2.0, 2.0, False),
        ("rouge_l", 2.0, 1.0, True),
        ("rouge_l", 1.0, 1.0, False),
        ("loss", math.nan, None, False),
        ("rouge_l", math.nan, 1.0, False),
        ("loss", math.inf, 1.0, False),
    ],
)
def test_a_loss_is_better_lower_and_a_metric_higher(by: str, value: float, than: float | None, better: bool) -> None:
    assert is_better(by, value, than) is better


def test_patience_counts_evaluations_since_the_best_also_after_a_resume() -> None:
    values = [0.9, 0.5, 0.6, 0.5, 0.4, 0.7, math.nan, 0.4, 0.1]
    best, stops = BestSoFar("loss", patience=3), []
    for step, value in enumerate(values, 1):
        best.look(step, value)
        state = json.loads(json.dumps(best.state()))
        best = BestSoFar("loss", patience=3)
        best.restore(state)
        stops.append(best.why_stop())
    assert [why is not None for why in stops] == [False] * 7 + [True, False]
    assert stops[7] == "3 evaluations in a row were not better than loss 0.4 after step 5"


def test_without_patience_nothing_stops() -> None:
    best = BestSoFar("loss")
    for step in range(50):
        best.look(step, 1.0)
    assert best.since == 49
    assert best.why_stop() is None


def test_no_number_at_all_is_said_and_another_criterion_begins_anew() -> None:
    best = BestSoFar("loss", patience=1)
    best.look(1, math.nan)
    assert best.why_stop() == "none of 1 evaluations in a row had a loss that is a number"
    other = BestSoFar("contains", patience=1)
    other.restore(best.state())
    assert other.since == 0
