"""The examples of a step, and the rows that a forward pass sees.

The order is a pure function of seed and epoch, so the position in the data is one number: the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowmem_ft.data.formats import TokenizedExample

IGNORED = -100
GROUPED_STEPS = 16


@dataclass(frozen=True)
class Row:
    """Examples end to end. S is the sum of their lengths; nothing is padded.

    Attributes:
        input_ids: shape (1, S), int64.
        position_ids: shape (1, S), restarting at 0 with each example.
        labels: shape (1, S); the token after each position where it is trained, else -100. Never of another example.
        weights: factor of each label's loss, shape (1, S), or None where all are 1.
        lengths: tokens of each example.
        trained_tokens: labels that are not -100.
        weight_sum: sum of the factors of those labels; equals `trained_tokens` where all are 1.
        sources: file and line of each example.
        trained: positions that have a label, shape (T,), int64; None where they are to be looked up.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    weights: Tensor | None
    lengths: tuple[int, ...]
    trained_tokens: int
    weight_sum: float
    sources: tuple[str, ...]
    trained: Tensor | None = None

    def to(self, device: torch.device) -> Row:
        """The same row on a device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in values.items()}
        return Row(**moved)


@dataclass(frozen=True)
class Batch:
    """One step in numbers, to be printed.

    Attributes:
        examples: of a step.
        micro_batches: rows of a step, on average.
        micro_batch_tokens: most tokens of a row.
        steps: of the run.
        epochs: passes over the data.
        row_multiple: rows are filled up to a multiple of so many tokens.
        not_packed: why rows hold one example each, or None where they hold several.
    """

    examples: int
    micro_batches: float
    micro_batch_tokens: int
    steps: int
    epochs: float
    row_multiple: int
    not_packed: str | None


@dataclass(frozen=True, eq=False)  # an order is itself: the cache of epochs below must tell two apart
class StepOrder:
    """Which examples each step sees: a pure function of seed and step.

    Attributes:
        size: examples of an epoch.
        batch_size: examples of a step.
        steps: number of steps of the run.
        seed: of the order.
        shuffle: a new order each epoch; else file order.
        indices: the examples of an epoch by (seed, epoch), in file order; None for 0 to size - 1.
        lengths: tokens of each example; given, a step gets examples of like length (length grouping).
    """

    size: int
    batch_size: int
    steps: int
    seed: int
    shuffle: bool = True
    indices: Callable[[int, int], np.ndarray] | None = None
    lengths: np.ndarray | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a full pass; the last holds what is left."""
        return math.ceil(self.size / self.batch_size)

    def epoch_of(self, step: int) -> float:
        """Passes done after `step` steps."""
        full, rest = divmod(step, self.steps_per_epoch)
        return full + min(rest * self.batch_size, self.size) / self.size

    def examples(self, step: int) -> tuple[int, ...]:
        """Indices of the examples of a step, counted from 1. The last step of an epoch may hold fewer."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        order = _epoch_examples(self, epoch)
        return tuple(int(i) for i in order[position * self.batch_size : (position + 1) * self.batch_size])


@lru_cache(maxsize=2)
def _epoch_examples(order: StepOrder, epoch: int) -> np.ndarray:
    examples = np.arange(order.size) if order.indices is None else order.indices(order.seed, epoch)
    if order.shuffle:
        examples = examples[epoch_order(order.size, order.seed, epoch)]
    if order.lengths is not None:
        examples = _group_by_length(examples, order.lengths, order.batch_size, order.seed, epoch)
    return examples


def _group_by_length(examples: np.ndarray, lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Sort by length within windows of 16 steps, so that a step's examples are alike, then mix the steps.

    What is left over for an incomplete step stays at the end, so that full steps stay full.
    """
    full = len(examples) - len(examples) % batch_size
    window = GROUPED_STEPS * batch_size
    parts = [examples[start : min(start + window, full)] for start in range(0, full, window)]
    steps = [part[np.argsort(lengths[part], kind="stable")].reshape(-1, batch_size) for part in parts]
    if not steps:
        return examples
    grouped = np.concatenate(steps)
    mixed = grouped[epoch_order(len(grouped), seed, epoch)].reshape(-1)
    return np.concatenate([mixed, examples[full:]])


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `size` indices, the same for equal (seed, epoch) on every machine and numpy version.

    Drawn from raw PCG64 numbers, whose stream numpy keeps; that of its `permutation` it does not promise.
    """
    numbers = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(numbers, kind="stable")


def count_steps(size: int, batch_size: int, epochs: float | None, steps: int | None) -> int:
    """Steps of a run: `steps`, or those of `epochs` passes, at least 1."""
    if steps is not None:
        return steps
    per_epoch = math.ceil(size / batch_size)
    full, part = divmod(epochs if epochs is not None else 1.0, 1)
    return max(1, int(full) * per_epoch + math.ceil(part * size / batch_size))


def micro_batches(lengths: Sequence[int], micro_batch_tokens: int, packing: bool = True) -> list[list[int]]:
    """Group the examples of a step into rows of at most `micro_batch_tokens` tokens.

    Longest first, each into the first row with room, which needs at most 11/9 of the fewest possible rows (plus one).
    An example longer than `micro_batch_tokens` is a row by itself. Without packing every example is.

    Args:
        lengths: tokens of each example.
        micro_batch_tokens: most tokens of a row.
        packing: whether examples share rows.

    Returns:
        Positions into `lengths`, a list a row, each row and the rows in ascending order of their first example.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((row for row, left in enumerate(room) if packing and left >= lengths[index]), None)
        if place is None:
            rows.append([index])
            room.append(micro_batch_tokens - lengths[index])
        else:
            rows[place].append(index)
            room[place] -= lengths[index]
    return sorted(sorted(row) for row in rows)


def make_row(examples: Sequence[TokenizedExample]) -> Row:
    """Lay examples end to end, each label one position before its token."""
    ids = np.concatenate([np.asarray(e.input_ids, dtype=np.int64) for e in examples])
    factors = np.concatenate([_shifted_weights(e) for e in examples])
    trained = factors != 0
    labels = np.where(trained, np.roll(ids, -1), IGNORED)
    positions = np.concatenate([np.arange(len(e.input_ids), dtype=np.int64) for e in examples])
    plain = bool(np.all(factors[trained] == 1))
    return Row(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        labels=torch.from_numpy(labels)[None],
        weights=None if plain else torch.from_numpy(factors.astype(np.float32))[None],
        lengths=tuple(len(e.input_ids) for e in examples),
        trained_tokens=int(trained.sum()),
        weight_sum=float(factors.sum(dtype=np.float64)),
        sources=tuple(f"{e.file} line {e.line}" for e in examples),
        trained=torch.from_numpy(np.flatnonzero(trained)),
    )


def _shifted_weights(example: TokenizedExample) -> np.ndarray:
    """Weights of the following token at each position; the last position has none."""
    return np.append(np.asarray(example.weights, dtype=np.float64)[1:], 0.0)
