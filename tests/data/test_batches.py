"""The order of examples, their rows, and the labels in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.data.batches import StepOrder, count_steps, epoch_order, make_row, micro_batches
from lowmem_ft.data.formats import TokenizedExample


def _example(ids: list[int], weights: list[float], line: int = 1) -> TokenizedExample:
    return TokenizedExample(ids, weights, "train.jsonl", line)


def test_every_example_comes_once_an_epoch_and_the_last_step_holds_the_rest() -> None:
    order = StepOrder(size=10, batch_size=4, steps=6, seed=3)
    epochs = [[order.examples(step) for step in steps] for steps in ((1, 2, 3), (4, 5, 6))]
    for epoch in epochs:
        assert [len(step) for step in epoch] == [4, 4, 2]
        assert sorted(sum(epoch, ())) == list(range(10))
    assert epochs[0] != epochs[1]
    assert [order.epoch_of(step) for step in (0, 1, 3, 5)] == [0, 0.4, 1, 1.8]


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    """These numbers may never change: a resumed run relies on them."""
    assert epoch_order(8, seed=17, epoch=0).tolist() == ORDER_17_0
    assert epoch_order(8, seed=17, epoch=1).tolist() != ORDER_17_0
    assert epoch_order(8, seed=18, epoch=0).tolist() != ORDER_17_0


ORDER_17_0 = [1, 4, 3, 5, 6, 2, 7, 0]


def test_without_shuffle_the_file_order_stays() -> None:
    order = StepOrder(size=5, batch_size=2, steps=3, seed=3, shuffle=False)
    assert [order.examples(step) for step in (1, 2, 3)] == [(0, 1), (2, 3), (4,)]


def test_indices_of_an_epoch_may_repeat_examples() -> None:
    order = StepOrder(4, 2, 2, 3, indices=lambda seed, epoch: np.array([5, 5, 6, 7]))
    assert sorted(order.examples(1) + order.examples(2)) == [5, 5, 6, 7]


def test_length_grouping_puts_like_lengths_together_and_loses_none() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 1000)
    plain = StepOrder(1000, 16, 63, 3)
    grouped = StepOrder(1000, 16, 63, 3, lengths=lengths)
    steps = [grouped.examples(step) for step in range(1, 64)]
    assert sorted(sum(steps, ())) == list(range(1000))
    assert [len(step) for step in steps] == [16] * 62 + [8]

    def spread(order: StepOrder) -> float:
        return float(np.mean([np.ptp(lengths[list(order.examples(step))]) for step in range(1, 63)]))

    assert spread(grouped) < spread(plain) / 5
    first = [float(np.mean(lengths[list(step)])) for step in steps[:16]]
    assert first != sorted(first)  # short and long steps are mixed


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [(1, None, 3), (2, None, 6), (None, None, 3), (None, 7, 7), (1.5, None, 5), (0.01, None, 1)],
)
def test_steps_of_a_run(epochs: float | None, steps: int | None, expected: int) -> None:
    assert count_steps(10, 4, epochs, steps) == expected


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 400))
def test_rows_hold_each_example_once_and_keep_to_their_size(lengths: list[int], most: int) -> None:
    rows = micro_batches(lengths, most)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[i] for i in row) <= most or len(row) == 1
    assert rows == micro_batches(lengths, most)


def test_without_packing_each_example_is_a_row() -> None:
    assert micro_batches([5, 6, 7], 100, packing=False) == [[0], [1], [2]]


def test_labels_are_the_next_token_of_the_same_example_where_it_is_trained() -> None:
    row = make_row([_example([5, 6, 7, 2], [0, 0, 1, 1], 4), _example([8, 9, 2], [1, 1, 0], 9)])
    assert row.input_ids.tolist() == [[5, 6, 7, 2, 8, 9, 2]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert row.labels.tolist() == [[-100, 7, 2, -100, 9, -100, -100]]  # 8 begins an example: nothing predicts it
    assert row.lengths == (4, 3)
    assert (row.trained_tokens, row.weight_sum) == (3, 3.0)
    assert row.weights is None
    assert row.sources == ("train.jsonl line 4", "train.jsonl line 9")


def test_the_positions_with_a_label_are_known() -> None:
    row = make_row([_example([5, 6, 7], [0, 1, 1]), _example([8, 9], [1, 1])])
    assert row.trained is not None
    assert row.trained.tolist() == (row.labels[0] != -100).nonzero().squeeze(-1).tolist() == [0, 1, 3]


def test_weights_move_with_their_labels() -> None:
    row = make_row([_example([5, 6, 7], [0, 0.5, 1]), _example([8, 9], [0, 2])])
    assert row.weights is not None
    assert row.weights.tolist() == [[0.5, 1.0, 0.0, 2.0, 0.0]]
    assert (row.trained_tokens, row.weight_sum) == (3, 3.5)


def test_a_row_moves_to_a_device_whole() -> None:
    row = make_row([_example([5, 6, 7], [0, 0.5, 1])]).to(torch.device("meta"))
    assert row.weights is not None
    assert row.trained is not None
    tensors = (row.input_ids, row.position_ids, row.labels, row.weights, row.trained)
    assert {t.device.type for t in tensors} == {"meta"}
    assert row.trained_tokens == 2
