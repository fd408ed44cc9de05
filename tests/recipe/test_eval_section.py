"""Metrics by name, by function, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from lowmem_ft.recipe.eval_section import METRICS, EvalSection, function_of, metric_name
from tests.recipe.causes import cause
from tests.recipe.conftest import SMALLEST, Load, Refuse

WITH_EVAL = f"{SMALLEST}  eval: eval.jsonl\n"


def test_every_built_in_metric_is_accepted_and_keeps_its_name() -> None:
    assert EvalSection(metrics=list(METRICS)).metrics == list(METRICS)
    assert [metric_name(text) for text in METRICS] == list(METRICS)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("my.module:score", ("my.module", "score")),
        ("a b/c.py:score_2", ("a b/c.py", "score_2")),
        ("exact_match", None),
        (":score", None),
        ("module:", None),
        ("module:two words", None),
        ("a:b:c", None),
    ],
)
def test_a_function_is_a_place_and_a_name(text: str, parts: tuple[str, str] | None) -> None:
    assert function_of(text) == parts


@pytest.mark.parametrize(
    ("metrics", "key", "says"),
    [
        (["exact-match"], "eval.metrics[0]", "Did you mean exact_match"),
        (["exact_match", "bleu"], "eval.metrics[1]", "module:function"),
        (["a:score", "b:score"], "eval.metrics[1]", 'two metrics are called "score"'),
        (["contains", "contains"], "eval.metrics[1]", "two metrics"),
        (["a:loss"], "eval.metrics[0]", 'the name "loss" is taken'),
    ],
)
def test_what_is_no_metric_or_has_no_name_of_its_own_is_refused(metrics: list[str], key: str, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EvalSection(metrics=metrics)
    assert cause(caught.value).keys == (key,)
    assert says in str(caught.value)


def test_the_file_of_a_metric_is_relative_to_the_recipe_and_must_be_there(
    load: Load, refuse: Refuse, folder: Path
) -> None:
    (folder / "mine.py").write_text("")
    text = f"{WITH_EVAL}eval: {{generate: 2, metrics: [rouge_l, mine.py:score, a.module:other]}}\n"
    assert load(text).recipe.eval.metrics == ["rouge_l", f"{folder / 'mine.py'}:score", "a.module:other"]
    (problem,) = refuse(text.replace("mine.py", "mime.py"))
    assert problem.startswith('mine.yaml line 6: eval.metrics[1]: "mime.py" is not there')
    assert "Did you mean mine.py" in problem


def test_a_schedule_of_answers_needs_answers() -> None:
    with pytest.raises(ValidationError) as caught:
        EvalSection(generate_every_steps=5)
    assert cause(caught.value).keys == ("eval.generate_every_steps", "eval.generate")


def test_the_place_of_a_wrong_metric_is_shown(refuse: Refuse) -> None:
    (problem,) = refuse(f"{WITH_EVAL}eval:\n  generate: 2\n  metrics:\n    - contains\n    - rouge\n")
    assert problem.startswith('mine.yaml line 10: eval.metrics[1]: "rouge" is no metric')
    assert "Did you mean rouge_l" in problem
