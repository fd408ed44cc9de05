"""What an optimizer remembers, as tensors and plain numbers: for safetensors and JSON, never a pickle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_ft.errors import CheckpointError, Problem


def state_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of `optimizer`, parameter by parameter in the order of its groups. Hyperparameters are the recipe's.

    Tensors are not copied. One that several parameters share (the code tables of 8-bit states) is given once.

    Args:
        optimizer: torch's or bitsandbytes' own; one that accelerate wrapped is looked into.

    Returns:
        Tensors by `INDEX.NAME`, and scalars: `counts` (parameters a group), `numbers` by the same names, and `shared`,
        the names of tensors that stand under another name.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            key = f"{index}.{name}"
            if not isinstance(value, Tensor):
                numbers[key] = value
                continue
            place = (value.data_ptr(), value.dtype, tuple(value.shape), value.device)
            first = seen.setdefault(place, key) if value.numel() else key
            if first == key:
                tensors[key] = value
            else:
                shared[key] = first
    counts = [len(group["params"]) for group in optimizer.param_groups]
    return tensors, {"counts": counts, "numbers": numbers, "shared": shared}


def load_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    """Give a new optimizer the state that `state_tensors` took from another of the same kind.

    Args:
        optimizer: over parameters of the same shapes, in the same order.
        tensors: taken over; those of a device go to the device of their parameter.
        scalars: the numbers beside them.

    Raises:
        CheckpointError: the state belongs to other parameters.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if counts != scalars["counts"]:
        what = f"holds the state of {scalars['counts']} parameters a group, and this optimizer has {counts}"
        raise CheckpointError(Problem("optimizer", what, "Resume with the adapter and the optimizer it was saved with"))
    missing = sorted(set(scalars["shared"].values()) - tensors.keys())
    if missing:
        raise CheckpointError(Problem("optimizer", f"lacks {', '.join(missing[:6])}", "Resume from another checkpoint"))
    values = {**tensors, **{key: tensors[first] for key, first in scalars["shared"].items()}, **scalars["numbers"]}
    optimizer.state.clear()
    moved: dict[tuple[int, torch.device], Tensor] = {}
    parameters = _parameters(optimizer)
    for key, value in values.items():
        index, _, name = key.partition(".")
        parameter = parameters[int(index)]
        if isinstance(value, Tensor) and not _stays_on_cpu(name, value):
            value = moved.setdefault((value.data_ptr(), parameter.device), value.to(parameter.device))
        optimizer.state[parameter][name] = value


def _stays_on_cpu(name: str, value: Tensor) -> bool:
    """torch's own optimizers count updates in a tensor on the CPU, unless they run in a CUDA graph."""
    return name == "step" and value.numel() == 1


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
