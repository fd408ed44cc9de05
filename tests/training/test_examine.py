"""Held-out evaluation within a run; what it writes is checked in tests/test_train.py on whole runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from lowmem_ft.training.examine import Examiner


def _examiner(**changes: Any) -> Examiner:
    nothing: Any = SimpleNamespace(eval=None, data=SimpleNamespace(eval=None))
    nothing.eval = SimpleNamespace(generate=0)
    data: Any = SimpleNamespace(eval=None)
    return Examiner(nothing, data, *[None] * 6, **changes)  # type: ignore[arg-type]


def test_without_held_out_data_nothing_happens() -> None:
    examiner = _examiner()
    examiner.examine(nn.Linear(1, 1), step=0)
    assert (examiner.losses, examiner.exact) == ([], [])


def test_a_step_is_evaluated_once() -> None:
    examiner = _examiner(last_step=4, losses=[1.0])
    examiner.data = SimpleNamespace(eval="held-out")  # type: ignore[assignment]
    examiner.loss(nn.Linear(1, 1), step=4)  # anything more would fail: there is no reporter
    assert examiner.losses == [1.0]
