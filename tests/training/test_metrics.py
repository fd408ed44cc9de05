"""Metrics of generated answers: their values on known answers, functions of the user's, and what cannot work."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from lowmem_ft.errors import RecipeError
from lowmem_ft.model.generate import Answer
from lowmem_ft.training import metrics
from lowmem_ft.training.metrics import Metric, make_metrics, score_answers, try_metrics


def answer(text: str, reference: str = "the cat sat", ended: bool = True) -> Answer:
    return Answer("p", reference, text, ended)


def score(name: str, given: Answer) -> float:
    (metric,) = make_metrics([name], str)
    return metric.score(given)


def test_exact_match_needs_the_whole_answer_and_its_end() -> None:
    texts = [("the cat sat", True), (" the cat sat\n", True), ("the cat sat", False), ("the cat sat down", True)]
    assert [score("exact_match", answer(text, ended=ended)) for text, ended in texts] == [1, 1, 0, 0]


def test_contains_looks_for_the_reference_in_the_answer() -> None:
    texts = ["so the cat sat down", "the cat", "THE CAT SAT"]
    assert [score("contains", answer(text)) for text in texts] == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": [1, null]}', True),
        ("3", True),
        (' "x"\n', True),
        ("", False),
        ("{'a': 1}", False),
        ('{"a": 1', False),
        ('{"a": 1} and more', False),
        ("NaN", False),
        ('{"a": -Infinity}', False),
        ("[" * 100_000, False),
    ],
)
def test_json_valid_is_one_value_and_nothing_else(text: str, valid: bool) -> None:
    assert score("json_valid", answer(text)) == valid


def _lcs_f(first: list[str], second: list[str]) -> float:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    common = table[-1][-1]
    return 2 * common / (len(first) + len(second)) if common else 0.0


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("the cat sat", "the cat sat"),
        ("the black cat has sat there", "the cat sat"),
        ("sat cat the", "the cat sat"),
        ("nothing alike", "the cat sat"),
        ("Der Müller kam spät", "der müller ging spät"),
    ],
)
def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(text: str, reference: str) -> None:
    pytest.importorskip("rouge_score")
    expected = _lcs_f(text.lower().split(), reference.lower().split())
    assert score("rouge_l", answer(text, reference)) == pytest.approx(expected, abs=1e-12)


def test_rouge_l_on_ascii_is_what_the_package_gives_by_itself() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    pairs = [("A b_c, d-e f's 12.5!", "a b c d e fs 12 5"), ("x", ""), ("one two three", "two, three one")]
    for text, reference in pairs:
        assert score("rouge_l", answer(text, reference)) == scorer.score(reference, text)["rougeL"].fmeasure


def test_rouge_l_counts_characters_where_words_have_no_spaces() -> None:
    pytest.importorskip("rouge_score")
    assert score("rouge_l", answer("猫坐下", "猫站下")) == pytest.approx(2 / 3)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(RecipeError) as caught:
        make_metrics(["exact_match", "rouge_l"], lambda key: f"mine.yaml line 7: {key}")
    message = str(caught.value)
    assert message.startswith("mine.yaml line 7: eval.metrics[1]: rouge_l needs the package rouge-score")
    assert "pip install 'rouge-score" in message


def test_a_function_of_a_file_or_module_gets_answer_and_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def both(answer, reference):\n    return len(answer) * 100 + len(reference)\n"
    (tmp_path / "a file.py").write_text(text)
    (tmp_path / "metric_of_this_test.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = make_metrics([f"{tmp_path}/a file.py:both", "metric_of_this_test:both"], str)
    assert [(m.name, m.score(answer("abc", "de"))) for m in made] == [("both", 302.0), ("both", 302.0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("broken.py:score", "cannot be imported: NameError"),
        ("no_such_module_here:score", "cannot be imported: ModuleNotFoundError"),
        ("mine.py:scor", "has no function scor. Did you mean"),
        ("mine.py:LIMIT", "has no function LIMIT"),
    ],
)
def test_what_cannot_be_imported_or_called_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("undefined_name\n")
    (tmp_path / "mine.py").write_text("LIMIT = 3\ndef score(answer, reference):\n    return 1\n")
    place = text if text.startswith("no_such") else f"{tmp_path}/{text}"
    with pytest.raises(RecipeError, match=r"^eval.metrics\[0\]: ") as caught:
        make_metrics([place], str)
    assert says in str(caught.value)


def _raises(given: Answer) -> float:
    raise KeyError("word")


@pytest.mark.parametrize(
    ("function", "says"),
    [(_raises, "KeyError"), (lambda a: math.nan, "it returned nan"), (lambda a: None, "TypeError")],
)
def test_a_metric_that_cannot_work_is_found_before_the_run(function: object, says: str) -> None:
    good, bad = Metric("good", metrics.exact_match), Metric("bad", function)  # type: ignore[arg-type]
    try_metrics([good], "a reference", str)
    with pytest.raises(RecipeError, match=says) as caught:
        try_metrics([good, bad], "a reference", str)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith("eval.metrics: bad of 'a reference' and itself failed")


def test_means_are_over_what_could_be_scored_and_the_rest_is_said() -> None:
    def picky(given: Answer) -> float:
        return {"a": 1.0, "b": 0.5}[given.text]

    made = [Metric("exact_match", metrics.exact_match), Metric("picky", picky)]
    scores = score_answers(made, [answer("a", "a"), answer("c", "b"), answer("b", "x")])
    assert scores.means == {"exact_match": pytest.approx(1 / 3), "picky": 0.75}
    assert scores.each[1] == {"exact_match": 0.0, "picky": None}
    assert json.loads(json.dumps(scores.each)) == list(scores.each)
    (line,) = scores.failures
    assert line.startswith("picky failed on 1 of 3 answers, which are not in its mean; the first one failed: KeyError")
    assert math.isnan(score_answers(made, [answer("z")]).means["picky"])
