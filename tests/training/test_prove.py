"""The proof of resumption finds what differs, and its own runs are equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowmem_ft import cli
from lowmem_ft.errors import CheckpointError
from lowmem_ft.training.prove import compare_checkpoints, metrics_of, prove_resume
from lowmem_ft.training.state import STATE
from tests.flow.recipes import write_run
from tests.training.small_run import Silent


def checkpoint(folder: Path, value: float, updates: int = 3) -> Path:
    folder.mkdir()
    save_file({"a": torch.ones(2), "b": torch.full((2,), value)}, folder / "x.safetensors")
    (folder / STATE).write_text(json.dumps({"schedule": {"updates": updates}, "metrics_bytes": value}))
    return folder


def test_a_tensor_or_a_state_that_differs_is_named(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "1", 1.0)
    assert compare_checkpoints(first, checkpoint(tmp_path / "2", 1.0)) == (2, [])
    assert compare_checkpoints(first, checkpoint(tmp_path / "3", 1.0 + 2e-7))[1] == ["x.safetensors: b differs"]
    assert compare_checkpoints(first, checkpoint(tmp_path / "4", 1.0, 4))[1] == ["schedule of state.json differs"]
    other = checkpoint(tmp_path / "5", 1.0)
    save_file({"a": torch.ones(2)}, other / "x.safetensors")
    assert compare_checkpoints(first, other)[1] == ["x.safetensors has b in one run only"]


def test_metrics_are_compared_without_time_and_memory(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0, "seconds": 3, "memory_bytes": 4}\n')
    assert metrics_of(tmp_path) == [{"loss": 1.0}]


class Reporting(Silent):
    def working(self, what: str) -> object:
        from contextlib import nullcontext

        self.lines.append(what)
        return nullcontext()


@pytest.mark.slow
def test_a_recipe_resumed_in_a_fresh_process_is_equal_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    recipe = write_run(tmp_path / "work")
    assert cli.main(["check", str(recipe), "--resume", "adapter.dropout=0.3"]) == 0
    assert "equal bit for bit: 112 tensors" in capsys.readouterr().out
    assert not (tmp_path / "work" / "runs").exists()


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    said = Reporting()
    with pytest.raises(CheckpointError, match=r"ended with code 2: .*no such file"):
        prove_resume(tmp_path / "none.yaml", [], said)
    assert said.lines == ["4 steps, unbroken"]
