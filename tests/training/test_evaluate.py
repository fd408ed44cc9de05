"""Held-out loss does not depend on rows."""

from __future__ import annotations

import math

import pytest
import torch

from lowmem_ft.data.batches import make_row
from lowmem_ft.data.formats import TokenizedExample
from lowmem_ft.memory.attention import apply_packed_attention
from lowmem_ft.training.causal import CausalLoss
from lowmem_ft.training.evaluate import EvalLoss, evaluate_loss
from tests.tiny import tiny_llama

EXAMPLES = [TokenizedExample([5 + k, 6, 7, 8 + k, 2], [0, 0, 1, k % 2, 1], "f", k) for k in range(6)]
CPU = torch.device("cpu")


def test_the_loss_is_the_same_for_any_rows() -> None:
    model = tiny_llama()
    apply_packed_attention(model)
    loss = CausalLoss(model).train()
    one = evaluate_loss(loss, [make_row(EXAMPLES)], CPU)
    many = evaluate_loss(loss, [make_row([example]) for example in EXAMPLES], CPU)
    assert one.trained_tokens == many.trained_tokens == 15
    assert one.loss == pytest.approx(many.loss, abs=1e-6)
    assert loss.training
    assert all(p.grad is None for p in model.parameters())


def test_perplexity_and_nothing_to_evaluate() -> None:
    assert EvalLoss(2.0, 5).perplexity == pytest.approx(math.exp(2))
    assert EvalLoss(1e4, 5).perplexity == math.inf
    assert math.isnan(evaluate_loss(CausalLoss(tiny_llama(), packed=False), [], CPU).loss)
