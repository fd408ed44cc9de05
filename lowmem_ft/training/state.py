"""All that a run must remember to go on as if it had never stopped, in safetensors and JSON. Nothing is pickled.

adapter_model.safetensors, adapter_config.json    the adapter, as peft loads it
trained.safetensors                               trained weights that peft's file does not hold, by parameter name
optimizer.safetensors                             what the optimizer remembers
averages.safetensors                              averaged weights, where there are any
state.json                                        position, schedule, loss scaler, random generators, recipe, versions
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowmem_ft.errors import CheckpointError, Problem
from lowmem_ft.training.optim_state import load_state, state_tensors
from lowmem_ft.training.rng import rng_state, set_rng_state

ADAPTER, TRAINED, OPTIMIZER = "adapter_model.safetensors", "trained.safetensors", "optimizer.safetensors"
AVERAGES, STATE = "averages.safetensors", "state.json"
BESIDE_TENSORS_BYTES = 1_000_000
"""More than all that is not a tensor takes: configuration, JSON, headers, manifest."""


class Remembering(Protocol):
    """A part of the loop with a state of plain numbers, texts and lists."""

    def state(self) -> dict[str, Any]:
        """The state now, as JSON takes it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Back to a state."""


class Averages(Protocol):
    """Averaged weights."""

    def state_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and scalars."""

    def load_state(self, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
        """Back to them."""


@dataclass
class Live:
    """The objects of a run that change from step to step.

    Attributes:
        model: holds the trained parameters: peft's model, or any module.
        optimizer: over them.
        schedule: of the learning rate.
        scaler: of fp16, or None.
        averages: averaged weights, or None.
        parts: other parts with a state, by name.
        processes: their number.
        process: this one's number.
    """

    model: nn.Module
    optimizer: Any
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler | None = None
    averages: Averages | None = None
    parts: Mapping[str, Remembering] = field(default_factory=dict)
    processes: int = 1
    process: int = 0

    def all_rng_states(self) -> list[dict[str, Any]]:
        """The random generators of every process; all processes must call it."""
        if self.processes == 1:
            return [rng_state()]
        states: list[Any] = [None] * self.processes
        torch.distributed.all_gather_object(states, rng_state())
        return states

    def part_states(self) -> dict[str, dict[str, Any]]:
        """The state of each of `parts`."""
        return {name: part.state() for name, part in self.parts.items()}

    def needed_bytes(self) -> int:
        """Most that a checkpoint takes."""
        tensors: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        tensors += state_tensors(self.optimizer)[0].values()
        if self.averages is not None:
            tensors += self.averages.state_tensors()[0].values()
        return sum(t.numel() * t.element_size() for t in tensors) + BESIDE_TENSORS_BYTES

    def write(self, folder: Path, position: Mapping[str, Any]) -> None:
        """Fill an empty folder with the state.

        Args:
            folder: exists.
            position: what else belongs into state.json: at least `rng`, from `all_rng_states`, and `parts`, from
                `part_states`, both taken at the step boundary.
        """
        if isinstance(self.model, PeftModel):
            # the embedding's rows are asked for where they train; peft would ask the hub whether its size changed
            self.model.save_pretrained(str(folder), save_embedding_layers=False)
            (folder / "README.md").unlink(missing_ok=True)
        others = _other_trained(self.model, tensors_by_peft_key(self.model))
        if others:
            save_file(_contiguous(others), folder / TRAINED)
        tensors, scalars = state_tensors(self.optimizer)
        save_file(_contiguous(tensors), folder / OPTIMIZER)
        state: dict[str, Any] = {
            **position,
            "schedule": {"updates": self.schedule.last_epoch},
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "optimizer": scalars,
        }
        if self.averages is not None:
            averaged, state["averages"] = self.averages.state_tensors()
            save_file(_contiguous(averaged), folder / AVERAGES)
        (folder / STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def read(self, folder: Path, state: Mapping[str, Any]) -> list[str]:
        """Bring all objects to the state in a folder.

        Args:
            folder: was checked to be whole.
            state: its state.json.

        Returns:
            Lines about what could not be put back exactly.

        Raises:
            CheckpointError: it lacks a part that this run has, or has one that this run lacks. Nothing is guessed.
        """
        _read_trained(self.model, folder)
        self._check_parts(folder, state)
        load_state(self.optimizer, _load(folder / OPTIMIZER), state["optimizer"])
        _restore_schedule(self.schedule, state["schedule"]["updates"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.averages is not None:
            self.averages.load_state(_load(folder / AVERAGES), state["averages"])
        for name, part in self.parts.items():
            part.restore(state["parts"][name])
        saved = state["rng"]
        notes = set_rng_state(saved[self.process]) if self.process < len(saved) else []
        if len(saved) != self.processes:
            notes.append(
                f"saved by {len(saved)} processes and resumed by {self.processes}: dropout draws other numbers"
            )
        return notes

    def _check_parts(self, folder: Path, state: Mapping[str, Any]) -> None:
        has = {"loss scaler": state["scaler"] is not None, "averages": "averages" in state}
        wants = {"loss scaler": self.scaler is not None, "averages": self.averages is not None}
        for name in self.parts:
            wants[name], has[name] = True, name in state["parts"]
        problems = [
            Problem(str(folder), f"has no state of the {name}", "Resume with the settings it was saved with")
            if wants[name]
            else Problem(str(folder), f"has a state of the {name}, and this run has none", "Resume with its settings")
            for name in wants
            if wants[name] != has[name]
        ]
        if problems:
            raise CheckpointError(problems)


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return dict(json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(Problem(str(folder / STATE), f"cannot be read: {error}")) from error


def tensors_by_peft_key(model: nn.Module) -> dict[str, Tensor]:
    """The weights of `model` that peft's adapter file holds, by the name that they have there.

    What trains, and what peft saves beside it (the shared matrices of vera). Found by their memory, so that no rule of
    naming is assumed. Without peft there are none.
    """
    if not isinstance(model, PeftModel):
        return {}
    here = {_place(t): t for t in (*model.buffers(), *model.parameters())}
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {key: here[_place(t)] for key, t in saved.items() if _place(t) in here}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape


def _other_trained(model: nn.Module, by_peft: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trained parameters by name that are not among `by_peft`."""
    covered = {id(tensor) for tensor in by_peft.values()}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered}


@torch.no_grad()
def _read_trained(model: nn.Module, folder: Path) -> None:
    by_peft = tensors_by_peft_key(model)
    problems = []
    for file, wanted in ((ADAPTER, by_peft), (TRAINED, _other_trained(model, by_peft))):
        saved = _load(folder / file) if (folder / file).exists() else {}
        for name in sorted(wanted.keys() - saved.keys()):
            problems.append(Problem(str(folder / file), f"has no {name}, which this run trains"))
        for name in sorted(saved.keys() - wanted.keys()):
            problems.append(Problem(str(folder / file), f"has {name}, which this run does not train"))
        for name, tensor in wanted.items():
            if name in saved and saved[name].shape != tensor.shape:
                shapes = f"{list(saved[name].shape)}, and here it is {list(tensor.shape)}"
                problems.append(Problem(str(folder / file), f"{name} has shape {shapes}"))
            elif name in saved:
                tensor.copy_(saved[name])
    if problems:
        raise CheckpointError(problems)


def _restore_schedule(schedule: torch.optim.lr_scheduler.LambdaLR, updates: int) -> None:
    """The learning rate is a function of the number of updates; that of this run's recipe holds."""
    schedule.last_epoch, schedule._step_count = updates, updates + 1
    rates = [base * factor(updates) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(Problem(str(path), f"cannot be read: {error}")) from error


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
