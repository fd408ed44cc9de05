"""What generated answers are worth: the metrics of `eval.metrics`, each a number an answer; higher is better."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lowmem_ft.errors import Problem, RecipeError, nearest
from lowmem_ft.model.generate import Answer
from lowmem_ft.recipe.eval_section import function_of, metric_name

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
"""Letters and digits between anything else; of scripts that put no space between words, each character."""


@dataclass(frozen=True)
class Metric:
    """A number for an answer.

    Attributes:
        name: key in metrics.jsonl.
        score: of one answer; higher is better.
    """

    name: str
    score: Callable[[Answer], float]


@dataclass(frozen=True)
class Scores:
    """What answers came to.

    Attributes:
        means: of each metric, over the answers that it could score; NaN where it could score none.
        each: the scores of each answer by metric; None where the metric failed on it.
        failures: a line for each metric that failed on some.
    """

    means: Mapping[str, float]
    each: tuple[Mapping[str, float | None], ...]
    failures: tuple[str, ...]


def make_metrics(texts: Sequence[str], where: Callable[[str], str]) -> tuple[Metric, ...]:
    """The metrics of a recipe. A user's module is imported here, and rouge-score where it is needed.

    Args:
        texts: `eval.metrics`, already known to be names or `module:function`.
        where: from a dotted key to where it was written.

    Raises:
        RecipeError: a package, module or function is not there, or its import fails.
    """
    made: list[Metric] = []
    problems: list[Problem] = []
    for index, text in enumerate(texts):
        try:
            made.append(Metric(metric_name(text), _score_of(text)))
        except _NotThere as error:
            problems.append(Problem(where(f"eval.metrics[{index}]"), error.what, error.instead))
    if problems:
        raise RecipeError(problems)
    return tuple(made)


def try_metrics(metrics: Sequence[Metric], reference: str, where: Callable[[str], str]) -> None:
    """Call each once, with a reference as the answer to itself: what cannot work fails before the run, not after it.

    Raises:
        RecipeError: one fails, or returns no finite number.
    """
    _, problems = _scored(metrics, Answer("", reference, reference, True))
    if problems:
        raise RecipeError(
            [
                Problem(where("eval.metrics"), f"{name} of {reference!r:.80} and itself {why}", "Mend the function")
                for name, why in problems.items()
            ]
        )


def score_answers(metrics: Sequence[Metric], answers: Sequence[Answer]) -> Scores:
    """Score every answer by every metric. A metric that fails on an answer ends no run: it is counted and said."""
    each: list[dict[str, float | None]] = []
    failed: dict[str, list[str]] = {metric.name: [] for metric in metrics}
    for answer in answers:
        scores, problems = _scored(metrics, answer)
        each.append(scores)
        for name, why in problems.items():
            failed[name].append(why)
    means = {}
    for metric in metrics:
        good = [score for scores in each if (score := scores[metric.name]) is not None]
        means[metric.name] = math.fsum(good) / len(good) if good else math.nan
    lines = [
        f"{name} failed on {len(whys)} of {len(answers)} answers, which are not in its mean; the first one {whys[0]}"
        for name, whys in failed.items()
        if whys
    ]
    return Scores(means, tuple(each), tuple(lines))


def _scored(metrics: Sequence[Metric], answer: Answer) -> tuple[dict[str, float | None], dict[str, str]]:
    """Scores by name, None where a metric failed, and why it failed."""
    scores: dict[str, float | None] = {}
    problems: dict[str, str] = {}
    for metric in metrics:
        scores[metric.name] = None
        try:
            value: Any = metric.score(answer)
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(f"it returned {number}")
            scores[metric.name] = number
        except Exception as error:  # a user's function may raise anything
            problems[metric.name] = f"failed: {type(error).__name__}: {error}"
    return scores, problems


def exact_match(answer: Answer) -> float:
    """1 where the answer is the reference, but for white space around it, and ended by itself."""
    return float(answer.exact)


def contains(answer: Answer) -> float:
    """1 where the reference is somewhere in the answer."""
    return float(answer.reference.strip() in answer.text)


def json_valid(answer: Answer) -> float:
    """1 where the answer is one JSON value by RFC 8259, which knows no NaN and no Infinity."""
    try:
        json.loads(answer.text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def _no_constant(name: str) -> Any:
    raise ValueError(name)


class _Words:
    """Words for rouge-score. On ASCII text those of its own tokenizer, which drops every other letter."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


def _rouge_l() -> Callable[[Answer], float]:
    """F-measure of the longest common subsequence of words (Lin 2004), by Google's rouge-score, without stemming."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        what = "rouge_l needs the package rouge-score, which is not installed"
        raise _NotThere(what, "Install it: pip install 'rouge-score>=0.1.2'") from error
    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    return lambda answer: scorer.score(answer.reference, answer.text)["rougeL"].fmeasure


_BUILT_IN = {"exact_match": exact_match, "contains": contains, "json_valid": json_valid}


class _NotThere(Exception):  # noqa: N818 - what is missing, on its way to a RecipeError
    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.what, self.instead = what, instead


def _score_of(text: str) -> Callable[[Answer], float]:
    function = function_of(text)
    if function is None:
        return _rouge_l() if text == "rouge_l" else _BUILT_IN[text]
    place, name = function
    module = _module(place)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = nearest(name, functions)
        instead = f"Did you mean {place}:{close}?" if close else f"It has {', '.join(functions[:6]) or 'none'}"
        raise _NotThere(f"{place} has no function {name}", instead)
    return lambda answer: found(answer.text, answer.reference)


def _module(place: str) -> ModuleType:
    """A user's module: a file, or a name that is looked for where Python looks and in the current folder."""
    try:
        if not place.endswith(".py"):
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.append(str(Path.cwd()))
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"metric_{Path(place).stem}", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # whatever the user's module does when it is imported
        instead = "Write module:function for a module that can be imported here, or path/to/file.py:function"
        raise _NotThere(f"{place} cannot be imported: {type(error).__name__}: {error}", instead) from error
