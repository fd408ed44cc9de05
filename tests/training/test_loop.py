"""The step: its update does not depend on how its examples lie in rows, and nothing half done is applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from lowmem_ft.data.batches import Row, make_row, micro_batches
from lowmem_ft.data.formats import TokenizedExample
from lowmem_ft.memory.attention import apply_packed_attention
from lowmem_ft.model.kbit import prepare_for_kbit_training
from lowmem_ft.training.causal import CausalLoss
from lowmem_ft.training.loop import StepResult, name_examples, train_step
from lowmem_ft.training.optim import make_optimizer, make_schedule
from tests.tiny import FAMILIES, VOCABULARY, add_lora, tiny_llama

STEPS = 2
LR = 2e-4


def _examples(count: int = 8, seed: int = 0) -> list[TokenizedExample]:
    """Ragged lengths, and masks with holes."""
    random = np.random.default_rng(seed)
    made = []
    for line in range(count):
        length = int(random.integers(4, 40))
        weights = (random.random(length) < 0.6).astype(np.float32)
        weights[-1] = 1
        made.append(TokenizedExample(random.integers(3, VOCABULARY, length), weights, "train.jsonl", line + 1))
    return made


def _run(
    rows_of_step: Sequence[Sequence[Row]],
    family: str = "llama",
    packed: bool = True,
    precision: str = "no",
    **settings: Any,
) -> tuple[dict[str, Tensor], list[StepResult]]:
    model = prepare_for_kbit_training(FAMILIES[family](), recompute=settings.get("recompute", "none"))
    if packed:
        apply_packed_attention(model)
    torch.manual_seed(5)
    adapted, _ = add_lora(model, rank=4, alpha=8, autocast=precision != "no")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    loss = CausalLoss(adapted, chunk_tokens=settings.get("chunk_tokens"), packed=packed)
    optimizer = make_optimizer(loss, lr=LR, weight_decay=0.01)
    schedule = make_schedule(optimizer, "linear", 10, 0.1)
    model, optimizer = accelerator.prepare(loss, optimizer, device_placement=[False, False])
    model.train()
    results = [
        train_step(accelerator, model, optimizer, schedule, rows, step, settings.get("max_grad_norm", 1.0))
        for step, rows in enumerate(rows_of_step, 1)
    ]
    return {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}, results


def _rows(examples: list[TokenizedExample], groups: list[list[int]]) -> list[list[Row]]:
    return [[make_row([examples[i] for i in group]) for group in groups] for _ in range(STEPS)]


def _largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("per_row", [1, 2, 4])
def test_parameters_after_two_updates_do_not_depend_on_the_micro_batch(family: str, per_row: int) -> None:
    examples = _examples()
    whole, one = _run(_rows(examples, [list(range(8))]), family)
    split, some = _run(_rows(examples, [list(range(i, i + per_row)) for i in range(0, 8, per_row)]), family)
    # each step moves a parameter by up to LR; gradients differ by the order of fp32 sums only
    assert _largest_difference(whole, split) < 1e-6
    assert [r.micro_batches for r in some] == [8 // per_row] * STEPS
    for a, b in zip(one, some, strict=True):
        assert (a.trained_tokens, a.tokens) == (b.trained_tokens, b.tokens)
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_the_update_of_examples_one_by_one_without_our_attention(family: str) -> None:
    examples = _examples()
    packed, _ = _run(_rows(examples, [[0, 3, 5], [1, 2, 4, 6, 7]]), family)
    alone, _ = _run(_rows(examples, [[i] for i in range(8)]), family, packed=False)
    assert _largest_difference(packed, alone) < 1e-6


def test_recompute_and_loss_chunks_do_not_change_the_update() -> None:
    rows = _rows(_examples(), [[0, 1, 2, 3], [4, 5, 6, 7]])
    plain, _ = _run(rows)
    for settings in ({"recompute": "block"}, {"chunk_tokens": 3}, {"recompute": "block", "chunk_tokens": 1000}):
        changed, _ = _run(rows, **settings)
        assert _largest_difference(plain, changed) < 1e-6
    recomputed, _ = _run(rows, recompute="block")
    assert _largest_difference(plain, recomputed) == 0.0


def test_the_update_is_that_of_the_plain_mean_over_all_trained_tokens() -> None:
    """Against a loop written without anything of ours: padding, full logits, one mean."""
    examples = _examples()
    ours, results = _run(_rows(examples, [[0, 1, 2], [3, 4], [5, 6, 7]]))

    base = tiny_llama().requires_grad_(False)
    torch.manual_seed(5)
    model, _ = add_lora(base, rank=4, alpha=8, autocast=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01)
    schedule = make_schedule(optimizer, "linear", 10, 0.1)
    model.train()
    width = max(len(e.input_ids) for e in examples)
    ids, labels, mask = torch.zeros(8, width, dtype=torch.long), torch.full((8, width), -100), torch.zeros(8, width)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        ids[row, :length] = torch.tensor(np.asarray(example.input_ids))
        mask[row, :length] = 1
        chosen = torch.tensor(np.asarray(example.weights)) > 0
        labels[row, :length] = torch.where(chosen, ids[row, :length], -100)
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plain = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert _largest_difference(ours, plain) < 2e-6  # padded attention sums in yet another order
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-6)


def test_an_incomplete_step_is_scaled_by_what_it_holds() -> None:
    """Three examples in three micro-batches are one batch of three, whatever batch_size was."""
    examples = _examples(3)
    split, _ = _run([[make_row([e]) for e in examples]])
    whole, results = _run([[make_row(examples)]])
    assert _largest_difference(split, whole) < 1e-6
    assert results[0].trained_tokens == sum(int(np.count_nonzero(e.weights[1:])) for e in examples)


def test_weights_of_one_half_count_half() -> None:
    examples = _examples(2)
    halved = [TokenizedExample(e.input_ids, np.asarray(e.weights) * 0.5, e.file, e.line) for e in examples]
    plain, one = _run(_rows(examples, [[0, 1]]))
    same, other = _run(_rows(halved, [[0], [1]]))
    assert _largest_difference(plain, same) < 1e-6  # all by the same factor: the division takes it out
    assert one[0].loss == pytest.approx(other[0].loss, rel=1e-6)


def test_clipping_is_once_a_step_and_the_norm_is_that_before_it() -> None:
    rows = _rows(_examples(), [[0, 1, 2, 3], [4, 5, 6, 7]])
    _, clipped = _run(rows, max_grad_norm=1e-3)
    _, free = _run(rows, max_grad_norm=None)
    assert clipped[0].grad_norm == free[0].grad_norm > 1e-3


def test_bf16_autocast_trains_fp32_parameters() -> None:
    rows = _rows(_examples(), [[0, 1, 2, 3], [4, 5, 6, 7]])
    half, results = _run(rows, precision="bf16")
    full, reference = _run(rows)
    assert {p.dtype for p in half.values()} == {torch.float32}
    assert results[0].loss == pytest.approx(reference[0].loss, rel=1e-2)  # 8 bits of mantissa
    assert half.keys() == full.keys()


class _Scripted(nn.Module):
    """A loss that is what the test says."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.value = value

    def forward(self, row: Row) -> Tensor:
        return (self.weight * self.value).sum()


