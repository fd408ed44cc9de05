from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowmem_ft.recipe.adapter_section import AdapterSection
from lowmem_ft.recipe.allowed import sections, settings_of
from lowmem_ft.recipe.data_section import DataSection
from lowmem_ft.recipe.schema import EXCLUSIVE, CheckpointSection, EvalSection, ModelSection, PrepareSection, Recipe
from lowmem_ft.recipe.train_section import TrainSection
from tests.recipe.causes import cause

MODEL = ModelSection(path="owner/name")
DATA = DataSection(train="owner/data")


def test_smallest_recipe_needs_a_model_and_data_only() -> None:
    assert Recipe(model=MODEL, data=DATA).train == TrainSection()


def test_settings_that_clash_name_their_keys() -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe(model=MODEL, data=DATA, eval=EvalSection(every_steps=3))
    assert cause(caught.value).keys == ("eval.every_steps", "data.eval")
    with pytest.raises(ValidationError) as caught:
        Recipe(model=MODEL, data=DATA, name="../x")
    assert cause(caught.value).keys == ("name",)


def test_the_best_checkpoint_needs_evaluations_on_the_way() -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe(model=MODEL, data=DATA, checkpoint=CheckpointSection(save_best="loss"))
    assert cause(caught.value).keys == ("checkpoint.save_best", "eval.every_steps")


def test_exclusive_settings_exist() -> None:
    for group in EXCLUSIVE:
        for key in group:
            section, _, name = key.rpartition(".")
            assert name in settings_of(sections()[section])


def test_dora_on_int8_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe(model=ModelSection(path="a/b", quantization="int8"), data=DATA, adapter=AdapterSection(kind="dora"))
    assert cause(caught.value).keys == ("adapter.kind", "model.quantization")


@pytest.mark.parametrize("part", ["head", "embeddings"])
@pytest.mark.parametrize("cast", ["norms", "none"])
def test_a_switch_of_the_cast_that_would_do_nothing_is_refused(part: str, cast: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PrepareSection.model_validate({"cast": cast, part: False})
    assert cause(caught.value).keys == (f"prepare.{part}", "prepare.cast")
    assert PrepareSection.model_validate({part: False}).cast == "all"
