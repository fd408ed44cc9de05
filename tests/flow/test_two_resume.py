"""Saved by two processes, a run goes on with two and with one."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from tests.flow.test_other_scripts import largest_difference, start_two
from tests.flow.two_resume import STEPS, Run, resume
from tests.tiny import save_tiny_model


@pytest.mark.slow
def test_what_two_processes_saved_goes_on_with_two_bit_for_bit_and_with_one(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    start_two("-m", "tests.flow.two_resume", str(folder), str(tmp_path))
    unbroken = [load_file(tmp_path / f"unbroken-{process}.safetensors") for process in range(2)]
    resumed = [load_file(tmp_path / f"resumed-{process}.safetensors") for process in range(2)]
    assert max(largest_difference(unbroken[0], other) for other in (unbroken[1], *resumed)) == 0.0
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    one, notes = resume(folder, tmp_path, accelerator)
    assert notes == ["saved by 2 processes and resumed by 1: dropout draws other numbers"]
    # fp32 sums in another order; each step moves a parameter by up to 2e-4
    assert largest_difference(one, unbroken[0]) < 1e-6
    assert largest_difference(Run(folder, accelerator).steps(1, STEPS), unbroken[0]) < 1e-6
    AcceleratorState._reset_state(reset_partial_state=True)
