"""Whole runs that are told to stop, lose their disk, or move, and end as if nothing had been."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from lowmem_ft import cli
from lowmem_ft.training import examine, inputs, loop, state, whole_folder
from lowmem_ft.training.prove import compare_tensors, metrics_of
from lowmem_ft.training.run_folder import RunFolder
from tests.flow.recipes import RECIPE, write_run

SETTINGS = ["train.steps=5", "eval.generate=2", "adapter.dropout=0.2"]


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1234)  # nothing may follow from what was drawn before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recipe, its model and data; what is tokenized once is kept."""
    folder = tmp_path_factory.mktemp("going_on")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWMEM_FT_CACHE", str(folder / "cache"))
        write_run(folder, RECIPE.replace("checkpoint: {every_steps: 2, keep: 1}\n", ""))
        yield folder


def start(*arguments: object) -> int:
    AcceleratorState._reset_state(reset_partial_state=True)
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> Path:
    assert start("train", folder / "mine.yaml", *SETTINGS, f"output={folder / 'unbroken'}") == 0
    return folder / "unbroken"


def train(folder: Path, run: Path, *more: str) -> int:
    return start("train", folder / "mine.yaml", *SETTINGS, f"output={run}", *more)


def same(run: Path, unbroken: Path) -> bool:
    return compare_tensors(run / "adapter", unbroken / "adapter")[1] == [] and metrics_of(run) == metrics_of(unbroken)


def before_call(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, number: int, action: Callable[[], object]
) -> None:
    """`action` just before call `number` of a function."""
    plain, calls = getattr(where, name), []

    def watched(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            action()
        return plain(*arguments, **named)

    monkeypatch.setattr(where, name, watched)


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


PLACES = {
    "in the middle of a step": (loop, "_add_gradients", 3),
    "in the first evaluation": (examine, "evaluate_loss", 1),
    "in an evaluation on the way": (examine, "evaluate_loss", 2),
    "in the last evaluation": (examine, "generate_answers", 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_stopped_anywhere_and_resumed_the_run_ends_as_the_unbroken_one(
    place: str, folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        before_call(patch, *PLACES[place], send(signal.SIGTERM))
        assert train(folder, tmp_path / "run") == 143
    assert f"Go on with: lowmem-ft resume {tmp_path / 'run'}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.lock").exists()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    torch.rand(7)
    assert start("resume", moved) == 0
    assert same(moved, unbroken)
    assert start("resume", moved) == 0
    assert "is finished, and nothing is left to do" in capsys.readouterr().out


def test_stopped_while_a_checkpoint_is_written_that_one_is_whole(
    folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        before_call(patch, state, "save_file", 2, send(signal.SIGINT))
        assert train(folder, tmp_path / "run", "checkpoint.every_steps=1", "checkpoint.keep=9") == 130
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-000001", "step-000002"]
    assert start("resume", tmp_path / "run") == 0
    assert same(tmp_path / "run", unbroken)


def test_stopped_while_data_is_read_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before_call(monkeypatch, inputs, "load_split", 2, send(signal.SIGTERM))
    assert train(folder, tmp_path / "run") == 143
    assert capsys.readouterr().err == "stopped by SIGTERM\n"
    assert not (tmp_path / "run").exists()


def test_with_a_time_limit_the_same_command_again_and_again_comes_to_the_end(
    folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_ft.training.saver.Saver._step_estimate", lambda self: 1e6)
    codes = []
    for _ in range(9):
        codes.append(train(folder, tmp_path / "run", "checkpoint.resume=auto", "train.max_seconds=1000"))
        if codes[-1] != 9:
            break
    assert codes == [9, 9, 9, 9, 9, 0]
    assert same(tmp_path / "run", unbroken)


def test_steps_that_are_not_finite_are_left_out_and_three_in_a_row_end_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lowmem_ft.training.causal import CausalLoss

    plain, finite = CausalLoss.forward, [True]
    monkeypatch.setattr(CausalLoss, "forward", lambda self, row: plain(self, row) * (1.0 if finite[0] else torch.nan))
    before_call(monkeypatch, loop, "_add_gradients", 3, lambda: finite.__setitem__(0, False))
    assert train(folder, tmp_path / "run", "checkpoint.every_steps=1", "eval=null") == 6
    out, err = capsys.readouterr()
    assert "step 3: loss is nan" in out
    assert "train.jsonl line " in out
    assert "step 5: 3 steps in a row had no finite loss or gradient" in err
    assert "The last good checkpoint is " in err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines if "loss" in line] == [False, False, True, True, True]


def test_a_full_disk_and_a_deleted_folder_do_not_end_the_run(
    folder: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(whole_folder.shutil, "disk_usage", lambda _: usage)
    before_call(monkeypatch, loop, "_add_gradients", 3, lambda: shutil.rmtree(tmp_path / "run"))
    before_call(monkeypatch, loop, "_add_gradients", 5, monkeypatch.undo)
    assert train(folder, tmp_path / "run", "checkpoint.every_steps=1") == 0
    assert "no checkpoint after step 2: " in capsys.readouterr().out
    assert compare_tensors(tmp_path / "run" / "adapter", unbroken / "adapter")[1] == []
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000005"]


def test_changed_settings_are_refused_with_the_difference_or_accepted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        before_call(patch, loop, "_add_gradients", 2, send(signal.SIGTERM))
        assert train(folder, run, "eval=null") == 143
    before = (run / "recipe.yaml").read_text()
    assert start("resume", run, "train.lr=5e-3") == 8
    assert "train.lr: 0.001 -> 0.005" in capsys.readouterr().err
    assert (run / "recipe.yaml").read_text() == before
    data = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(record) + "\n" for record in data[1:]))
    assert start("resume", run, f"data.train={tmp_path / 'other.jsonl'}") == 8
    assert "the training data is not that of the checkpoint" in capsys.readouterr().err
    assert start("resume", run, "train.lr=5e-3", "--accept-changes") == 0
    assert [line["lr"] > 1e-3 for line in metrics_of(run) if "lr" in line][:3] == [False, False, True]


def test_a_run_stops_early_where_it_would_have_also_after_a_resume(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def same(answer, reference):\n    return 1\n")
    often = ["eval.generate_every_steps=1", "eval.metrics=[mine.py:same]", "eval.patience=2"]
    more = [*often, "checkpoint.save_best=same", "checkpoint.keep=1"]
    assert train(folder, tmp_path / "whole", *more) == 0
    said = capsys.readouterr().out
    assert "stopped early after step 3 of 5: 2 evaluations in a row were not better than same 1 after step 1" in said
    assert "adapter/ is of step 3; the best same, 1, is in " in said
    whole = metrics_of(tmp_path / "whole")
    assert [line["step"] for line in whole if "loss" in line] == [1, 2, 3]
    with monkeypatch.context() as patch:
        before_call(patch, examine, "generate_answers", 3, send(signal.SIGTERM))  # that after step 2
        assert train(folder, tmp_path / "run", *more) == 143
    with monkeypatch.context() as patch:
        before_call(patch, RunFolder, "save_adapter", 1, send(signal.SIGTERM))  # after the last step
        assert start("resume", tmp_path / "run") == 143
    assert start("resume", tmp_path / "run") == 0
    assert same(tmp_path / "run", tmp_path / "whole")
    best = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in best.iterdir()) == ["best.json", "step-000001", "step-000003"]
