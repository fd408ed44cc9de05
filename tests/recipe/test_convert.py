from __future__ import annotations

from typing import Any

import pytest

from lowmem_ft.recipe.convert import INVALID, Converter
from lowmem_ft.recipe.places import Place, Problems
from lowmem_ft.recipe.yaml12 import Table, read_tree

ENVIRONMENT = {"NAME": "run", "EMPTY": "", "RATE": "1e-3", "YEAR": "2024", "NO": "no", "BYTES": "\udcff"}


def convert(text: str) -> tuple[dict[str, Any], list[str]]:
    problems = Problems()
    tree = read_tree(text, lambda line: Place("f", line), problems)
    assert isinstance(tree, Table)
    values = Converter(ENVIRONMENT, problems).recipe(tree)
    needed = ("f: model: this is needed", "f: data: this is needed")
    return values, [str(problem) for problem in problems.in_order() if not str(problem).startswith(needed)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed: 3", {"seed": 3}),
        ("name: x\noutput: ~", {"name": "x", "output": None}),
        ("train:\neval: null", {}),
        ("train: {}", {"train": {}}),
        ("train: {shuffle: off, lr: '1e-3'}", {"train": {"shuffle": False, "lr": 1e-3}}),
        ("train: {micro_batch_tokens: auto}", {"train": {"micro_batch_tokens": "auto"}}),
        ("train: {micro_batch_tokens: '64'}", {"train": {"micro_batch_tokens": 64}}),
        ("adapter: {targets: all-linear}", {"adapter": {"targets": "all-linear"}}),
        ("adapter: {targets: [a, 'on']}", {"adapter": {"targets": ["a", "on"]}}),
        ("data: {train: [a, {path: b, weight: 2}]}", {"data": {"train": ["a", {"path": "b", "weight": 2.0}]}}),
        ("data: {train: a, train_on: {'1': .5}}", {"data": {"train": "a", "train_on": {"1": 0.5}}}),
        ("name: ${NAME}-${YEAR}-${X:-y}", {"name": "run-2024-y"}),
        ("name: ${YEAR}", {"name": "2024"}),
        ("name: $${NAME} $NAME", {"name": "${NAME} $NAME"}),
        ("name: ${EMPTY:-x}", {"name": "x"}),
        ("name: ${X:-}", {"name": None}),
        ("seed: ${X:-5}", {"seed": 5}),
        ('train: {lr: "${RATE}", shuffle: "${NO}"}', {"train": {"lr": 1e-3, "shuffle": False}}),
    ],
)
def test_values_have_the_types_of_their_settings(text: str, values: dict[str, Any]) -> None:
    assert convert(text) == (values, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: true", "seed: true is not a whole number of at least 0. Write for example seed: 17"),
        ("seed: [1]", "seed: a list is not a whole number of at least 0. Write for example seed: 17"),
        ("seed: -1", "seed: -1 is not a whole number of at least 0. Write for example seed: 17"),
        ("name: 2024", 'name: 2024 (a number) is not a text. Write name: "2024" if this text is meant'),
        ("name: ''", "name: the value is empty; name is a text. Write for example name: my-run, or remove the key"),
        ("name: {a: 1}", "name: a mapping (key: value) is not a text. Write for example name: my-run"),
        ("train: 5", "train: 5 (a number) is not a section. train holds epochs, steps, batch_size"),
        ("train: {lr: }", "train.lr: the value is empty; lr is a number above 0. Write for example lr: 0.0002, or"),
        ("train: {shuffle: 1}", "train.shuffle: 1 (a number) is not true or false. Write for example shuffle: true"),
        ("train: {shuffle: 'on'}", 'train.shuffle: "on" is not true or false. Write shuffle: on, without quotes'),
        (
            "train: {schedule: Cosine}",
            "train.schedule: Cosine is not one of cosine, linear, constant. Write schedule: cosine",
        ),
        (
            "train: {micro_batch_tokens: atuo}",
            "train.micro_batch_tokens: atuo is not auto or a whole number of at least 1.",
        ),
        (
            "adapter: {targets: all_linear}",
            "adapter.targets: all_linear is not all-linear or a list of texts. Write targets",
        ),
        (
            "adapter: {targets: 'a, b'}",
            'adapter.targets: "a, b" is not all-linear or a list of texts: this is one text.',
        ),
        ("adapter: {targets: []}", "adapter.targets: an empty list is not all-linear or a list of texts. Write for"),
        (
            "adapter: {targets: [a, 5]}",
            'adapter.targets[1]: 5 (a number) is not a text. Write "5" if this text is meant',
        ),
        ("data: {train: {weight: 1}}", "data.train.path: this is needed, and not given. Write for example path: data/"),
        ("data: {train: [{path: a, wieght: 1}]}", "data.train[0].wieght: data.train[0] has no setting wieght. Did you"),
        ("data: {train: [a, {path: b, weight: 0}]}", "data.train[1].weight: 0 is not a number above 0."),
        ("data: {train: a, train_on: first}", "data.train_on: first is not last, all or a mapping {name: a number of"),
        ("data: {train: a, train_on: {1: 1}}", 'the key 1 is a number, and keys are texts. Write "1": in quotes'),
        ("data: {trian: a}", "data.trian: data has no setting trian. Did you mean train? Write train: a"),
        (
            "name: ${GONE}",
            "name: the environment variable GONE in ${GONE} is not set. Set it, or give a default: ${GONE",
        ),
        ("name: a${", "name: a${ has a ${ that is not ${NAME} or ${NAME:-default}. Write $${ for a literal ${"),
        ("name: ${1}", "name: ${1} has a ${ that is not ${NAME}"),
        ("name: ${BYTES}", "name: a variable in ${BYTES} holds what is no text. Set it to a text"),
        ("seed: ${NAME}", 'seed: ${NAME}, which is "run" here, is not a whole number of at least 0.'),
    ],
)
def test_one_mistake_gives_one_problem(text: str, message: str) -> None:
    _, messages = convert(text)
    assert len(messages) == 1, messages
    start = "f line 1: "
    assert messages[0].startswith(start + message)


def test_refused_item_keeps_the_places_of_the_others() -> None:
    values, _ = convert("data: {train: [a, {path: b, weight: 0}, c]}")
    assert values["data"]["train"] == ["a", {"path": "b", "weight": INVALID}, "c"]
