from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowmem_ft.recipe.train_section import TrainSection
from tests.recipe.causes import cause


@pytest.mark.parametrize("value", ["3", True, 2.5, float("inf")])
def test_values_given_in_python_are_not_converted_either(value: object) -> None:
    with pytest.raises(ValidationError):
        TrainSection(steps=value)  # type: ignore[arg-type]


def test_a_run_has_one_length() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainSection(epochs=1.0, steps=2)
    assert cause(caught.value).keys == ("train.steps", "train.epochs")
