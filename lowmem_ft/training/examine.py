"""Held-out examples as the run looks at them: loss on schedule, answers before and after, all written to the folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from torch import nn

from lowmem_ft.data.dataset import read_some
from lowmem_ft.data.template import Encoder
from lowmem_ft.model.generate import generate_answers
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.evaluate import evaluate_loss
from lowmem_ft.training.inputs import Data
from lowmem_ft.training.reporter import Reporter
from lowmem_ft.training.run_folder import RunFolder
from lowmem_ft.training.setup import PreparedModel, held_out_rows


@dataclass
class Examiner:
    """Evaluates on the held-out data of a recipe; without any it does nothing.

    Attributes:
        losses: loss of each evaluation, in order.
        exact: share of exact answers of each, in order.
    """

    recipe: Recipe
    data: Data
    prepared: PreparedModel
    tokenizer: Any
    encoder: Encoder
    accelerator: Accelerator
    run: RunFolder
    reporter: Reporter
    losses: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    last_step: int = -1

    def examine(self, model: nn.Module, step: int) -> None:
        """Loss and answers."""
        self.loss(model, step)
        if self.recipe.eval.generate and self.recipe.data.eval is not None:
            self._generate(step)

    def state(self) -> dict[str, Any]:
        """What came of the evaluations so far."""
        return {"losses": list(self.losses), "exact": list(self.exact), "last_step": self.last_step}

    def restore(self, state: dict[str, Any]) -> None:
        """Back to a state."""
        self.losses, self.exact, self.last_step = list(state["losses"]), list(state["exact"]), state["last_step"]

    def loss(self, model: nn.Module, step: int) -> float | None:
        """Loss over all held-out examples; None where there are none, or it is known."""
        if self.data.eval is None or step == self.last_step:
            return None
        rows = held_out_rows(self.recipe, self.data.eval, self.prepared.packed)
        with self.reporter.working(f"held-out loss at step {step}") as work, self.accelerator.autocast():
            result = evaluate_loss(model, rows, self.accelerator.device)
            tokens = f"{result.trained_tokens:,} trained tokens"
            work.result = f"held-out loss at step {step}: {result.loss:.4f} over {tokens}"
        self.last_step = step
        self.losses.append(result.loss)
        self.run.record(step=step, eval_loss=result.loss, eval_trained_tokens=result.trained_tokens)
        return result.loss

    def _generate(self, step: int) -> None:
        settings = self.recipe.eval
        assert self.recipe.data.eval is not None
        examples = read_some(self.recipe.data.eval, self.recipe.data, self.encoder, settings.generate)
        if not examples:
            self.reporter.line("no held-out example has a prompt and an answer: nothing is generated")
            return
        name = "base model" if step == 0 else "trained model"
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
                    progress=lambda done: work.now(f"{done} of {len(examples)}"),
                )
            exact = sum(answer.exact for answer in answers)
            work.result = f"{name}: {exact} of {len(answers)} held-out answers exact ({exact / len(answers):.0%})"
        self.exact.append(exact / len(answers))
        self.run.record(step=step, exact_match=exact / len(answers), prompts=len(answers))
        self.run.record_answers(step, answers)
