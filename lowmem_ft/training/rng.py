"""The state of every random generator of a process, as JSON: python, numpy, torch on the CPU and on each device."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Any]:
    """The states now. Plain lists, numbers and texts; about 20 kB."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in devices],
    }


def set_rng_state(state: dict[str, Any]) -> list[str]:
    """Put all generators where they were.

    Args:
        state: from `rng_state`, or read back from JSON.

    Returns:
        What could not be put back, because the devices are others now.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, text in enumerate(state["cuda"][:here]):
        torch.cuda.set_rng_state(_tensor(text), index)
    if here == len(state["cuda"]):
        return []
    return [f"saved with {len(state['cuda'])} CUDA devices and resumed with {here}: dropout draws other numbers there"]


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
