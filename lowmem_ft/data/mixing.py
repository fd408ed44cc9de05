"""How often each source's examples come in an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowmem_ft.errors import DataError, Problem


def mix_order(sizes: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> np.ndarray:
    """Indices of the examples of one epoch, each source `weight` times: whole copies, and a sample for the fraction.

    A pure function of its arguments, on every machine and numpy version: the sample is drawn from raw PCG64 numbers,
    whose stream numpy keeps. The order is that of the sources and, in them, of the file; shuffling is the caller's.

    Args:
        sizes: examples of each source; the examples of all sources lie one after another.
        weights: one for each source, above 0. 1 is every example once, 2 twice, 0.25 a quarter of them, another quarter
            each epoch.
        seed: the recipe's seed.
        epoch: from 0.

    Returns:
        int64 indices; shape (examples of the epoch,).

    Raises:
        DataError: a weight that leaves none of a source's examples.
    """
    drawn, start = [], 0
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        indices = np.arange(start, start + size, dtype=np.int64)
        copies, part = int(weight), round((weight - int(weight)) * size)
        if size and not copies and not part:
            what = f"source {source + 1} of the data: weight {weight} of {size} examples is none"
            raise DataError(Problem("", what, f"Write weight: {1 / size:.2g} or more"))
        drawn += [indices] * copies
        if part:
            numbers = np.random.PCG64(np.random.SeedSequence([seed, epoch, source])).random_raw(size)
            drawn.append(indices[np.sort(np.argsort(numbers, kind="stable")[:part])])
        start += size
    return np.concatenate(drawn) if drawn else np.zeros(0, dtype=np.int64)
