"""Proof by doing: a recipe is run once unbroken and once resumed in a fresh process, and all that is saved compared."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lowmem_ft.errors import CheckpointError, Problem
from lowmem_ft.training.reporter import Reporter
from lowmem_ft.training.state import read_state

OF_THE_MOMENT = ("seconds", "memory_bytes", "memory_peak_bytes")
"""What a line of metrics.jsonl holds that no two runs have in common."""

OF_THE_STATE = ("step", "seed", "schedule", "scaler", "optimizer", "parts", "rng", "best", "averages")


@dataclass(frozen=True)
class Proof:
    """What came of it.

    Attributes:
        steps: of the runs.
        at: the step after which the second was resumed.
        tensors: how many were compared.
        differences: a line for each thing that is not equal bit for bit; none where all are.
    """

    steps: int
    at: int
    tensors: int
    differences: tuple[str, ...]


def prove_resume(target: Path, overrides: Sequence[str], reporter: Reporter, steps: int = 4) -> Proof:
    """Train `steps` steps in one process; then from the checkpoint in their middle to their end in another.

    Without held-out data, in a temporary folder; the rest is as the recipe says, with its schedule over `steps`.

    Args:
        target: a recipe file, or a run folder.
        overrides: `section.key=value` texts.
        reporter: gets told of the two runs.
        steps: at least 2.

    Raises:
        CheckpointError: one of the runs ended with an error.
    """
    recipe = target / "recipe.yaml" if target.is_dir() else target
    at = steps // 2
    settings = [
        *overrides,
        *(f"train.steps={steps}", f"checkpoint.every_steps={at}", f"checkpoint.keep={steps}"),
        *("checkpoint.folder=null", "checkpoint.save_best=null", "data.eval=null", "eval=null"),
    ]
    with tempfile.TemporaryDirectory(prefix="lowmem-ft-resume-") as temporary:
        whole, resumed = Path(temporary) / "unbroken", Path(temporary) / "resumed"
        with reporter.working(f"{steps} steps, unbroken"):
            _run(recipe, [*settings, f"output={whole}", "checkpoint.resume=null"])
        (resumed / "checkpoints").mkdir(parents=True)
        for name in ("recipe.yaml", "metrics.jsonl", f"checkpoints/step-{at:06d}"):
            (shutil.copytree if name.startswith("check") else shutil.copy)(whole / name, resumed / name)
        with reporter.working(f"{steps - at} steps, resumed after step {at} in a fresh process"):
            _run(recipe, [*settings, f"output={resumed}", "checkpoint.resume=auto"])
        last = f"checkpoints/step-{steps // at * at:06d}"
        tensors, differences = compare_checkpoints(whole / last, resumed / last)
        differences += compare_tensors(whole / "adapter", resumed / "adapter")[1]
        if metrics_of(whole) != metrics_of(resumed):
            differences.append("metrics.jsonl differs")
    return Proof(steps, at, tensors, tuple(differences))


def compare_checkpoints(first: Path, second: Path) -> tuple[int, list[str]]:
    """Compare all that two checkpoints hold. Returns the number of tensors, and a line for each difference."""
    tensors, differences = compare_tensors(first, second)
    states = read_state(first), read_state(second)
    differences += [f"{key} of state.json differs" for key in OF_THE_STATE if states[0].get(key) != states[1].get(key)]
    return tensors, differences


def compare_tensors(first: Path, second: Path) -> tuple[int, list[str]]:
    """Compare the safetensors files of two folders bit for bit."""
    count, differences = 0, []
    names = sorted({path.name for folder in (first, second) for path in folder.glob("*.safetensors")})
    for name in names:
        files = [load_file(folder / name) if (folder / name).exists() else {} for folder in (first, second)]
        for key in sorted(files[0].keys() | files[1].keys()):
            count += 1
            pair = [file.get(key) for file in files]
            if pair[0] is None or pair[1] is None:
                differences.append(f"{name} has {key} in one run only")
            elif pair[0].shape != pair[1].shape or not torch.equal(pair[0], pair[1]):
                differences.append(f"{name}: {key} differs")
    return count, differences


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what is of the moment."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in OF_THE_MOMENT} for line in lines]


def _run(recipe: Path, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "lowmem_ft.train", str(recipe), *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-6:]
        raise CheckpointError(Problem(str(recipe), f"a run of it ended with code {done.returncode}: {' '.join(said)}"))
