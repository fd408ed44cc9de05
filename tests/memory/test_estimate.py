"""The arithmetic from a few traces to a whole model; `tests.training.test_foresee` holds it against real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowmem_ft.memory.estimate import Blocks, Speed, Traced, shortest_period, trace_step, traced_counts

WEIGHTS, KEPT, INPUT, LOSS, INSIDE = 1000, 70, 8, 30, 90


def _traced(blocks: int, kept: int, again: int) -> Traced:
    """A model whose loss takes LOSS, and whose backward takes INSIDE beyond what the forward pass keeps."""
    held = WEIGHTS * blocks
    forward = held + kept * blocks + LOSS
    return Traced(blocks, held, forward, held + kept * blocks + INSIDE, 10 * blocks + again, 4 * blocks, 2 * blocks, 7)


def _blocks(blocks: int) -> Blocks:
    keep = _traced(2, KEPT, 0), _traced(3, KEPT, 0)
    recompute = _traced(2, INPUT, 2 * 5), _traced(3, INPUT, 3 * 5)
    return Blocks.from_traces(keep, recompute, blocks)


def test_two_traces_tell_of_any_number_of_blocks() -> None:
    found = _blocks(30)
    assert found.keep == _traced(30, KEPT, 0)
    assert found.recompute == _traced(30, INPUT, 150)
    assert (found.kept, found.inputs) == (KEPT, INPUT)


@pytest.mark.parametrize("chosen", [range(0), range(4), range(30), [0, 10, 20], [29]])
def test_some_blocks_recompute(chosen: range | list[int]) -> None:
    """Against a walk through the backward pass, block by block."""
    step = _blocks(30).with_recompute(chosen)
    held = WEIGHTS * 30
    kept = [INPUT if number in chosen else KEPT for number in range(30)]
    peaks = [held + sum(kept[: number + 1]) + INSIDE for number in range(30)]
    assert step.backward == max(peaks)
    assert step.forward == held + sum(kept) + LOSS
    assert step.operations == 300 + 5 * len(chosen)


def test_one_trace_of_the_whole_model_never_promises_too_little_memory() -> None:
    keep, recompute = _traced(30, KEPT, 0), _traced(30, INPUT, 150)
    whole = Blocks.from_traces((keep, keep), (recompute, recompute), 30)
    for count in range(31):
        exact, told = _blocks(30).with_recompute(range(count)), whole.with_recompute(range(count))
        assert told.forward >= exact.forward
        assert told.backward >= exact.backward
    assert replace(whole.with_recompute(range(30))) == recompute


@pytest.mark.parametrize(
    ("kinds", "period"), [("aaaa", 1), ("ababa", 2), ("aabaab", 3), ("abcd", 4), ("abbbb", 5), ("a", 1), ("", 1)]
)
def test_the_period_of_kinds(kinds: str, period: int) -> None:
    assert shortest_period(list(kinds)) == period


@pytest.mark.parametrize(
    ("blocks", "period", "counts"),
    [(80, 1, (2, 3)), (26, 6, (8, 14)), (48, 6, (6, 12)), (1, 1, (2, 3)), (60, 60, (60, 60)), (2, 2, (2, 4))],
)
def test_traces_end_where_the_model_ends_in_its_period(blocks: int, period: int, counts: tuple[int, int]) -> None:
    assert traced_counts(blocks, period) == counts


def test_gradients_are_there_from_the_start_and_gone_in_the_end() -> None:
    layer = nn.Linear(32, 32, bias=False)
    rows = torch.zeros(4, 32)
    step = trace_step(layer, [rows], blocks=1, loss=lambda row: layer(row).sum())
    assert step.held == 2 * 32 * 32 * 4
    assert step.backward >= step.held + 32 * 32 * 4, "the gradient of this row, beside the sum"
    assert layer.weight.grad is None
    assert step.operations == 2 * (2 * 4 * 32 * 32)


def test_time_is_what_is_computed_read_written_and_called() -> None:
    step = _blocks(30).keep
    assert (step.operations, step.written, step.read, step.calls) == (300, 120, 60, 7)
    speed = Speed(operations=100, reads=30, bytes=60, call_seconds=1)
    seconds = step.operations / 100 + step.read / 30 + step.written / 60 + step.calls
    assert speed.seconds(step) == seconds == 3 + 2 + 2 + 7