def _scripted(value: float) -> tuple[_Scripted, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    model = _Scripted(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, make_schedule(optimizer, "constant", 10, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_never_applied_and_names_its_examples(value: float) -> None:
    model, optimizer, schedule = _scripted(value)
    result = train_step(Accelerator(cpu=True), model, optimizer, schedule, [make_row(_examples(2))], 7, 1.0)
    assert result.refused is not None
    assert "nothing was applied. Its examples: train.jsonl line 1, train.jsonl line 2" in result.refused
    assert model.weight.item() == 1.0
    assert model.weight.grad is None
    assert schedule.last_epoch == 0


def test_only_the_examples_of_the_row_that_is_not_finite_are_named() -> None:
    model, optimizer, schedule = _scripted(1.0)
    rows = [make_row([example]) for example in _examples(3)]
    model.forward = lambda row: (model.weight * (math.nan if row.sources == rows[1].sources else 1.0)).sum()  # type: ignore[method-assign]
    result = train_step(Accelerator(cpu=True), model, optimizer, schedule, rows, 7, 1.0)
    assert result.refused is not None
    assert result.refused.endswith("Its examples: train.jsonl line 2")


def test_many_examples_are_named_up_to_eight_and_counted() -> None:
    named = name_examples([make_row(_examples(11))])
    assert named.endswith("train.jsonl line 8, and 3 more")


def test_a_step_without_a_trained_token_is_left_out_before_any_forward() -> None:
    example = TokenizedExample([5, 6, 7], [0.0, 0.0, 0.0], "train.jsonl", 3)
    model, optimizer, schedule = _scripted(1.0)
    model.forward = None  # type: ignore[assignment]
    result = train_step(Accelerator(cpu=True), model, optimizer, schedule, [make_row([example])], 2, 1.0)
    assert result.refused == "no token of its examples is trained (train.jsonl line 3)"
    assert (result.trained_tokens, schedule.last_epoch) == (0, 0)
    assert math.isnan(result.loss)


def test_rows_of_a_step_come_from_micro_batches() -> None:
    lengths = [len(e.input_ids) for e in _examples()]
    rows = micro_batches(lengths, 60)
    assert 1 < len(rows) < 8
