from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowmem_ft.recipe.allowed import sections, settings_of
from lowmem_ft.recipe.schema import (
    EXCLUSIVE,
    AdapterSection,
    DataSection,
    EvalSection,
    ModelSection,
    Recipe,
    SettingError,
    TrainSection,
)

MODEL = ModelSection(path="owner/name")
DATA = DataSection(train="owner/data")


def test_smallest_recipe_needs_a_model_and_data_only() -> None:
    assert Recipe(model=MODEL, data=DATA).train == TrainSection()


def cause(error: ValidationError) -> SettingError:
    found = error.errors()[0]["ctx"]["error"]
    assert isinstance(found, SettingError)
    return found


def test_settings_that_clash_name_their_keys() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainSection(epochs=1.0, steps=2)
    assert cause(caught.value).keys == ("train.steps", "train.epochs")
    with pytest.raises(ValidationError) as caught:
        Recipe(model=MODEL, data=DATA, eval=EvalSection(every_steps=3))
    assert cause(caught.value).keys == ("eval.every_steps", "data.eval")
    with pytest.raises(ValidationError) as caught:
        Recipe(model=MODEL, data=DATA, name="../x")
    assert cause(caught.value).keys == ("name",)


@pytest.mark.parametrize("turn", ["0", "01", "-1", "first", ""])
def test_turns_are_numbered_from_1(turn: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataSection(train="x/y", train_on={turn: 1.0})
    assert cause(caught.value).keys == ("data.train_on",)
    assert DataSection(train="x/y", train_on={"1": 0.5, "12": 0.0, "last": 1.0}).train_on


def test_exclusive_settings_exist() -> None:
    for group in EXCLUSIVE:
        for key in group:
            section, _, name = key.rpartition(".")
            assert name in settings_of(sections()[section])


def test_nothing_changes_after_it_was_checked() -> None:
    with pytest.raises(ValidationError):
        MODEL.path = "other"


@pytest.mark.parametrize("value", ["3", True, 2.5, float("inf")])
def test_values_given_in_python_are_not_converted_either(value: object) -> None:
    with pytest.raises(ValidationError):
        TrainSection(steps=value)  # type: ignore[arg-type]


def test_a_kind_of_adapter_takes_only_settings_that_it_has() -> None:
    with pytest.raises(ValidationError) as caught:
        AdapterSection(kind="ia3", rank=4, alpha_pattern={"q_proj": 1.0})
    assert cause(caught.value).keys == ("adapter.rank", "adapter.alpha_pattern")
    with pytest.raises(ValidationError) as caught:
        AdapterSection(kind="vera", trainable_tokens=[1])
    assert str(cause(caught.value)) == "vera has no trainable_tokens. Remove trainable_tokens, or write kind: lora"
    assert AdapterSection(kind="vera", rank=256).rank == 256
    assert AdapterSection(kind="dora", alpha=4.0, trainable_tokens=[1], rank_pattern={"/q/": 2}).kind == "dora"


def test_a_regular_expression_is_read_where_it_is_written() -> None:
    with pytest.raises(ValidationError) as caught:
        AdapterSection(targets=["q_proj", "/(q|k/"])
    assert cause(caught.value).keys == ("adapter.targets",)
    assert "/(q|k/ is no regular expression: missing )" in str(cause(caught.value))
    with pytest.raises(ValidationError) as caught:
        AdapterSection(rank_pattern={"/[/": 2})
    assert cause(caught.value).keys == ("adapter.rank_pattern",)


def test_dora_on_int8_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe(model=ModelSection(path="a/b", quantization="int8"), data=DATA, adapter=AdapterSection(kind="dora"))
    assert cause(caught.value).keys == ("adapter.kind", "model.quantization")
