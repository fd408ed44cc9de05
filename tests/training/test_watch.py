"""Numbers that go wrong are counted and said, and after three in a row the run ends."""

from __future__ import annotations

import json
import math

import pytest

from lowmem_ft.errors import TrainingError
from lowmem_ft.training.loop import StepResult
from lowmem_ft.training.watch import MOST_OVERFLOWS_IN_A_ROW, NumberWatch
from tests.training.small_run import Silent


def result(
    step: int, loss: float = 1.0, refused: str | None = None, tokens: int = 9, skipped: bool = False
) -> StepResult:
    return StepResult(step, loss, 1.0, 1e-4, 20, tokens, 1, 0.1, skipped, refused)


def way_back() -> str:
    return "The last good checkpoint is step-000002"


def test_three_in_a_row_end_the_run_with_the_last_good_checkpoint_named() -> None:
    watch, said = NumberWatch(), Silent()
    for step, wrong in enumerate([True, True, False, True, True, True], 1):
        watch.look(result(step, math.nan if wrong else 1.0, "loss is nan (t.jsonl line 3)" if wrong else None), said)
        if step < 6:
            watch.stop_if_lost(step, way_back)
    with pytest.raises(TrainingError, match=r"step 6: 3 steps in a row .* last good checkpoint is step-000002"):
        watch.stop_if_lost(6, way_back)
    assert watch.not_applied == 5
    assert said.lines[0] == "step 1: loss is nan (t.jsonl line 3); 1 such steps so far"
    assert watch.lines() == ["5 steps without a finite loss or gradient were not applied"]


def test_steps_without_a_trained_token_are_counted_and_do_not_end_the_run() -> None:
    watch, said = NumberWatch(), Silent()
    for step in range(1, 6):
        watch.look(result(step, math.nan, "no token of its examples is trained", tokens=0), said)
        watch.stop_if_lost(step, way_back)
    assert (watch.nothing_trained, watch.not_applied) == (5, 0)
    assert said.lines[-1].endswith("5 such steps so far")


def test_a_jump_of_the_loss_is_marked_and_noise_is_not() -> None:
    watch, said = NumberWatch(), Silent()
    losses = [2.0 + 0.1 * math.sin(step) for step in range(30)]
    losses[20] = 4.0
    marked = [step for step, loss in enumerate(losses) if watch.look(result(step, loss), said)]
    assert marked == [20]
    assert said.lines == ["step 20: the loss jumped to 4.0000; the 20 steps before had " + said.lines[0][-6:]]
    assert not NumberWatch().look(result(1, 100.0), said)


def test_overflows_of_loss_scaling_are_not_wrong_until_no_scale_helps() -> None:
    watch = NumberWatch()
    for step in range(1, MOST_OVERFLOWS_IN_A_ROW):
        watch.look(result(step, skipped=True), Silent())
        watch.stop_if_lost(step, way_back)
    watch.look(result(99, skipped=True), Silent())
    with pytest.raises(TrainingError, match="overflowed at every loss scale"):
        watch.stop_if_lost(99, way_back)


def test_a_restored_watch_goes_on_as_the_first() -> None:
    first, second = NumberWatch(), NumberWatch()
    for step in range(15):
        first.look(result(step, 1.0 + step % 3 / 10), Silent())
    first.look(result(15, math.inf, "x"), Silent())
    second.restore(json.loads(json.dumps(first.state())))
    for watch in (first, second):
        assert watch.look(result(16, 9.0), Silent())
        watch.look(result(17, math.nan, "x"), Silent())
    assert first.state() == second.state()
