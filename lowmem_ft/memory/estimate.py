"""What a training step will hold and compute, from a trace of the step itself: no weight, no formula for a model.

A model without numbers (`torch._subclasses.FakeTensorMode`) runs forward and backward under a `TensorTracker`. The
blocks of a model are alike, or come in alike groups, so two traces, with few blocks and with one group more, tell what
each further block adds; the rest is arithmetic, and a model of 80 blocks takes as long as one of two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lowmem_ft.memory.tracking import TensorTracker, tensors_of

MOST_MADE_UP = 16
"""A model of fewer blocks may be traced with more than it has."""


@dataclass(frozen=True)
class Knobs:
    """What a plan may choose. None of these changes what is learned.

    Attributes:
        micro_batch_tokens: most tokens of a row.
        recompute: which blocks do; see `memory.recompute`.
        loss_chunk_tokens: trained tokens whose logits are held at once; None for what 32 MiB hold.
        mlp_slice_tokens: tokens that pass through a gated MLP at once; None for all.
    """

    micro_batch_tokens: int
    recompute: str | Sequence[int]
    loss_chunk_tokens: int | None = None
    mlp_slice_tokens: int | None = None


@dataclass(frozen=True)
class Estimate:
    """What a training step will take with some knobs.

    Attributes:
        knobs: which.
        parts: bytes by component at the peak of the tensors; their sum is `tensor_bytes`.
        tensor_bytes: peak of all tensors.
        process_bytes: what the process takes beside them.
        recomputed: blocks that recompute.
        blocks: of the model.
        row_tokens: of the longest row.
        step: forward and backward of such a row.
    """

    knobs: Knobs
    parts: Mapping[str, int]
    tensor_bytes: int
    process_bytes: int
    recomputed: int
    blocks: int
    row_tokens: int
    step: Traced

    @property
    def bytes(self) -> int:
        """What is held against the budget."""
        return self.tensor_bytes + self.process_bytes

    def seconds_per_token(self, speed: Speed) -> float:
        """On a device of this speed; only its ratio to that of other knobs means much."""
        return speed.seconds(self.step) / self.row_tokens


@dataclass(frozen=True)
class Speed:
    """A device in numbers, each a second: operations of products, quantized weights read, bytes written and read
    again; and the seconds that a call takes by itself."""

    operations: float
    reads: float
    bytes: float
    call_seconds: float

    def seconds(self, step: Traced) -> float:
        """The sum of what each would take by itself."""
        work = step.operations / self.operations + step.read / self.reads + step.written / self.bytes
        return work + step.calls * self.call_seconds


SPEEDS = {
    "cpu": Speed(operations=0.8e12, reads=12e9, bytes=8e9, call_seconds=8e-6),
    "cuda": Speed(operations=60e12, reads=150e9, bytes=250e9, call_seconds=6e-6),
}
"""Of two CPU cores with 16-bit products, and of a GPU of the middle class. What a plan compares are ratios of times on
one device, and these depend on the ratios within a row of this table."""


@dataclass(frozen=True)
class Traced:
    """One step, of one or two rows, of a model with `blocks` blocks.

    Attributes:
        blocks: how many.
        held: bytes there before and after the step: weights, adapters, their gradients.
        forward: peak bytes of the forward pass and the loss, `held` included.
        backward: peak bytes of the backward pass, `held` included.
        operations: of products and attention.
        written: bytes of all results.
        read: quantized weights that were read, each time that they were.
        calls: of operations.
    """

    blocks: int
    held: float
    forward: float
    backward: float
    operations: float
    written: float
    read: float
    calls: float

    def at(self, other: Traced, blocks: int) -> Traced:
        """The same with `blocks` blocks, on the line through this trace and `other`, of more blocks."""
        share = (blocks - self.blocks) / (other.blocks - self.blocks)

        def line(name: str) -> float:
            first, second = getattr(self, name), getattr(other, name)
            return float(first + (second - first) * share)

        names = ("held", "forward", "backward", "operations", "written", "read", "calls")
        return Traced(blocks, **{name: line(name) for name in names})


def trace_step(model: nn.Module, rows: Sequence[object], *, blocks: int, loss: Callable[[object], Tensor]) -> Traced:
    """Run forward and backward of `rows`, one after the other, and count.

    Every trained parameter has a gradient from the start, as in all rows of a step but its first: the peak is that of
    the later rows.

    Args:
        model: with numbers or, within a `FakeTensorMode`, without; in training mode.
        rows: each is handed to `loss`.
        blocks: of the model, for the record.
        loss: gives the summed loss of a row, from `model`.
    """
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone() if parameter.requires_grad else None
    with TensorTracker() as tracker:
        held = tracker.hold(tensors_of(model))
        held += tracker.hold(p.grad for p in model.parameters() if p.grad is not None)
        for row in rows:
            with tracker.phase("forward"):
                value = loss(row)
            with tracker.phase("backward"):
                value.backward()
            del value
    for parameter in model.parameters():
        parameter.grad = None
    return Traced(
        blocks,
        held,
        tracker.peaks["forward"],
        tracker.peaks["backward"],
        tracker.operations / len(rows),
        tracker.written_bytes / len(rows),
        tracker.read_weights / len(rows),
        tracker.calls / len(rows),
    )


@dataclass(frozen=True)
class Blocks:
    """A model's step by what its blocks do: all keep their activations, or all compute them again.

    Attributes:
        keep: of the whole model, no block recomputes.
        recompute: of the whole model, every block does.
        kept: bytes that a block keeps for backward when it keeps all.
        inputs: bytes that it keeps when it recomputes.
    """

    keep: Traced
    recompute: Traced
    kept: float
    inputs: float

    @classmethod
    def from_traces(cls, keep: tuple[Traced, Traced], recompute: tuple[Traced, Traced], blocks: int) -> Blocks:
        """From two traces each, of fewer blocks and of more, for a model of `blocks` blocks.

        Where both are of the whole model, only the difference between `kept` and `inputs` is known, and `inputs` counts
        as zero: what some blocks save is then told too low, never too high.
        """
        if keep[0].blocks == keep[1].blocks:
            return cls(keep[0], recompute[0], max(0.0, (keep[0].forward - recompute[0].forward) / blocks), 0.0)
        slopes = []
        for few, more in (keep, recompute):
            count = more.blocks - few.blocks
            slopes.append((more.forward - few.forward - (more.held - few.held)) / count)
        return cls(keep[0].at(keep[1], blocks), recompute[0].at(recompute[1], blocks), *slopes)

    def with_recompute(self, chosen: Collection[int]) -> Traced:
        """The step where the blocks with these numbers recompute.

        Exactness: that of the traces where none or all are chosen. Between them blocks count as alike within a group,
        and the peak is looked for at each block of the backward pass, from the last to the first.
        """
        blocks = self.keep.blocks
        if not chosen:
            return self.keep
        if len(chosen) == blocks:
            return self.recompute
        beyond_kept = self.keep.backward - self.keep.held - blocks * self.kept
        beyond_inputs = self.recompute.backward - self.recompute.held - blocks * self.inputs
        below, backward = 0.0, 0.0
        for number in range(blocks):
            below += self.inputs if number in chosen else self.kept
            backward = max(backward, below + (beyond_inputs if number in chosen else beyond_kept))
        again = len(chosen) / blocks
        saved = len(chosen) * (self.kept - self.inputs)
        return replace(
            self.keep,
            forward=max(self.keep.forward - saved, self.recompute.forward),
            backward=self.keep.held + backward,
            operations=self.keep.operations + again * (self.recompute.operations - self.keep.operations),
            written=self.keep.written + again * (self.recompute.written - self.keep.written),
            read=self.keep.read + again * (self.recompute.read - self.keep.read),
            calls=self.keep.calls + again * (self.recompute.calls - self.keep.calls),
        )


def shortest_period(kinds: Sequence[object]) -> int:
    """The least number of blocks after which their kinds repeat; the last group may be cut short.

    `[a, a, a]` is 1, `[a, b, a, b, a]` 2, `[a, b, c]` 3.
    """
    count = len(kinds)
    repeats = (p for p in range(1, count + 1) if all(kinds[i] == kinds[i - p] for i in range(p, count)))
    return next(repeats, 1)


def traced_counts(blocks: int, period: int) -> tuple[int, int]:
    """With how many blocks to trace: the few and the more, one period apart, ending where the model ends in its period.

    Both are `blocks` where no group repeats in a model of many: twice as many blocks would take longer than it tells.
    """
    few = period + blocks % period
    while few < 2:
        few += period
    return (few, few + period) if few + period <= max(blocks, MOST_MADE_UP) else (blocks, blocks)
