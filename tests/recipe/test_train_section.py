from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowmem_ft.recipe.train_section import RECOMPUTE, MemorySection, TrainSection
from tests.recipe.causes import cause


@pytest.mark.parametrize("value", ["3", True, 2.5, float("inf")])
def test_values_given_in_python_are_not_converted_either(value: object) -> None:
    with pytest.raises(ValidationError):
        TrainSection(steps=value)  # type: ignore[arg-type]


def test_a_run_has_one_length() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainSection(epochs=1.0, steps=2)
    assert cause(caught.value).keys == ("train.steps", "train.epochs")


@pytest.mark.parametrize("name", [*RECOMPUTE, "first-1", "every-30"])
def test_ways_to_recompute(name: str) -> None:
    assert MemorySection(recompute=name).recompute == name


@pytest.mark.parametrize("name", ["blok", "every-0", "every-", "first-x", "first--1", "full", "2"])
def test_no_ways_to_recompute(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MemorySection(recompute=name)
    assert cause(caught.value).keys == ("memory.recompute",)
    assert f'"{name}" is no way to recompute' in str(cause(caught.value))


def test_blocks_that_recompute_can_be_listed() -> None:
    assert MemorySection(recompute=[0, 3]).recompute == [0, 3]
    for wrong in ([], [-1], [True], [1.0]):
        with pytest.raises(ValidationError):
            MemorySection(recompute=wrong)  # type: ignore[arg-type]


def test_an_mlp_runs_in_slices_only_where_it_is_lean() -> None:
    assert MemorySection(mlp_slice_tokens=64).mlp_slice_tokens == 64
    with pytest.raises(ValidationError) as caught:
        MemorySection(mlp_slice_tokens=64, lean=False)
    assert cause(caught.value).keys == ("memory.mlp_slice_tokens", "memory.lean")
