"""lowmem_ft: fine-tunes quantized language models in little memory, exactly.

The helpers here work in any Hugging Face script; each is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_ft.memory.attention import apply_packed_attention as apply_packed_attention
    from lowmem_ft.memory.attention import packed_examples as packed_examples
    from lowmem_ft.memory.loss import chunked_loss as chunked_loss
    from lowmem_ft.memory.recompute import apply_recompute as apply_recompute
    from lowmem_ft.model.gradient_flow import check_gradient_flow as check_gradient_flow
    from lowmem_ft.model.kbit import prepare_for_kbit_training as prepare_for_kbit_training

__version__ = "0.1.0"

_HELPERS = {
    "apply_packed_attention": "lowmem_ft.memory.attention",
    "apply_recompute": "lowmem_ft.memory.recompute",
    "check_gradient_flow": "lowmem_ft.model.gradient_flow",
    "chunked_loss": "lowmem_ft.memory.loss",
    "packed_examples": "lowmem_ft.memory.attention",
    "prepare_for_kbit_training": "lowmem_ft.model.kbit",
}
__all__ = [
    "apply_packed_attention",
    "apply_recompute",
    "check_gradient_flow",
    "chunked_loss",
    "packed_examples",
    "prepare_for_kbit_training",
]


def __getattr__(name: str) -> Any:
    if name in _HELPERS:
        return getattr(importlib.import_module(_HELPERS[name]), name)
    raise AttributeError(f"module 'lowmem_ft' has no attribute {name!r}")
