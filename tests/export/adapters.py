"""Tiny models with adapters of every kind whose weights are no longer those of the start, saved as peft saves them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from lowmem_ft.model.adapters import AdapterSettings, add_adapters


def shaken(adapted: Any, size: float = 0.1) -> PeftModel:
    """Give everything that trains values of some size, so that each kind of change shows."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * size)
    assert isinstance(adapted, PeftModel)
    return adapted.eval()


def with_adapter(model: PreTrainedModel, **settings: Any) -> PeftModel:
    """By the settings of a recipe."""
    return shaken(add_adapters(copy.deepcopy(model), AdapterSettings(**settings), autocast=False)[0])


def with_peft(model: PreTrainedModel, **config: Any) -> PeftModel:
    """By peft's own settings, for adapters from elsewhere."""
    return shaken(get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **config)))


def save(adapted: PeftModel, folder: Path, **options: Any) -> Path:
    """In PEFT's format."""
    adapted.save_pretrained(str(folder), **{"save_embedding_layers": False, **options})
    return folder
