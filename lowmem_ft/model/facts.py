"""What a model will be, from its configuration alone: no weight is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import DTYPES, BytesByPart, count_bytes
from lowmem_ft.model.packed import refuse_untrainable_config
from lowmem_ft.model.targets import is_linear

BLOCK = 64
"""Weights with one scale in nf4 and fp4."""
DOUBLE_BLOCK = 256
"""Scales with one scale of their own, with double quantization."""


def make_empty_model(
    found: FoundModel, dtype: str, trust_remote_code: bool = False, *, layers: int | None = None
) -> PreTrainedModel:
    """The model's modules on the meta device: shapes and types, no storage.

    Args:
        found: where its configuration is.
        dtype: as in the recipe.
        trust_remote_code: run the model's own Python code.
        layers: so many blocks instead of those that the configuration counts; their kinds are its own, in order.

    Raises:
        ModelError: its configuration cannot be read, or names a format that cannot be trained on.
    """
    try:
        config = AutoConfig.from_pretrained(found.path, revision=found.revision, trust_remote_code=trust_remote_code)
        refuse_untrainable_config(found.path, getattr(config, "quantization_config", None))
        if layers is not None:
            _set_layers(config, layers)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code
            )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(Problem(found.path, f"its configuration cannot be read: {error}")) from error
    return model


def _set_layers(config: Any, layers: int) -> None:
    """Change how many blocks a configuration has, and the lists that name the kind of each."""
    text = config.get_text_config()
    before = text.num_hidden_layers
    text.num_hidden_layers = layers
    for name, value in vars(text).items():
        if isinstance(value, list) and value and len(value) == before:
            setattr(text, name, [value[i % before] for i in range(layers)])


def predict_bytes(model: PreTrainedModel, quantization: str, double_quant: bool = True) -> BytesByPart:
    """Bytes by part that `model` will have once its linear layers are quantized.

    Equal to `count_bytes` of the loaded model but for the code tables of bitsandbytes, 1.1 kB a layer.

    Args:
        model: not quantized; may be on the meta device.
        quantization: as in the recipe.
        double_quant: scales of nf4 and fp4 are quantized too.
    """
    plain = count_bytes(model)
    if quantization == "none":
        return plain
    head = model.get_output_embeddings()
    packed, was = 0, 0
    for module in model.modules():
        if module is head or not is_linear(module):
            continue
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        rows, columns = weight.shape if isinstance(module, nn.Linear) else weight.shape[::-1]  # Conv1D is (in, out)
        was += weight.numel() * weight.element_size()
        packed += packed_bytes(rows, columns, quantization, double_quant)
    return replace(plain, quantized=packed, rest=plain.rest - was)


def packed_bytes(rows: int, columns: int, quantization: str, double_quant: bool) -> int:
    """Bytes of one weight of shape (rows, columns) in a bitsandbytes format, with its scales.

    nf4, fp4: half a byte a weight; a 4-byte scale for 64 weights, or with double quantization a byte for 64 and
    4 bytes for 64 * 256, and a 4-byte offset. int8: a byte a weight and a 4-byte scale a row.

    Source: Dettmers et al. 2023, arXiv:2305.14314, and 2022, arXiv:2208.07339.
    """
    count = rows * columns
    if quantization == "int8":
        return count + rows * 4
    scales = -(-count // BLOCK)
    scale_bytes = scales + -(-scales // DOUBLE_BLOCK) * 4 + 4 if double_quant else scales * 4
    return -(-count // 2) + scale_bytes
