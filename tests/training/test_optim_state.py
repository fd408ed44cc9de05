"""An optimizer's memory as tensors and numbers."""

from __future__ import annotations

import json
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn

from lowmem_ft.errors import CheckpointError
from lowmem_ft.training.optim_state import load_state, state_tensors


def make(kind: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(1)
    shapes = [(64, 64), (64, 80), (5,)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    if kind == "adamw":
        return parameters, torch.optim.AdamW(groups, lr=1e-2)
    return parameters, bitsandbytes.optim.AdamW8bit(groups, lr=1e-2)


def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_new_optimizer_goes_on_bit_for_bit(kind: str) -> None:
    parameters, optimizer = make(kind)
    for seed in range(3):
        step(parameters, optimizer, seed)
    tensors, scalars = state_tensors(optimizer)
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    others, fresh = make(kind)
    with torch.no_grad():
        for mine, theirs in zip(others, parameters, strict=True):
            mine.copy_(theirs)
    load_state(fresh, saved, json.loads(json.dumps(scalars)))
    for seed in (7, 8):
        step(parameters, optimizer, seed)
        step(others, fresh, seed)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, parameters, strict=True))


def test_a_table_that_all_parameters_share_is_given_once() -> None:
    parameters, optimizer = make("adamw_8bit")
    step(parameters, optimizer, 0)
    tensors, scalars = state_tensors(optimizer)
    assert [name for name in tensors if "qmap" in name] == ["0.qmap1", "0.qmap2"]
    assert scalars["shared"] == {"1.qmap1": "0.qmap1", "1.qmap2": "0.qmap2"}


def test_state_of_other_parameters_or_without_a_shared_table_is_refused() -> None:
    parameters, optimizer = make("adamw_8bit")
    step(parameters, optimizer, 0)
    tensors, scalars = state_tensors(optimizer)
    other = torch.optim.AdamW([nn.Parameter(torch.randn(3))])
    with pytest.raises(CheckpointError, match=r"parameters a group"):
        load_state(other, tensors, scalars)
    with pytest.raises(CheckpointError, match=r"lacks 0.qmap1"):
        load_state(make("adamw_8bit")[1], {k: v for k, v in tensors.items() if k != "0.qmap1"}, scalars)


def test_before_the_first_step_there_is_nothing() -> None:
    tensors, scalars = state_tensors(make("adamw")[1])
    assert tensors == {}
    assert scalars["counts"] == [2, 1]
