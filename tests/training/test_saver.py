"""When a run is saved, and what its checkpoint says is still owed."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lowmem_ft.errors import CheckpointError, Stopped
from lowmem_ft.recipe.data_section import DataSection
from lowmem_ft.recipe.schema import CheckpointSection, EvalSection, ModelSection, Recipe
from lowmem_ft.training.resume import Past
from lowmem_ft.training.run_folder import RunFolder
from lowmem_ft.training.saver import Saver
from lowmem_ft.training.signals import StopRequests
from lowmem_ft.training.state import STATE
from tests.training.small_run import Silent


class FakeLive:
    """Writes state.json only."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.evaluations: list[float] = []
        self.fails = False

    def all_rng_states(self) -> list[dict[str, Any]]:
        return [{"drawn": len(self.evaluations)}]

    def part_states(self) -> dict[str, Any]:
        return {"evaluations": {"losses": list(self.evaluations)}, "best": self.parts["best"].state()}

    def needed_bytes(self) -> int:
        return 100

    def write(self, folder: Path, position: Any) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        (folder / STATE).write_text(json.dumps(position))

    def read(self, folder: Path, state: Any) -> list[str]:
        return ["a note"]


class Setting:
    """A saver and all around it."""

    def __init__(self, folder: Path, stop: StopRequests, patience: int | None = None, **checkpoint: Any) -> None:
        self.live, self.said, self.stop = FakeLive(), Silent(), stop
        recipe = Recipe(
            output=str(folder / "run"),
            model=ModelSection(path="m"),
            data=DataSection(train="t", eval="e"),
            eval=EvalSection(
                every_steps=1, generate=1, generate_every_steps=1, metrics=["contains"], patience=patience
            ),
            checkpoint=CheckpointSection(**checkpoint),
        )
        self.run = RunFolder.create(recipe, "name: x\n", "cpu", [])
        live: Any = self.live
        self.saver = Saver(recipe, self.run, live, stop, {"base model": "b"}, self.said)

    def loss(self, value: float, signalled: bool = False) -> Any:
        def evaluation() -> dict[str, float]:
            self.run.record(eval_loss=value)
            self.live.evaluations.append(value)
            if signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            return {"loss": value, "contains": value}

        return evaluation

    def names(self) -> list[str]:
        return sorted(path.name for path in self.run.checkpoints.iterdir())

    def state(self, step: int) -> dict[str, Any]:
        return json.loads((self.run.store.path(step) / STATE).read_text())


def test_the_schedule_saves_and_keeps(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), every_steps=2, keep=2)
    for step in range(1, 8):
        setting.saver.end_step(step)
    assert setting.names() == ["step-000004", "step-000006"]
    assert setting.state(6)["evaluation_owed"] is False


def test_the_evaluation_of_a_step_is_in_its_checkpoint(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), every_steps=1)
    setting.saver.end_step(1, setting.loss(0.5))
    state = setting.state(1)
    assert state["parts"]["evaluations"] == {"losses": [0.5]}
    assert state["metrics_bytes"] == setting.run.metrics_bytes() > 0


def test_stopped_in_an_evaluation_it_is_saved_as_before_it_and_owes_it(tmp_path: Path) -> None:
    with StopRequests() as stop:
        setting = Setting(tmp_path, stop)
        setting.run.record(loss=1.0)
        with pytest.raises(Stopped, match=r"SIGTERM: saved after step 3, .*lowmem-ft resume ") as stopped:
            setting.saver.end_step(3, setting.loss(0.5, signalled=True))
    assert stopped.value.exit_code == 143
    state = setting.state(3)
    assert state["evaluation_owed"] is True
    assert (state["parts"]["evaluations"], state["rng"]) == ({"losses": []}, [{"drawn": 0}])
    assert state["parts"]["best"]["step"] is None
    assert 0 < state["metrics_bytes"] < setting.run.metrics_bytes()


@pytest.mark.parametrize("due", [True, False])
def test_stopped_in_a_step_it_is_saved_after_it_and_a_due_evaluation_is_not_begun(tmp_path: Path, due: bool) -> None:
    with StopRequests() as stop:
        setting = Setting(tmp_path, stop)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped) as stopped:
            setting.saver.end_step(3, setting.loss(0.5) if due else None)
    assert stopped.value.exit_code == 130
    assert setting.state(3)["evaluation_owed"] is due
    assert setting.live.evaluations == []


