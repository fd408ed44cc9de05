"""Held-out evaluation within a run: what is measured once, what is written, and what a metric needs before the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from torch import nn

from lowmem_ft.data.dataset import load_split
from lowmem_ft.data.template import Encoder, make_encoder
from lowmem_ft.errors import RecipeError
from lowmem_ft.memory.attention import apply_packed_attention
from lowmem_ft.model.generate import Answer
from lowmem_ft.recipe.load import load_recipe
from lowmem_ft.training.causal import CausalLoss
from lowmem_ft.training.examine import Exam, Examiner, make_exam, sample_lines
from tests.data.tiny_tokenizers import with_template
from tests.flow.recipes import write_run
from tests.tiny import tiny_llama


class Said:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def working(self, what: str) -> Iterator[Any]:
        work = SimpleNamespace(result="", now=lambda text: None)
        yield work
        self.lines.append(work.result)


class Records:
    """Keeps what a run folder would write."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.answers: list[tuple[int, int]] = []

    def record(self, **values: Any) -> None:
        self.metrics.append(values)

    def record_answers(self, step: int, answers: Any, scores: Any) -> None:
        assert [set(own) for own in scores] == [{"contains", "length"}] * len(answers)
        self.answers.append((step, len(answers)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    (tmp_path / "mine.py").write_text("def length(answer, reference):\n    return len(answer)\n")
    return tmp_path


def _encoder() -> Encoder:
    return make_encoder(with_template("regex", "chatml"), template=None, max_tokens=128)


def _examiner(folder: Path, said: Said, records: Records, *more: str) -> tuple[Examiner, nn.Module]:
    metrics = "eval.metrics=[contains, mine.py:length]"
    loaded = load_recipe(folder / "mine.yaml", [metrics, "eval.samples=2", *more])
    recipe, encoder = loaded.recipe, _encoder()
    assert recipe.data.eval is not None
    held_out = load_split(recipe.data.eval, recipe.data, encoder, folder / "cache")
    model = tiny_llama()
    apply_packed_attention(model)
    exam = make_exam(recipe, encoder, said, loaded.where)
    prepared: Any = SimpleNamespace(model=model, packed=True)
    accelerator = Accelerator(cpu=True)
    examiner = Examiner(recipe, held_out, exam, prepared, encoder.tokenizer, encoder, accelerator, records, said)
    return examiner, CausalLoss(model)


def test_loss_and_every_metric_are_written_shown_and_kept(folder: Path) -> None:
    said, records = Said(), Records()
    examiner, loss = _examiner(folder, said, records)
    examiner.examine(loss, 4)
    first, second = records.metrics
    assert first.keys() == {"step", "eval_loss", "eval_perplexity", "eval_trained_tokens"}
    assert second.keys() == {"step", "contains", "length", "prompts"}
    assert (second["step"], second["prompts"]) == (4, 3)
    assert second["length"] > 0
    assert records.answers == [(4, 3)]
    assert examiner.losses == [first["eval_loss"]]
    assert examiner.scores == {"contains": [second["contains"]], "length": [second["length"]]}
    assert said.lines[1].startswith("trained model at step 4 on 3 held-out prompts: contains ")
    assert [line.split()[0] for line in said.lines[2:]] == ["prompt", "reference", "answer"] * 2


def test_what_is_due_follows_from_the_two_schedules_and_returns_what_it_measured(folder: Path) -> None:
    records = Records()
    examiner, loss = _examiner(folder, Said(), records, "eval.every_steps=2", "eval.generate_every_steps=3")
    measured = {}
    for step in range(1, 7):
        look = examiner.due(loss, step)
        measured[step] = None if look is None else set(look())
    metrics = {"contains", "length"}
    assert measured == {1: None, 2: {"loss"}, 3: metrics, 4: {"loss"}, 5: None, 6: {"loss", *metrics}}
    assert len(records.metrics) == 5
    assert examiner.examine(loss, 6) == {}
    assert set(examiner.examine(loss, 7)) == {"loss", *metrics}


def test_a_step_is_evaluated_once_also_after_a_resume(folder: Path) -> None:
    said, records = Said(), Records()
    examiner, loss = _examiner(folder, said, records)
    examiner.examine(loss, 4)
    state = json.loads(json.dumps(examiner.state()))
    examiner.examine(loss, 4)
    other, loss = _examiner(folder, said, records)
    other.restore(state)
    other.examine(loss, 4)
    assert len(records.metrics) == 2
    assert other.state() == examiner.state() == state
    other.examine(loss, 5)
    assert len(records.metrics) == 4


def test_the_tokens_of_a_batch_do_not_change_the_answers(folder: Path) -> None:
    records = Records()
    examiner, loss = _examiner(folder, Said(), records)
    examiner.examine(loss, 1)
    section = examiner.recipe.eval.model_copy(update={"generate_tokens": 1})
    examiner.recipe = examiner.recipe.model_copy(update={"eval": section})
    examiner.examine(loss, 2)
    assert records.metrics[1] == {**records.metrics[3], "step": 1}


def test_without_held_out_data_nothing_happens() -> None:
    nothing: Any = None
    examiner = Examiner(nothing, None, Exam(), *[nothing] * 6)
    examiner.examine(nn.Linear(1, 1), step=0)
    assert (examiner.losses, examiner.scores) == ([], {})


def test_metrics_are_tried_before_the_run_and_only_where_something_is_generated(folder: Path) -> None:
    (folder / "mine.py").write_text("def length(answer, reference):\n    return reference['x']\n")
    overrides = ["eval.metrics=[contains, mine.py:length]"]
    loaded = load_recipe(folder / "mine.yaml", overrides)
    with pytest.raises(RecipeError, match=r"command line: eval.metrics=.*length of 'there 0' and itself failed: Type"):
        make_exam(loaded.recipe, _encoder(), Said(), loaded.where)
    loaded = load_recipe(folder / "mine.yaml", [*overrides, "eval.generate=0"])
    assert make_exam(loaded.recipe, _encoder(), Said(), loaded.where) == Exam()


def test_held_out_texts_without_an_answer_are_said_and_nothing_is_generated(folder: Path) -> None:
    (folder / "eval.jsonl").write_text('{"text": "there and there"}\n')
    loaded, said = load_recipe(folder / "mine.yaml"), Said()
    assert make_exam(loaded.recipe, _encoder(), said, loaded.where) == Exam()
    assert said.lines == ["no held-out example has a prompt and an answer: nothing is generated"]


def test_samples_show_the_end_of_a_prompt_and_the_start_of_an_answer() -> None:
    lines = sample_lines([Answer("a" * 500 + "?", "yes\n", "n" * 500, False)])
    assert lines == [
        f"  prompt     ...'{'a' * 239}?'",
        r"  reference  'yes\n'",
        f"  answer     '{'n' * 240}'...  (did not end)",
    ]
