"""Loss on held-out examples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from lowmem_ft.data.batches import Row


@dataclass(frozen=True)
class EvalLoss:
    """Loss over held-out rows.

    Attributes:
        loss: mean over the trained tokens.
        trained_tokens: how many.
    """

    loss: float
    trained_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate_loss(model: nn.Module, rows: Iterable[Row], device: torch.device) -> EvalLoss:
    """Loss as a sum over tokens, divided once: the same for any rows, up to summation order. No logits are kept.

    Args:
        model: maps a row to its summed loss.
        rows: held-out rows.
        device: where the model is.
    """
    was_training = model.training
    model.eval()
    loss_sum, weight_sum, count = 0.0, 0.0, 0
    for row in rows:
        loss_sum += float(model(row.to(device)))
        weight_sum += row.weight_sum
        count += row.trained_tokens
    model.train(was_training)
    return EvalLoss(loss_sum / weight_sum, count) if weight_sum else EvalLoss(math.nan, 0)
