"""The folder of a run: everything that reports read later. Nothing in it is pickled.

recipe.yaml        the recipe as it was resolved
environment.json   versions and machine
metrics.jsonl      a line a step; evaluations and answers on lines of their own
memory.jsonl       peak bytes of each phase
checkpoints/       adapters saved on the way
adapter/           the result, in PEFT's format, with tokenizer and chat template
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peft import PeftModel

from lowmem_ft.data.batches import StepOrder
from lowmem_ft.errors import ExportError, Problem
from lowmem_ft.memory.measure import MemoryMeter, PhasePeak
from lowmem_ft.model.generate import Answer
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.loop import StepResult
from lowmem_ft.training.reporter import StepLine

PACKAGES = ("lowmem-ft", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "tokenizers")


@dataclass(frozen=True)
class RunFolder:
    """An open run folder.

    Attributes:
        path: the folder.
        checkpoints: where checkpoints go.
        keep: how many of the newest stay.
    """

    path: Path
    checkpoints: Path
    keep: int

    @classmethod
    def create(cls, recipe: Recipe, recipe_yaml: str, device: str, command: Sequence[str]) -> RunFolder:
        """Make the folder. Where `output` holds a run already, OUTPUT-2, OUTPUT-3, ... is made: no run is overwritten.

        Args:
            recipe: resolved; says where.
            recipe_yaml: its text.
            device: what the run runs on.
            command: how it was started.

        Raises:
            ExportError: it cannot be made or written.
        """
        output = path = Path(recipe.output or "runs/run")
        checkpoints = Path(recipe.checkpoint.folder) if recipe.checkpoint.folder else None
        number = 1
        while (path / "metrics.jsonl").exists() or (path / "recipe.yaml").exists():
            number += 1
            path = output.with_name(f"{output.name}-{number}")
        if checkpoints is not None and number > 1:
            checkpoints = checkpoints.with_name(f"{checkpoints.name}-{number}")
        environment = json.dumps(describe_environment(device, list(command)), indent=2)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "recipe.yaml").write_text(recipe_yaml, encoding="utf-8")
            (path / "environment.json").write_text(environment + "\n", encoding="utf-8")
        except OSError as error:
            problem = Problem(str(path), f"cannot be written: {error.strerror}", "Write output: with another folder")
            raise ExportError(problem) from error
        return cls(path, checkpoints or path / "checkpoints", recipe.checkpoint.keep)

    @property
    def adapter(self) -> Path:
        """Where the result goes."""
        return self.path / "adapter"

    def record(self, **values: Any) -> None:
        """Append a line to metrics.jsonl."""
        self._append("metrics.jsonl", values)

    def record_step(self, result: StepResult, order: StepOrder, meter: MemoryMeter) -> StepLine:
        """Append a step to metrics.jsonl, with the memory after it. Returns what the live line shows of it."""
        now, peak = meter.now_bytes(), meter.peak_bytes()
        self.record(**asdict(result), epoch=order.epoch_of(result.step), memory_bytes=now, memory_peak_bytes=peak)
        return StepLine(
            result.step, order.steps, result.loss, result.lr, result.trained_tokens, result.seconds, now, peak
        )

    def kept(self) -> list[tuple[str, Path]]:
        """Name and place of what the run leaves."""
        return [("adapter", self.adapter), ("run folder", self.path), ("checkpoints", self.checkpoints)]

    def record_memory(self, peaks: list[PhasePeak]) -> None:
        """Write memory.jsonl anew."""
        lines = [json.dumps(asdict(peak)) + "\n" for peak in peaks]
        (self.path / "memory.jsonl").write_text("".join(lines), encoding="utf-8")

    def record_answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Write the generated answers of an evaluation to answers-STEP.jsonl."""
        lines = [json.dumps({**asdict(answer), "exact": answer.exact}) + "\n" for answer in answers]
        (self.path / f"answers-{step:06d}.jsonl").write_text("".join(lines), encoding="utf-8")

    def save_adapter(self, model: PeftModel, tokenizer: Any, template: str | None) -> Path:
        """Write the result, with tokenizer and the chat template that was trained with."""
        return _save_whole(self.adapter, model, tokenizer, template)

    def save_checkpoint(self, model: PeftModel, tokenizer: Any, template: str | None, step: int) -> Path:
        """Write a checkpoint, then delete all but the newest."""
        folder = _save_whole(self.checkpoints / f"step-{step:06d}", model, tokenizer, template)
        ours = sorted(entry for entry in self.checkpoints.iterdir() if re.fullmatch(r"step-\d{6,}", entry.name))
        for old in ours[: -self.keep]:
            shutil.rmtree(old)
        return folder

    def _append(self, name: str, values: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(values) + "\n")


def _save_whole(folder: Path, model: PeftModel, tokenizer: Any, template: str | None) -> Path:
    """All files or none: written under another name, then renamed."""
    temporary = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        # the embedding is never trained here, and peft would ask the hub whether its size changed
        model.save_pretrained(str(temporary), save_embedding_layers=False)
        tokenizer.save_pretrained(temporary)
        if template is not None:
            (temporary / "chat_template.jinja").write_text(template, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ExportError(Problem(str(folder), f"cannot be written: {error.strerror or error}")) from error
    return folder


def describe_environment(device: str, command: list[str]) -> dict[str, Any]:
    """What the run ran on, for `environment.json`."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": device,
        "versions": versions,
    }
