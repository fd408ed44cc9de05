from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("changes", "keys", "says"),
    [
        ({"eval": {"patience": 2}}, ("eval.patience", "eval.every_steps"), "or remove patience"),
        ({"save": "rouge_l"}, ("checkpoint.save_best", "eval.metrics"), "There are loss, contains, length"),
        ({"save": "lenght"}, ("checkpoint.save_best", "eval.metrics"), "Write save_best: length"),
        (
            {"save": "contains", "eval": {"every_steps": 1, "generate": 3}},
            ("checkpoint.save_best", "eval.generate_every_steps"),
            "Write eval: {generate: 100, generate_every_steps: 100}",
        ),
    ],
)
def test_what_the_best_is_known_by_is_measured_on_the_way(
    changes: dict[str, Any], keys: tuple[str, ...], says: str
) -> None:
    data, metrics = DataSection(train="t", eval="e"), ["contains", "a:length"]
    evaluation = EvalSection(metrics=metrics, **changes.get("eval", {}))
    with pytest.raises(ValidationError) as caught:
        Recipe(model=MODEL, data=data, eval=evaluation, checkpoint=CheckpointSection(save_best=changes.get("save")))
    assert cause(caught.value).keys == keys
    assert says in str(caught.value)


def test_a_metric_of_generated_answers_may_say_which_is_the_best() -> None:
    data, best = DataSection(train="t", eval="e"), CheckpointSection(save_best="length")
    evaluation = EvalSection(metrics=["a.py:length"], generate=2, generate_every_steps=1, patience=3)
    assert Recipe(model=MODEL, data=data, eval=evaluation, checkpoint=best).checkpoint.save_best == "length"


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
