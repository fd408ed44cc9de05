"""Held-out examples as the run looks at them: loss on schedule, answers before and after, all written to the folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from accelerate import Accelerator
from torch import nn

from lowmem_ft.data.dataset import Split, read_some
from lowmem_ft.data.formats import Example
from lowmem_ft.data.template import Encoder
from lowmem_ft.model.generate import Answer, generate_answers
from lowmem_ft.recipe.eval_section import LOSS
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.evaluate import evaluate_loss
from lowmem_ft.training.metrics import Metric, make_metrics, score_answers, try_metrics
from lowmem_ft.training.reporter import Reporter
from lowmem_ft.training.setup import PreparedModel, held_out_rows, is_due

SHOWN_CHARACTERS = 240


class Records(Protocol):
    """Where evaluations are written; `RunFolder` is one."""

    def record(self, **values: Any) -> None:
        """A line of metrics."""

    def record_answers(
        self, step: int, answers: Sequence[Answer], scores: Sequence[Mapping[str, float | None]]
    ) -> None:
        """All answers, and the scores of each."""


@dataclass(frozen=True)
class Exam:
    """What answers are generated for, and what they are measured by.

    Attributes:
        examples: held-out ones that have an answer.
        metrics: of the recipe.
    """

    examples: tuple[Example, ...] = ()
    metrics: tuple[Metric, ...] = ()


def make_exam(recipe: Recipe, encoder: Encoder, reporter: Reporter, where: Callable[[str], str]) -> Exam:
    """The examples and metrics of `eval`, each metric tried once, before any weight is read.

    Args:
        recipe: resolved.
        encoder: of its data.
        reporter: told where there is nothing to generate for.
        where: from a dotted key to where it was written.

    Raises:
        RecipeError: a metric cannot be had, or does not work.
    """
    if not recipe.eval.generate or recipe.data.eval is None:
        return Exam()
    metrics = make_metrics(recipe.eval.metrics, where)
    examples = read_some(recipe.data.eval, recipe.data, encoder, recipe.eval.generate)
    if not examples:
        reporter.line("no held-out example has a prompt and an answer: nothing is generated")
        return Exam()
    try_metrics(metrics, encoder.reference_answer(examples[0]), where)
    return Exam(tuple(examples), metrics)


@dataclass
class Examiner:
    """Evaluates on the held-out data of a recipe; without any it does nothing.

    Attributes:
        losses: loss of each evaluation, in order.
        scores: mean of each metric at each generation, in order.
    """

    recipe: Recipe
    held_out: Split | None
    exam: Exam
    prepared: PreparedModel
    tokenizer: Any
    encoder: Encoder
    accelerator: Accelerator
    records: Records
    reporter: Reporter
    losses: list[float] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    last_step: int = -1
    last_answers: int = -1

    def examine(self, model: nn.Module, step: int) -> dict[str, float]:
        """Loss and answers. Returns `loss` and the mean of each metric, without what this step is known by already."""
        return {**self._loss(model, step), **self._answers(step)}

    def due(self, model: nn.Module, step: int) -> Callable[[], dict[str, float]] | None:
        """What is to be looked at after a step on the way, or None."""
        schedule = self.recipe.eval
        looks: list[Callable[[], dict[str, float]]] = []
        if is_due(schedule.every_steps, step):
            looks.append(lambda: self._loss(model, step))
        if is_due(schedule.generate_every_steps, step):
            looks.append(lambda: self._answers(step))
        if not looks:
            return None
        return lambda: {name: value for look in looks for name, value in look().items()}

    def state(self) -> dict[str, Any]:
        """What came of the evaluations so far."""
        scores = {name: list(values) for name, values in self.scores.items()}
        steps = {"last_step": self.last_step, "last_answers": self.last_answers}
        return {"losses": list(self.losses), "scores": scores, **steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Back to a state."""
        self.losses = list(state["losses"])
        self.scores = {name: list(values) for name, values in state["scores"].items()}
        self.last_step, self.last_answers = state["last_step"], state["last_answers"]

    def _loss(self, model: nn.Module, step: int) -> dict[str, float]:
        if self.held_out is None or step == self.last_step:
            return {}
        rows = held_out_rows(self.recipe, self.held_out, self.prepared.packed)
        with self.reporter.working(f"held-out loss at step {step}") as work, self.accelerator.autocast():
            result = evaluate_loss(model, rows, self.accelerator.device)
            tokens = f"{result.trained_tokens:,} trained tokens"
            shown = f"{result.loss:.4f} (perplexity {result.perplexity:.4g}) over {tokens}"
            work.result = f"held-out loss at step {step}: {shown}"
        self.last_step = step
        self.losses.append(result.loss)
        self.records.record(
            step=step,
            eval_loss=result.loss,
            eval_perplexity=result.perplexity,
            eval_trained_tokens=result.trained_tokens,
        )
        return {LOSS: result.loss}

    def _answers(self, step: int) -> dict[str, float]:
        if not self.exam.examples or step == self.last_answers:
            return {}
        settings, examples = self.recipe.eval, self.exam.examples
        name = "base model" if step == 0 else "trained model"
        most = None if settings.generate_tokens == "auto" else settings.generate_tokens
        with self.reporter.working(f"{name} answers {len(examples)} held-out prompts") as work:
            with self.accelerator.autocast():
                answers = generate_answers(
                    self.prepared.model,
                    self.tokenizer,
                    [self.encoder.encode_prompt(example) for example in examples],
                    [self.encoder.reference_answer(example) for example in examples],
                    self.encoder.stop_token_ids,
                    max_new_tokens=settings.max_new_tokens,
                    device=self.accelerator.device,
                    most_tokens=most,
                    progress=lambda done: work.now(f"{done} of {len(examples)}"),
                )
            scores = score_answers(self.exam.metrics, answers)
            means = ", ".join(f"{metric} {mean:.4g}" for metric, mean in scores.means.items())
            work.result = f"{name} at step {step} on {len(answers)} held-out prompts: {means}"
        for line in (*scores.failures, *sample_lines(answers[: settings.samples])):
            self.reporter.line(line)
        self.last_answers = step
        for metric, mean in scores.means.items():
            self.scores.setdefault(metric, []).append(mean)
        self.records.record(step=step, **scores.means, prompts=len(answers))
        self.records.record_answers(step, answers, scores.each)
        return dict(scores.means)


def sample_lines(answers: Sequence[Answer]) -> list[str]:
    """Answers beside their references, a line a text: the end of a long prompt, the beginning of the others."""
    lines = []
    for answer in answers:
        ended = "" if answer.ended else "  (did not end)"
        prompt = repr(answer.prompt[-SHOWN_CHARACTERS:])
        lines += [
            f"  prompt     {'...' if len(answer.prompt) > SHOWN_CHARACTERS else ''}{prompt}",
            f"  reference  {_begin(answer.reference)}",
            f"  answer     {_begin(answer.text)}{ended}",
        ]
    return lines


def _begin(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")
