"""The folder of a run: everything that reports read later. Nothing in it is pickled.

recipe.yaml        the recipe as it was resolved
environment.json   versions and machine
base.json          what the base is: settings and sampled weights; also beside the adapter
metrics.jsonl      a line a step; evaluations and answers on lines of their own
memory.jsonl       peak bytes of each phase
checkpoints/       saved states, see `lowmem_ft.training.state`
run.lock           who writes here, while a run does
adapter/           the result, in PEFT's format, with tokenizer and chat template
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError

from lowmem_ft.data.batches import StepOrder
from lowmem_ft.errors import CheckpointError, ExportError, Problem
from lowmem_ft.memory.measure import MemoryMeter, PhasePeak
from lowmem_ft.model.base_record import FILE as BASE
from lowmem_ft.model.base_record import BaseRecord
from lowmem_ft.model.generate import Answer
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.checkpoint import Checkpoints
from lowmem_ft.training.lock import LOCK, RunLock
from lowmem_ft.training.loop import StepResult
from lowmem_ft.training.reporter import StepLine
from lowmem_ft.training.resume import Past
from lowmem_ft.training.whole_folder import write_text_whole

PACKAGES = ("lowmem-ft", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "tokenizers")


@dataclass
class RunFolder:
    """An open run folder; as a context it is let go of at the end.

    Attributes:
        path: the folder.
        checkpoints: where checkpoints go.
        keep: how many of the newest stay.
        goes_on: the folder holds a run that is to be continued.
    """

    path: Path
    checkpoints: Path
    keep: int
    goes_on: bool = False
    locks: list[RunLock] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)
    _waiting: dict[str, str] = field(default_factory=dict)

    @classmethod
    def claim(cls, recipe: Recipe) -> RunFolder:
        """Choose the folder and lock it; nothing else is written yet.

        A new run never goes into a folder with another: where `output` holds one, it gets OUTPUT-2, OUTPUT-3, ... With
        `checkpoint.resume` the run in `output` goes on, where that is what is resumed.

        Raises:
            ExportError: it cannot be made or written.
            CheckpointError: the run that is to be resumed is running.
        """
        output = path = Path(recipe.output or "runs/run")
        own = Path(recipe.checkpoint.folder) if recipe.checkpoint.folder else None
        goes_on, number = _is_of(recipe.checkpoint.resume, output, own or output / "checkpoints"), 1
        while True:
            checkpoints = own.with_name(f"{own.name}-{number}") if own and number > 1 else own or path / "checkpoints"
            if goes_on or not (_holds_run(path) or Checkpoints(checkpoints, 1).saved()):
                run = cls(path, checkpoints, recipe.checkpoint.keep, goes_on)
                try:
                    run._lock([path, own and checkpoints])
                    return run
                except OSError as error:
                    what = f"cannot be written: {error.strerror}"
                    where = str(error.filename or path).removesuffix(f"/{LOCK}")
                    raise ExportError(Problem(where, what, "Write output: with another folder")) from error
                except CheckpointError:
                    run.release()
                    if goes_on:
                        raise
            number += 1
            path = output.with_name(f"{output.name}-{number}")

    @classmethod
    def create(cls, recipe: Recipe, recipe_yaml: str, device: str, command: Sequence[str]) -> RunFolder:
        """`claim` and `begin` at once, for a new run."""
        run = cls.claim(recipe)
        run.begin(recipe_yaml, device, command)
        return run

    def begin(
        self,
        recipe_yaml: str,
        device: str,
        command: Sequence[str],
        past: Past | None = None,
        base: BaseRecord | None = None,
    ) -> None:
        """Write what is known before the first step. Lines of metrics.jsonl after the checkpoint are cut off.

        Args:
            recipe_yaml: the resolved recipe.
            device: what the run runs on.
            command: how it was started.
            past: what it goes on from; None for a start.
            base: what is trained on.

        Raises:
            ExportError: it cannot be written.
        """
        environment = json.dumps(describe_environment(device, list(command)), indent=2)
        self._texts = {"recipe.yaml": recipe_yaml, "environment.json": environment + "\n"}
        if base is not None:
            self._texts[BASE] = base.text()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            if not os.access(self.checkpoints, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.checkpoints))
            for name, text in self._texts.items():
                write_text_whole(self.path / name, text)
            self._continue_metrics(past)
            (self.path / "memory.jsonl").unlink(missing_ok=True)
        except OSError as error:
            where = error.filename or self.path
            problem = Problem(str(where), f"cannot be written: {error.strerror}", "Write output: with another folder")
            raise ExportError(problem) from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others write here. A folder in which nothing was written is taken away."""
        for lock in self.locks:
            lock.release()
        self.locks.clear()
        for folder in (self.checkpoints, self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty

    def _lock(self, folders: Sequence[Path | None]) -> None:
        for folder in folders:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                self.locks.append(RunLock(folder))

    @property
    def store(self) -> Checkpoints:
        """The checkpoints of this run."""
        return Checkpoints(self.checkpoints, self.keep)

    @property
    def is_finished(self) -> bool:
        """Whether the run that is here came to its end: its last file is there."""
        return self.adapter.is_dir() and (self.path / "memory.jsonl").exists()

    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl now."""
        path = self.path / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _continue_metrics(self, past: Past | None) -> None:
        """metrics.jsonl as it was at the checkpoint; where that is of another run, a copy of its lines."""
        path = self.path / "metrics.jsonl"
        length = int(past.state["metrics_bytes"]) if past else 0
        if past and not self.goes_on:
            source = past.checkpoint.parent.parent / "metrics.jsonl"
            path.write_bytes(source.read_bytes()[:length] if source.exists() else b"")
        elif path.exists() and path.stat().st_size > length:
            os.truncate(path, length)

    @property
    def adapter(self) -> Path:
        """Where the result goes."""
        return self.path / "adapter"

    def record(self, **values: Any) -> None:
        """Append a line to metrics.jsonl."""
        self._append("metrics.jsonl", values)

    def record_step(self, result: StepResult, order: StepOrder, meter: MemoryMeter, spike: bool = False) -> StepLine:
        """Append a step to metrics.jsonl, with the memory after it. Returns what the live line shows of it.

        Args:
            result: of the step.
            order: of the run.
            meter: of the run.
            spike: the loss jumped.
        """
        now, peak = meter.now_bytes(), meter.peak_bytes()
        epoch = order.epoch_of(result.step)
        self.record(**asdict(result), spike=spike, epoch=epoch, memory_bytes=now, memory_peak_bytes=peak)
        return StepLine(
            result.step, order.steps, result.loss, result.lr, result.trained_tokens, result.seconds, now, peak
        )

    def kept(self) -> list[tuple[str, Path]]:
        """Name and place of what the run leaves."""
        return [("adapter", self.adapter), ("run folder", self.path), ("checkpoints", self.checkpoints)]

    def record_memory(self, peaks: list[PhasePeak]) -> None:
        """Write memory.jsonl anew, the last file of a run.

        Raises:
            ExportError: it, or what waits to be written, cannot be written.
        """
        self._write("memory.jsonl", "".join(json.dumps(asdict(peak)) + "\n" for peak in peaks))
        if self._waiting:
            what = f"{', '.join(self._waiting)} could not be written whole: the disk was full"
            raise ExportError(Problem(str(self.path), what, "Make room there, then: lowmem-ft resume RUN"))

    def record_answers(
        self, step: int, answers: Sequence[Answer], scores: Sequence[Mapping[str, float | None]]
    ) -> None:
        """Write the generated answers of an evaluation, and the scores of each, to answers-STEP.jsonl."""
        lines = [
            json.dumps({**asdict(answer), "exact": answer.exact, "scores": dict(own)}) + "\n"
            for answer, own in zip(answers, scores, strict=True)
        ]
        (self.path / f"answers-{step:06d}.jsonl").unlink(missing_ok=True)
        self._write(f"answers-{step:06d}.jsonl", "".join(lines))

    def save_adapter(self, model: PeftModel, tokenizer: Any, template: str | None) -> Path:
        """Write the result, with tokenizer and the chat template that was trained with."""
        return _save_whole(self.adapter, model, tokenizer, template, self._texts.get(BASE))

    def _append(self, name: str, values: dict[str, Any]) -> None:
        """A line of JSON, which knows no NaN: null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._write(name, json.dumps(finite) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Append to a file. A folder that was deleted under the run is made again.

        What cannot be written waits in memory and is tried again with the next: a full disk does not end the run.
        """
        self._waiting[name] = self._waiting.get(name, "") + text
        with contextlib.suppress(OSError):
            if not self.path.is_dir():
                self._lock([self.path])
                for text_name, known in self._texts.items():
                    write_text_whole(self.path / text_name, known)
            for waiting in list(self._waiting):
                _append_whole(self.path / waiting, self._waiting[waiting])
                del self._waiting[waiting]


def _append_whole(path: Path, text: str) -> None:
    """All of the text or nothing of it."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        if path.exists():
            os.truncate(path, before)
        raise


def _holds_run(path: Path) -> bool:
    return (path / "metrics.jsonl").exists() or (path / "recipe.yaml").exists()


def _is_of(resume: str | None, output: Path, checkpoints: Path) -> bool:
    """Whether what is resumed is the run in `output`."""
    if resume is None or resume == "auto":
        return resume == "auto"
    asked = Path(resume).resolve()
    return asked in (output.resolve(), checkpoints.resolve()) or asked.parent == checkpoints.resolve()


def _save_whole(folder: Path, model: PeftModel, tokenizer: Any, template: str | None, base: str | None) -> Path:
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
        if base is not None:
            (temporary / BASE).write_text(base, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        what = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise ExportError(Problem(str(folder), what, "Make room there, then: lowmem-ft resume RUN")) from error
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
