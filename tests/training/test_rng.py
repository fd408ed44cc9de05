"""Every generator goes on where it was."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from lowmem_ft.training.rng import rng_state, set_rng_state


def draw() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()),
        *torch.rand(3).tolist(), *torch.randn(20).tolist(),
    ]  # fmt: skip


def test_after_a_way_through_json_the_same_numbers_are_drawn() -> None:
    draw()
    random.gauss(0, 1)  # leaves its second number for the next call, as numpy's does
    np.random.randn()
    state = json.loads(json.dumps(rng_state()))
    first = draw()
    draw()
    assert set_rng_state(state) == []
    assert draw() == first


def test_devices_that_are_not_there_are_named() -> None:
    state = rng_state()
    state["cuda"] = [*state["cuda"], state["torch"]]
    (line,) = set_rng_state(state)
    assert "CUDA devices" in line