def test_sigusr1_saves_once_and_goes_on(tmp_path: Path) -> None:
    with StopRequests() as stop:
        setting = Setting(tmp_path, stop)
        setting.saver.end_step(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        setting.saver.end_step(2)
        setting.saver.end_step(3)
    assert setting.names() == ["step-000002"]
    assert setting.said.lines == [f"saved as asked: {setting.run.store.path(2)}"]


def test_the_best_loss_is_saved_kept_and_remembered(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), save_best="loss", keep=1)
    for step, loss in enumerate([0.9, 0.5, 0.7, 0.6], 1):
        setting.saver.end_step(step, setting.loss(loss))
    assert setting.names() == ["best.json", "step-000002"]
    assert setting.run.store.best() == {"step": 2, "by": "loss", "value": 0.5}
    assert setting.state(2)["best"] == {"step": 2, "by": "loss", "value": 0.5}


def test_the_best_by_a_metric_is_the_highest_and_no_number_is_never_the_best(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), save_best="contains", keep=1)
    for step, score in enumerate([math.nan, 0.5, 0.7, 0.7, 0.6], 1):
        setting.saver.end_step(step, setting.loss(score))
    assert setting.run.store.best() == {"step": 3, "by": "contains", "value": 0.7}
    assert setting.said.lines[-1] == f"step 3: best contains so far, 0.7000: {setting.run.store.path(3)}"
    assert setting.saver.end_lines(5, 5) == [
        f"adapter/ is of step 5; the best contains, 0.7, is in {setting.run.store.path(3)}"
    ]


def test_what_was_the_best_by_something_else_is_not_compared_with(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), save_best="contains", keep=1)
    setting.run.store.mark_best({"step": 1, "by": "loss", "value": 9.0})
    setting.saver.end_step(2, setting.loss(0.5))
    assert setting.run.store.best() == {"step": 2, "by": "contains", "value": 0.5}


def test_a_best_that_could_not_be_saved_is_not_what_the_next_must_beat(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), save_best="loss", keep=9)
    for step, (loss, fails) in enumerate([(0.9, False), (0.3, True), (0.5, False)], 1):
        setting.live.fails = fails
        setting.saver.end_step(step, setting.loss(loss))
    assert setting.run.store.best() == {"step": 3, "by": "loss", "value": 0.5}


def test_with_patience_the_count_is_in_the_checkpoint_and_says_when_to_stop(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), patience=2, every_steps=1, keep=9)
    whys = []
    for step, loss in enumerate([0.5, 0.7, 0.6], 1):
        setting.saver.end_step(step, setting.loss(loss))
        whys.append(setting.saver.best.why_stop())
    assert whys[:2] == [None, None]
    (line,) = setting.saver.end_lines(3, 9)
    assert line == "stopped early after step 3 of 9: 2 evaluations in a row were not better than loss 0.5 after step 1"
    assert setting.saver.end_lines(3, 3) == []
    assert setting.state(2)["parts"]["best"] == {"by": "loss", "step": 1, "value": 0.5, "since": 1}


def test_after_going_back_the_best_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), save_best="loss", keep=9)
    for step, loss in enumerate([0.9, 0.5], 1):
        setting.saver.end_step(step, setting.loss(loss))
    past = Past(setting.run.store.path(1), setting.state(1))
    assert setting.saver.restore(past) == (1, False)
    assert setting.run.store.best() == {"step": 1, "by": "loss", "value": 0.9}
    assert "step-000002 is of a later step, and was set aside as step-000002.aside-1" in setting.said.lines
    assert setting.saver.restore(None) == (0, True)


def test_a_checkpoint_on_the_way_that_does_not_fit_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), every_steps=1)
    setting.saver.end_step(1)
    setting.live.fails = True
    setting.saver.end_step(2)
    setting.live.fails = False
    setting.saver.end_step(3)
    assert setting.names() == ["step-000001", "step-000003"]
    assert setting.said.lines[0].startswith("no checkpoint after step 2: ")
    assert "No space left on device (it needs 100 B, and " in setting.said.lines[0]


def test_told_to_stop_without_room_to_save_is_an_error(tmp_path: Path) -> None:
    with StopRequests() as stop:
        setting = Setting(tmp_path, stop)
        setting.live.fails = True
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(CheckpointError, match="No space left"):
            setting.saver.end_step(1)


def test_the_way_back_is_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    setting = Setting(tmp_path, StopRequests(), every_steps=1)
    assert setting.saver.last_checkpoint() == "No checkpoint was saved yet"
    setting.saver.end_step(1)
    assert setting.saver.last_checkpoint().endswith("step-000001")
