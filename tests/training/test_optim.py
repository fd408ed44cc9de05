"""Learning rates and parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowmem_ft.training.optim import lr_factor, make_optimizer, make_schedule


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_rises_over_the_warm_up_and_no_update_has_rate_zero(schedule: str) -> None:
    factors = [lr_factor(schedule, 100, 10)(done) for done in range(100)]
    assert factors[:10] == pytest.approx([(k + 1) / 11 for k in range(10)])
    assert factors[10] == 1.0
    assert min(factors) > 0
    if schedule == "constant":
        assert set(factors[10:]) == {1.0}
    else:
        assert factors[10:] == sorted(factors[10:], reverse=True)
        assert factors[99] < 0.02


def test_half_way_down_is_one_half() -> None:
    assert lr_factor("cosine", 110, 10)(60) == pytest.approx(0.5)
    assert lr_factor("linear", 110, 10)(60) == pytest.approx(0.5)


def test_a_run_of_one_step_moves() -> None:
    assert lr_factor("cosine", 1, 0)(0) == 1.0
    assert lr_factor("cosine", 1, 1)(0) == 0.5


def test_the_schedule_drives_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.0)
    schedule = make_schedule(optimizer, "linear", 4, 0.0)
    rates = []
    for _ in range(4):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_vectors_are_not_decayed_and_frozen_weights_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2).requires_grad_(False))
    groups = make_optimizer(model, lr=0.1, weight_decay=0.5).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.5), (3, 0.0)]
    assert isinstance(make_optimizer(model, 0.1, 0.5), torch.optim.AdamW)
