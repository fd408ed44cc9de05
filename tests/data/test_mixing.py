"""Weights of sources."""

from __future__ import annotations

import numpy as np
import pytest

from lowmem_ft.data.mixing import mix_order
from lowmem_ft.errors import DataError


def test_weight_one_is_every_example_once_in_order() -> None:
    assert mix_order([3, 2], [1, 1.0], seed=1, epoch=0).tolist() == [0, 1, 2, 3, 4]


def test_a_weight_is_whole_copies_and_a_sample_without_replacement() -> None:
    counts = np.bincount(mix_order([10, 100, 4], [2, 1.25, 0.5], seed=3, epoch=0), minlength=114)
    assert counts[:10].tolist() == [2] * 10
    assert counts[10:110].sum() == 125
    assert set(counts[10:110].tolist()) == {1, 2}
    assert sorted(counts[110:].tolist()) == [0, 0, 1, 1]


def test_the_sample_follows_from_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): mix_order([1000], [0.5], seed=seed, epoch=epoch).tolist() for seed in (1, 2) for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    assert mix_order([1000], [0.5], seed=1, epoch=1).tolist() == orders[1, 1]
    assert mix_order([8], [0.5], seed=17, epoch=0).tolist() == EIGHT


EIGHT = [1, 3, 4, 5]  # what PCG64 gives on every platform: a change here changes what a resumed run sees


def test_a_source_does_not_depend_on_the_sizes_of_others() -> None:
    alone = mix_order([5, 100], [1, 0.5], seed=1, epoch=0)[5:] - 5
    other = mix_order([50, 100], [1, 0.5], seed=1, epoch=0)[50:] - 50
    assert np.array_equal(alone, other)


def test_a_weight_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(DataError) as error:
        mix_order([5, 10], [1, 0.01], seed=1, epoch=0)
    for word in ("source 2", "0.01", "10 examples", "0.1"):
        assert word in str(error.value)
    assert mix_order([0], [0.5], seed=1, epoch=0).tolist() == []
    assert mix_order([], [], seed=1, epoch=0).dtype == np.int64
