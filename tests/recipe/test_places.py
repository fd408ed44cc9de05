from __future__ import annotations

import pytest

from lowmem_ft.recipe.places import Place, Problems


@pytest.mark.parametrize(
    ("place", "key", "shown"),
    [
        (Place("a.yaml", 4), "train.lr", "a.yaml line 4: train.lr"),
        (Place("a.yaml", 4), "", "a.yaml line 4"),
        (Place("a.yaml"), "model", "a.yaml: model"),
        (Place("a.yaml", 0, "train.lr=x", 1), "train.lr", "command line: train.lr=x"),
        (Place("a.yaml", 0, "data.train={path: x}", 1), "data.train.path", None),
    ],
)
def test_place_is_shown_once_with_its_key(place: Place, key: str, shown: str | None) -> None:
    assert place.of(key) == (shown or f"command line: {place.override}: {key}")


def test_problems_come_in_the_order_of_the_file_and_then_the_command_line() -> None:
    problems = Problems()
    for place in (Place("a", 0, "x=1", 2), Place("a", 9), Place("a", 0, "y=1", 1), Place("a", 3), Place("a")):
        problems.add(place, "", "wrong")
    assert len(problems) == 5
    assert [problem.where for problem in problems.in_order()] == [
        "a",
        "a line 3",
        "a line 9",
        "command line: y=1",
        "command line: x=1",
    ]


def test_touch_sees_a_setting_and_its_parts_only() -> None:
    problems = Problems()
    problems.add(Place("a"), "data.train[0].path", "wrong")
    assert [key for key in ("data", "data.train", "data.train[0]", "data.tra", "data.eval") if problems.touch(key)] == [
        "data",
        "data.train",
        "data.train[0]",
    ]
