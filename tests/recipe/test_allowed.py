from __future__ import annotations

import pytest

from lowmem_ft.recipe.allowed import Number, sections, settings_of
from lowmem_ft.recipe.data_section import DataSection, Source
from lowmem_ft.recipe.schema import ModelSection, Recipe
from lowmem_ft.recipe.train_section import TrainSection


def test_every_section_is_found_once_under_its_name() -> None:
    assert list(sections())[:4] == ["", "model", "data", "data.train"]
    assert sections()["data.train"] is Source
    assert len(set(sections().values())) == len(sections()) == 10


def test_every_setting_can_be_read_and_has_a_meaning_and_a_line_to_paste() -> None:
    seen = 0
    for path, section in sections().items():
        for name, setting in settings_of(section).items():
            seen += 1
            assert setting.meaning, f"{path}.{name}"
            assert setting.paste.removeprefix(f"{name}: ") not in ("null", "{}"), f"{path}.{name}"
            assert str(setting.allowed)
    assert seen >= 50


@pytest.mark.parametrize(
    ("section", "name", "words"),
    [
        (Recipe, "seed", "a whole number of at least 0"),
        (ModelSection, "double_quant", "true or false"),
        (ModelSection, "quantization", "none, nf4, fp4 or int8"),
        (TrainSection, "warmup_ratio", "a number from 0 to 1"),
        (TrainSection, "micro_batch_tokens", "auto or a whole number of at least 1"),
        (TrainSection, "max_grad_norm", "a number above 0 or null"),
        (DataSection, "train", "a text, a mapping {path, format, weight, config, split, map} or a list of those"),
        (DataSection, "train_on", "last, all or a mapping {name: a number of at least 0, ...}"),
    ],
)
def test_what_is_allowed_in_words(section: type, name: str, words: str) -> None:
    assert str(settings_of(section)[name].allowed) == words


@pytest.mark.parametrize(
    ("number", "inside", "outside"),
    [
        (Number(True, at_least=1), [1, 9], [0]),
        (Number(False, above=0), [0.1], [0, -1]),
        (Number(False, at_least=0, at_most=1), [0, 1], [1.1, -0.1]),
        (Number(False, at_least=0, below=1), [0, 0.9], [1]),
    ],
)
def test_range_holds_what_it_says(number: Number, inside: list[float], outside: list[float]) -> None:
    assert all(number.holds(value) for value in inside)
    assert not any(number.holds(value) for value in outside)
