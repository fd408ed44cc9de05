"""Which assistant turns are trained, and with what weight."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from lowmem_ft.data.messages import Message
from lowmem_ft.errors import Problem, RecipeError

TrainOn = str | Mapping[str, float]


def checked_train_on(train_on: TrainOn) -> TrainOn:
    """`train_on` with turn numbers as texts.

    Args:
        train_on: "all", "last", or weights by turn number from 1 (int or text) and "last".

    Raises:
        RecipeError: another word, a key that is no turn, a weight that is negative or not finite, or all weights 0.
    """
    if isinstance(train_on, str):
        if train_on not in ("all", "last"):
            raise RecipeError(Problem("data.train_on", f'"{train_on}" is no choice', "Write all, last or {last: 1}"))
        return train_on
    weights = {str(name): weight for name, weight in train_on.items()}
    problems = [
        Problem(
            "data.train_on",
            f'"{name}" is no turn',
            "Write turn numbers from 1, or last: {1: 0.5, last: 1}",
        )
        for name in weights
        if name != "last" and not (name.isascii() and name.isdigit() and int(name) > 0 and name == str(int(name)))
    ]
    problems += [
        Problem("data.train_on", f"the weight of turn {name} is {weight}", "Write a number from 0 on")
        for name, weight in weights.items()
        if not (math.isfinite(weight) and weight >= 0)
    ]
    if not problems and not any(weights.values()):
        problems.append(Problem("data.train_on", "no turn has a weight above 0", "Write train_on: all"))
    if problems:
        raise RecipeError(problems)
    return weights


def turn_weights(messages: Sequence[Message], train_on: TrainOn, untrained: Collection[int] = ()) -> dict[int, float]:
    """Weights above 0 of the assistant turns of a conversation, by message index.

    Args:
        messages: the conversation.
        train_on: as `checked_train_on` gave it.
        untrained: indexes of messages that are never trained; they are counted as turns all the same.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    weights: dict[int, float] = {}
    for number, index in enumerate(turns, 1):
        is_last = index == turns[-1]
        if isinstance(train_on, str):
            weight = 1.0 if train_on == "all" or is_last else 0.0
        else:
            weight = train_on.get("last", train_on.get(str(number), 0.0)) if is_last else train_on.get(str(number), 0.0)
        if weight > 0 and index not in untrained:
            weights[index] = float(weight)
    return weights
