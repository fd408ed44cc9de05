"""Which turns are trained."""

from __future__ import annotations

from typing import Any

import pytest

from lowmem_ft.data.train_on import checked_train_on, turn_weights
from lowmem_ft.errors import RecipeError

ROLES = ("system", "user", "assistant", "user", "assistant", "assistant", "user")
MESSAGES = [{"role": role, "content": "x"} for role in ROLES]


@pytest.mark.parametrize(
    ("train_on", "weights"),
    [
        ("all", {2: 1.0, 4: 1.0, 5: 1.0}),
        ("last", {5: 1.0}),
        ({"last": 2}, {5: 2.0}),
        ({1: 0.5, "3": 4}, {2: 0.5, 5: 4.0}),
        ({"3": 4, "last": 0}, {}),
        ({"9": 1}, {}),
    ],
)
def test_weights_go_to_turns_by_number(train_on: Any, weights: dict[int, float]) -> None:
    assert turn_weights(MESSAGES, train_on if isinstance(train_on, str) else _as_texts(train_on)) == weights


def _as_texts(train_on: dict[Any, float]) -> dict[str, float]:
    return {str(name): weight for name, weight in train_on.items()}


def test_context_turns_have_a_number_and_no_weight() -> None:
    assert turn_weights(MESSAGES, "all", untrained=(2,)) == {4: 1.0, 5: 1.0}
    assert turn_weights(MESSAGES, {"2": 1.0}, untrained=(2,)) == {4: 1.0}


@pytest.mark.parametrize(
    ("train_on", "words"),
    [
        ("first", '"first" is no choice'),
        ({"0": 1}, '"0" is no turn'),
        ({"first": 1}, '"first" is no turn'),
        ({"1": -1}, "weight of turn 1 is -1"),
        ({"1": float("nan")}, "weight of turn 1 is nan"),
        ({"1": 0}, "no turn has a weight"),
        ({}, "no turn has a weight"),
    ],
)
def test_what_names_no_turn_is_refused(train_on: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        checked_train_on(train_on)


def test_numbers_may_be_numbers_or_texts() -> None:
    assert checked_train_on({1: 0.5, "last": 1}) == {"1": 0.5, "last": 1}  # type: ignore[dict-item]
