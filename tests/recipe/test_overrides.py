from __future__ import annotations

import pytest

from .conftest import SMALLEST, Load, Refuse


def test_override_follows_the_rules_of_the_file(load: Load) -> None:
    overrides = [
        "train.lr=1e-3",
        "train.shuffle=no",
        "adapter.targets=[q_proj,v_proj]",
        "name=a=b",
        "train.max_grad_norm=",
    ]
    loaded = load(SMALLEST, *overrides)
    recipe = loaded.recipe
    assert (recipe.train.lr, recipe.train.shuffle, recipe.name, recipe.train.max_grad_norm) == (
        1e-3,
        False,
        "a=b",
        None,
    )
    assert recipe.adapter.targets == ["q_proj", "v_proj"]
    assert loaded.overrides["train.lr"] == "train.lr=1e-3"
    assert "train.lr" not in loaded.lines


def test_override_removes_the_problem_of_the_value_it_replaces(load: Load) -> None:
    assert load(SMALLEST + "train: {lr: fast, epochs: -1}\n", "train.lr=1", "train.epochs=2").recipe.train.lr == 1


def test_problems_of_file_and_command_line_come_together(refuse: Refuse) -> None:
    assert refuse(
        SMALLEST + "seed: x\n", "train.lr=abc", "train.lrr=1", "trian.lr=1", "lr=2", "train.schedule=off"
    ) == [
        "mine.yaml line 5: seed: x is not a whole number of at least 0. Write for example seed: 17",
        "command line: train.lr=abc: abc is not a number above 0. Write for example train.lr=0.0002",
        "command line: train.lrr=1: train has no setting lrr. Did you mean lr? Write train.lr=1",
        "command line: trian.lr=1: trian: the top level has no setting trian. Did you mean train? Write train.lr=1",
        "command line: lr=2: lr belongs to train, not to the top level. Write train.lr=2",
        "command line: train.schedule=off: off (false in YAML 1.1) is not one of cosine, linear, constant. Write for "
        'example train.schedule=cosine; a text that looks like something else needs quotes: "off"',
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["foo"], "this is not section.key=value"),
        (["=3"], "this is not section.key=value"),
        (["train..lr=3"], "this is not section.key=value"),
        (["--train.lr=3"], "Write for example train.lr=3"),
        (["train.lr=1", "train.lr=2"], "given twice on the command line"),
        (["train={lr: 1}"], "train is a section. Give its settings one by one: train.KEY=VALUE"),
        (["train.lr=[1"], "command line: train.lr=[1: the list that opens here"),
        (["train.lr=1\n---\n2"], "second document"),
        (["data.train.weight=2"], "data.train is one value on line 4, and has no weight. Replace it as a whole"),
        (["data.train=[train.jsonl]", "data.train.weight=2"], "data.train is a list, and has no weight"),
        (["data.train=nothing.jsonl"], "command line: data.train=nothing.jsonl: "),
        (["train.steps=2", "train.epochs=3"], "epochs and steps are both given"),
        (["seed.x=1"], "command line: seed.x=1: seed: a mapping"),
        (["eval.generate=2"], "command line: eval.generate=2: this needs held-out data"),
    ],
)
def test_override_that_cannot_be_honoured_is_refused(overrides: list[str], words: str, refuse: Refuse) -> None:
    messages = refuse(SMALLEST, *overrides)
    assert len(messages) == 1, messages
    assert messages[0].startswith("command line: ")
    assert words in messages[0]


def test_settings_that_exclude_each_other_replace_each_other(load: Load) -> None:
    train = load(SMALLEST + "train: {epochs: 3}\n", "train.steps=10").recipe.train
    assert (train.epochs, train.steps) == (None, 10)
    train = load(SMALLEST + "train:\n  steps: 3\n", "train.epochs=2").recipe.train
    assert (train.epochs, train.steps) == (2, None)
    train = load(SMALLEST + "train: {epochs: 3}\n", "train.steps=null").recipe.train
    assert (train.epochs, train.steps) == (3, None)


def test_override_reaches_into_a_mapping_and_makes_one_where_none_is(load: Load) -> None:
    text = "model: {path: ./model}\ndata:\n  train: {path: train.jsonl, weight: -3}\nadapter:\n"
    loaded = load(text, "data.train.weight=2", "data.map.prompt=question", "adapter.rank=4")
    assert loaded.recipe.data.train.weight == 2  # type: ignore[union-attr]
    assert loaded.recipe.data.map == {"prompt": "question"}
    assert loaded.recipe.adapter.rank == 4
    assert loaded.lines["data.train.path"] == 3
    assert "data.train.weight" not in loaded.lines


def test_null_gives_a_section_its_defaults(load: Load) -> None:
    assert load(SMALLEST + "train: {lr: 1, nonsense: 2}\n", "train=null").recipe.train.lr == 2e-4
