"""When the state of a run is saved, and by what: a schedule, a better evaluation, a signal, the time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.errors import CheckpointError, Stopped
from lowmem_ft.recipe.eval_section import LOSS
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.best import BestSoFar, is_better
from lowmem_ft.training.checkpoint import Checkpoints
from lowmem_ft.training.reporter import Reporter
from lowmem_ft.training.resume import LAYOUT, Past, check_same_inputs, library_versions
from lowmem_ft.training.run_folder import RunFolder
from lowmem_ft.training.signals import StopRequests
from lowmem_ft.training.state import Live

Evaluation = Callable[[], Mapping[str, float]]
"""Returns what it measured: `loss` and metrics by name; nothing where all is known already."""


@dataclass(frozen=True)
class Boundary:
    """A step is done, and nothing of the next has begun.

    Attributes:
        step: that was done.
        rng: random generators of every process.
        metrics_bytes: length of metrics.jsonl.
        parts: state of the parts of the loop that have one.
    """

    step: int
    rng: list[dict[str, Any]]
    metrics_bytes: int
    parts: dict[str, dict[str, Any]]


class Saver:
    """Saves at step boundaries.

    An evaluation belongs to the step before it. What is saved before or in an evaluation says that it is owed, and the
    resumed run begins with it; so a run that was stopped leaves the same lines as one that was not.

    Args:
        recipe: whose `checkpoint` and `eval` sections hold.
        run: the open run folder.
        live: what is saved.
        stop: who asks for it.
        digests: of model and data.
        reporter: gets a line for each checkpoint beyond the schedule.

    Attributes:
        best: the best evaluation so far; joins the parts of `live`.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        live: Live,
        stop: StopRequests,
        digests: Mapping[str, str],
        reporter: Reporter,
    ) -> None:
        self.recipe, self.run, self.live, self.stop, self.reporter = recipe, run, live, stop, reporter
        self.checkpoints: Checkpoints = run.store
        self.best = BestSoFar(recipe.checkpoint.save_best or LOSS, recipe.eval.patience)
        live.parts = {**live.parts, "best": self.best}
        self._digests, self._recipe = dict(digests), recipe.model_dump(mode="json")
        # until one was written: 100 MB a second
        stop.save_seconds = max(stop.save_seconds, live.needed_bytes() / 1e8)
        self._step_seconds, self._step_begun = 0.0, time.monotonic()

    def restore(self, past: Past | None, accept_changes: bool = False) -> tuple[int, bool]:
        """Bring model, optimizer and all else to a checkpoint.

        Args:
            past: the checkpoint; None for a run from its start.
            accept_changes: go on though model or data are others.

        Returns:
            The step that was done last (0 without a checkpoint), and whether its evaluation is owed.

        Raises:
            CheckpointError: it is not of this model, data or settings.
        """
        if past is None:
            return 0, True
        check_same_inputs(past, self._digests, accept_changes, self.reporter)
        self.checkpoints.mark_best(past.state["best"])
        for line in [*self.live.read(past.checkpoint, past.state), *self.checkpoints.set_aside_after(past.step)]:
            self.reporter.line(line)
        self.reporter.line(f"going on after step {past.step}, from {past.checkpoint}")
        return past.step, bool(past.state["evaluation_owed"])

    def evaluate(self, step: int, evaluation: Evaluation) -> bool:
        """Evaluate after a step; a stop breaks it off, and the run is saved as it was before it.

        Args:
            step: that was done last.
            evaluation: what to do.

        Returns:
            Whether it was the best so far, and saved.

        Raises:
            Stopped: the run was told to leave, and is saved.
        """
        before = self._boundary(step)
        try:
            with self.stop.at_once():
                value = evaluation().get(self.best.by)
        except Stopped as stopped:
            raise self._leave(stopped, before, owed=True) from None
        self._step_begun = time.monotonic()
        if value is None or step == 0:
            return False
        self.best.look(step, value)
        if not self.recipe.checkpoint.save_best or not is_better(self.best.by, value, self._saved_best()):
            return False
        if not self._try_to_save(self._boundary(step), {"step": step, "by": self.best.by, "value": value}):
            return False
        self.reporter.line(f"step {step}: best {self.best.by} so far, {value:.4f}: {self.checkpoints.path(step)}")
        return True

    def _saved_best(self) -> float | None:
        """What is to be beaten: an evaluation whose checkpoint could not be written is not there to stay the best."""
        saved = self.checkpoints.best()
        return saved["value"] if saved is not None and saved["by"] == self.best.by else None

    def end_step(self, step: int, evaluation: Evaluation | None = None) -> None:
        """A step is done: evaluate and save where that is due, leave where that is asked.

        Args:
            step: that was done last.
            evaluation: what is due after this step, or None.

        Raises:
            Stopped: the run was told to leave, and is saved.
            CheckpointError: it was told to leave, and cannot be saved.
        """
        self._step_seconds = max(self._step_seconds, time.monotonic() - self._step_begun)
        if evaluation is not None and (asked := self.stop.asked()):
            raise self._leave(asked, self._boundary(step), owed=True)
        saved = evaluation is not None and self.evaluate(step, evaluation)
        every = self.recipe.checkpoint.every_steps
        if not saved and every is not None and step % every == 0:
            saved = self._try_to_save(self._boundary(step))
        if self.stop.save_wanted:
            self.stop.save_wanted = False
            if saved or self._try_to_save(self._boundary(step)):
                self.reporter.line(f"saved as asked: {self.checkpoints.path(step)}")
        if asked := self.stop.asked(next_seconds=self._step_estimate()):
            raise self._leave(asked, self._boundary(step), owed=False)
        self._step_begun = time.monotonic()

    def end_lines(self, step: int, steps: int) -> list[str]:
        """How the run ended, where that is not as planned, and where its best state is.

        Args:
            step: that was done last.
            steps: that were planned.
        """
        best, why = self.checkpoints.best(), self.best.why_stop()
        lines = [f"stopped early after step {step} of {steps}: {why}"] if why and step < steps else []
        if self.recipe.checkpoint.save_best and best is not None and best["step"] < step:
            where = self.checkpoints.path(best["step"])
            lines.append(f"adapter/ is of step {step}; the best {best['by']}, {best['value']:.4g}, is in {where}")
        return lines

    def last_checkpoint(self) -> str:
        """What to name as the way back."""
        path, _ = self.checkpoints.newest_whole()
        return f"The last good checkpoint is {path}" if path else "No checkpoint was saved yet"

    def _step_estimate(self) -> float:
        """Seconds of the next step: those of the longest so far."""
        return self._step_seconds

    def _boundary(self, step: int) -> Boundary:
        return Boundary(step, self.live.all_rng_states(), self.run.metrics_bytes(), self.live.part_states())

    def _save(self, boundary: Boundary, owed: bool, best: Mapping[str, Any] | None = None) -> Path:
        start = time.monotonic()
        position = {
            "layout": LAYOUT,
            "step": boundary.step,
            "seed": self.recipe.seed,
            "evaluation_owed": owed,
            "metrics_bytes": boundary.metrics_bytes,
            "rng": boundary.rng,
            "parts": boundary.parts,
            "best": best or self.checkpoints.best(),
            "recipe": self._recipe,
            "digests": self._digests,
            "versions": library_versions(),
        }
        path = self.checkpoints.save(boundary.step, self.live, position)
        self.stop.save_seconds = max(self.stop.save_seconds, time.monotonic() - start)
        return path

    def _try_to_save(self, boundary: Boundary, best: Mapping[str, Any] | None = None) -> bool:
        """A checkpoint on the way. Where it cannot be written the run goes on: its end may find room again."""
        try:
            self._save(boundary, owed=False, best=best)
            if best is not None:
                self.checkpoints.mark_best(best)
        except (CheckpointError, OSError) as error:
            self.reporter.line(f"no checkpoint after step {boundary.step}: {error}")
            return False
        return True

    def _leave(self, stopped: Stopped, boundary: Boundary, owed: bool) -> Stopped:
        path = self._save(boundary, owed)
        saved = f"saved after step {boundary.step}, {path}. Go on with: lowmem-ft resume {self.run.path}"
        return Stopped(stopped.why, stopped.exit_code, saved)
