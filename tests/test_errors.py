from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lowmem_ft import errors
from lowmem_ft.errors import MOST_PROBLEMS, LowmemError, Problem, RecipeError, nearest

TREE = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, LowmemError)]


def test_problem_says_where_what_instead_in_one_line() -> None:
    problem = Problem("a.yaml line 14", 'memory.budget: "24GBB" is not a size', "Write budget: 24GiB")
    assert str(problem) == 'a.yaml line 14: memory.budget: "24GBB" is not a size. Write budget: 24GiB'


def test_full_stop_between_what_and_instead_is_not_doubled() -> None:
    assert str(Problem("", "No such file.", "Write a path")) == "No such file. Write a path"


def test_parts_that_are_empty_leave_no_marks() -> None:
    assert str(Problem("", "No examples")) == "No examples"
    assert str(Problem("data.jsonl", "no examples")) == "data.jsonl: no examples"


@pytest.mark.parametrize("given", ["wrong", Problem("", "wrong"), [Problem("", "wrong")]])
def test_text_problem_and_list_give_the_same_error(given: str | Problem | list[Problem]) -> None:
    error = RecipeError(given)
    assert error.problems == (Problem("", "wrong"),)
    assert str(error) == "wrong"


def test_problems_may_come_from_a_generator_and_are_kept() -> None:
    error = RecipeError(Problem("", f"{number}") for number in range(3))
    assert [problem.what for problem in error.problems] == ["0", "1", "2"]
    assert str(error) == "0\n1\n2"


@pytest.mark.parametrize("more", [0, 1, 7])
def test_problems_beyond_the_most_are_counted_not_dropped(more: int) -> None:
    error = RecipeError(Problem("", f"problem {number}") for number in range(MOST_PROBLEMS + more))
    lines = str(error).splitlines()
    assert len(error.problems) == MOST_PROBLEMS + more
    assert sum(line.startswith("problem ") for line in lines) == MOST_PROBLEMS
    assert lines[MOST_PROBLEMS:] == ([f"... and {more} more problems of this kind"] if more else [])


def test_exit_codes_are_distinct_and_never_success() -> None:
    codes = [error.exit_code for error in TREE]
    assert len(TREE) >= 7
    assert len(set(codes)) == len(codes)
    assert 0 not in codes


def test_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    drawn = re.findall(r"(\w+Error)\s+exit (\d)", errors.__doc__ or "")
    assert drawn == [(error.__name__, str(error.exit_code)) for error in TREE]


def test_every_error_class_is_documented() -> None:
    classes = [
        node for node in ast.parse(Path(errors.__file__).read_text("utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) >= 8
    assert [node.name for node in classes if not ast.get_docstring(node)] == []


def test_nearest_finds_a_slip_and_nothing_far() -> None:
    valid = ["rank", "alpha", "dropout", "targets"]
    assert nearest("rnak", valid) == "rank"
    assert nearest("dropuot", valid) == "dropout"
    assert nearest("zzz", valid) is None
    assert nearest("rank", []) is None
