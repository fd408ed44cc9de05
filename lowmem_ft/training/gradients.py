"""Before the first step: do gradients reach all that is meant to train?"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from lowmem_ft.data.batches import Row, StepOrder, make_row
from lowmem_ft.data.dataset import Split
from lowmem_ft.model.gradient_flow import check_gradient_flow
from lowmem_ft.training.reporter import Reporter


def shortest_row(split: Split, order: StepOrder) -> Row | None:
    """The shortest example of the first step in a row of its own; None where the step trains nothing."""
    examples = sorted(order.examples(1), key=lambda index: int(split.tokens.lengths[index]))
    rows = (make_row([split.tokens[index]]) for index in examples)
    return next((row for row in rows if row.trained_tokens), None)


def check_gradients(
    loss: torch.nn.Module, trained: torch.nn.Module, row: Row | None, accelerator: Accelerator, reporter: Reporter
) -> None:
    """Run `check_gradient_flow` under the autocast of the run, and say what came of it in one line.

    Args:
        loss: maps a row to its summed loss; prepared by the accelerator.
        trained: the model in it, with its adapters.
        row: of the first step; None checks nothing.
        accelerator: whose autocast and device.
        reporter: gets the line.

    Raises:
        ModelError: something that should train gets no finite gradient.
    """
    if row is None:
        return
    moved, local = row.to(accelerator.device), accelerator.unwrap_model(loss)

    def run() -> Tensor:
        with accelerator.autocast():
            return local(moved) / moved.weight_sum

    with reporter.working("checking that gradients arrive") as work:
        work.result = check_gradient_flow(trained, run).line()
