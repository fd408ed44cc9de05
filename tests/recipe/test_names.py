from __future__ import annotations

import pytest

from lowmem_ft.recipe.allowed import sections, settings_of
from lowmem_ft.recipe.names import OTHER_NAMES, unknown_name
from lowmem_ft.recipe.places import Place
from lowmem_ft.recipe.yaml12 import Scalar, Table

VALUE = Scalar("7", True, Place("f", 1))


@pytest.mark.parametrize(
    ("path", "name", "what", "instead", "meant"),
    [
        ("train", "warmup_ration", "train has no", "Did you mean warmup_ratio? Write warmup_ratio: 7", "warmup_ratio"),
        ("train", "Batch-Size", "train has no", "Did you mean batch_size? Write batch_size: 7", "batch_size"),
        ("", "lr", "lr belongs to train, not to the top level", "Write train: {lr: 7}", None),
        ("train", "seed", "seed belongs to the top level, not to train", "Write seed: 7", None),
        (
            "train",
            "every_steps",
            "checkpoint or eval",
            "Write checkpoint: {every_steps: 7}, or did you mean steps?",
            None,
        ),
        ("data", "weight", "weight belongs to data.train", "Write data: {train: {weight: 7}}", None),
        ("", "learning_rate", "it is train.lr here", "Write train: {lr: 7}", None),
        ("adapter", "r", "it is adapter.rank here", "Write rank: 7", "rank"),
        ("train", "bf16", "it is train.precision here", "Write precision: bf16", "precision"),
        ("train", "gradient_accumulation_steps", "micro_batch_tokens", "Write micro_batch_tokens: auto", None),
        (
            "",
            "warmup_ration",
            "the top level has no",
            "Did you mean train.warmup_ratio? Write train: {warmup_ratio: 7}",
            None,
        ),
        ("", "lr:3", "the top level has no", "Put a space after the colon", None),
        ("prepare", "zzz", "prepare has no setting zzz", "It has cast, head, embeddings", None),
    ],
)
def test_unknown_name(path: str, name: str, what: str, instead: str, meant: str | None) -> None:
    found = unknown_name(sections()[path], path, name, VALUE)
    assert what in found.what
    assert found.instead == instead
    assert found.meant == (meant or (found.meant if name == "gradient_accumulation_steps" else None))


def test_override_is_answered_with_an_override() -> None:
    value = Scalar("7", True, Place("f", 0, "lr=7", 1))
    assert unknown_name(sections()[""], "", "lr", value).instead == "Write train.lr=7"
    section = Table({}, Place("f", 0, "trian.lr=7", 1))
    assert unknown_name(sections()[""], "", "trian", section).instead == "Did you mean train? Write train.lr=7"


def test_long_or_nested_value_is_not_repeated() -> None:
    table = Table({}, Place("f", 1))
    assert unknown_name(sections()[""], "", "trian", table).instead == "Did you mean train? Write train: ..."
    long = Scalar("x" * 99, True, Place("f", 1))
    assert unknown_name(sections()[""], "", "lr", long).instead == "Write train: {lr: 0.0002}"


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_tools_lead_to_settings_that_exist(name: str) -> None:
    key, value = OTHER_NAMES[name]
    section, _, setting = key.rpartition(".")
    found = settings_of(sections()[section])[setting]
    assert not value or value in found.allowed.words
    assert name not in settings_of(sections()[section])
