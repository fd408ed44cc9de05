"""Optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW over the trained parameters; vectors (norms, biases) are not decayed.

    Memory: two averages in fp32, 8 bytes a trained weight, made at the first step.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, by torch.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)


def state_bytes(optimizer: str, trained: int) -> int:
    """Bytes that an optimizer keeps for so many trained weights in fp32."""
    return {"adamw": 8}[optimizer] * trained


def make_schedule(
    optimizer: torch.optim.Optimizer, schedule: str, steps: int, warmup_ratio: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate as a factor of its peak, stepped once an update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(schedule, steps, round(warmup_ratio * steps)))


def lr_factor(schedule: str, steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Factor of the peak learning rate for the update with index `done`, counted from 0.

    Warm-up rises along a line and reaches 1 at update `warmup_steps`: the first update already moves. `cosine` and
    `linear` fall to zero just after the last update, so that no update has a rate of zero.
    """

    def factor(done: int) -> float:
        if done < warmup_steps:
            return (done + 1) / (warmup_steps + 1)
        if schedule == "constant":
            return 1.0
        share = (done - warmup_steps) / max(1, steps - warmup_steps)
        share = min(1.0, share)
        return 1.0 - share if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))

    return factor
