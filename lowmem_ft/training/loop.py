"""One optimizer step: its rows, their loss, one division, one clip, one update."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowmem_ft.data.batches import Row

MOST_NAMED = 8


@dataclass(frozen=True)
class StepResult:
    """What one step did, over all processes.

    Attributes:
        step: counted from 1.
        loss: mean over the trained tokens of the step.
        grad_norm: before clipping.
        lr: learning rate that was applied.
        tokens: tokens that went through the model.
        trained_tokens: of these, tokens with a label.
        micro_batches: forward passes of this process.
        seconds: wall time.
        skipped: fp16 loss scaling found an overflow, and nothing was applied.
        refused: why nothing was applied for another reason, with the examples' file and line; None where it was.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    trained_tokens: int
    micro_batches: int
    seconds: float
    skipped: bool
    refused: str | None = None


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    schedule: Any,
    rows: Sequence[Row],
    step: int,
    max_grad_norm: float | None,
) -> StepResult:
    """Apply one update from `rows`.

    The loss of the step is the sum of its token losses divided once by its trained tokens, over all rows and all
    processes; so the update does not depend on how the examples lie in rows, up to summation order.

    Args:
        accelerator: with `gradient_accumulation_steps` 1: accumulation is done here.
        model: prepared by it; maps a row to its summed loss.
        optimizer: prepared by it.
        schedule: not prepared; stepped here, once an applied update.
        rows: this process' rows of the step, at least one.
        step: counted from 1.
        max_grad_norm: gradients are scaled down to it; None measures only.

    Returns:
        What it did. Where loss or gradient is not finite, or no token of the step is trained, nothing was applied and
        `refused` says why; the schedule stays where it is.
    """
    start, device = time.perf_counter(), accelerator.device
    counts = [[sum(r.weight_sum for r in rows), sum(r.trained_tokens for r in rows), sum(sum(r.lengths) for r in rows)]]
    totals = accelerator.reduce(torch.tensor(counts, dtype=torch.float64, device=device), "sum")[0]
    weight_sum, trained_tokens, tokens = float(totals[0]), int(totals[1]), int(totals[2])
    lr = float(schedule.get_last_lr()[0])
    if weight_sum <= 0:
        nothing = f"no token of its examples is trained ({name_examples(rows)})"
        seconds = time.perf_counter() - start
        return StepResult(step, math.nan, math.nan, lr, tokens, 0, len(rows), seconds, False, nothing)

    losses = _add_gradients(accelerator, model, rows, weight_sum)
    loss_sum = sum(losses, torch.zeros((), device=device))
    loss_mean = float(accelerator.reduce(loss_sum, "sum")) / weight_sum

    trained = [p for p in model.parameters() if p.requires_grad]
    grad_norm = float(accelerator.clip_grad_norm_(trained, math.inf if max_grad_norm is None else max_grad_norm))
    skipped, refused = False, _why_refused(loss_mean, grad_norm, accelerator.scaler is not None, rows, losses)
    if refused is None:
        optimizer.step()
        skipped = bool(getattr(optimizer, "step_was_skipped", False))
        if not skipped:
            schedule.step()
    elif accelerator.scaler is not None:
        accelerator.scaler.update()  # the gradients were unscaled; the scaler asks for one of the two a step
    optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - start
    return StepResult(step, loss_mean, grad_norm, lr, tokens, trained_tokens, len(rows), seconds, skipped, refused)


def name_examples(rows: Sequence[Row]) -> str:
    """File and line of the examples in `rows`, the first eight of them."""
    sources = [source for row in rows for source in row.sources]
    more = f", and {len(sources) - MOST_NAMED} more" if len(sources) > MOST_NAMED else ""
    return ", ".join(sources[:MOST_NAMED]) + more


def _why_refused(
    loss: float, grad_norm: float, scaling: bool, rows: Sequence[Row], losses: Sequence[Tensor]
) -> str | None:
    """Why a step must not be applied. Under loss scaling a gradient that overflows is the scaler's to handle."""
    if math.isfinite(loss) and (scaling or math.isfinite(grad_norm)):
        return None
    wrong = [row for row, own in zip(rows, losses, strict=True) if not math.isfinite(float(own))]
    examples = name_examples(wrong or rows)
    return f"loss is {loss}, gradient norm {grad_norm}; nothing was applied. Its examples: {examples}"


def _add_gradients(accelerator: Accelerator, model: nn.Module, rows: Sequence[Row], weight_sum: float) -> list[Tensor]:
    """Forward and backward of all rows; gradients are those of the whole step. Returns the loss of each row, a sum."""
    ours = isinstance(model, DistributedDataParallel)
    # other wrappers average gradients over processes, and this is a sum over them
    factor = (1 if ours else accelerator.num_processes) / weight_sum
    losses = []
    for index, row in enumerate(rows):
        local = ours or (accelerator.num_processes > 1 and index < len(rows) - 1)
        with accelerator.no_sync(model) if local else nullcontext():
            loss = model(row.to(accelerator.device))
            accelerator.backward(loss * factor)
        losses.append(loss.detach().float())
    if ours:
        _sum_over_processes([p for p in model.parameters() if p.requires_grad], accelerator.device)
    return losses


def _sum_over_processes(trained: Sequence[nn.Parameter], device: torch.device) -> None:
    """Make each gradient the sum over all processes; one that no process has stays None, as with one process.

    Not left to `DistributedDataParallel`: it waits for every parameter in the last row's backward. Where that row does
    not call one (an expert, a second tower), torch 2.13 stops with an error in the next step, or, if another process
    did call it, mixes up its sums and aborts.

    Memory: one more copy of the gradients while they are exchanged.
    """
    used = torch.tensor([float(p.grad is not None) for p in trained], device=device)
    torch.distributed.all_reduce(used)
    called = [p for p, processes in zip(trained, used.tolist(), strict=True) if processes]
    for dtype in dict.fromkeys(p.dtype for p in called):  # in the same order on all processes
        group = [p for p in called if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in group])
        torch.distributed.all_reduce(flat)
        for p, summed in zip(group, flat.split([p.numel() for p in group]), strict=True):
            p.grad = summed.view_as(p)
