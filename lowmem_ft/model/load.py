"""Reads a model, quantizing each weight as it arrives, and says where its bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.memory.blocks import part_of
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.packed import (
    described_bytes,
    keep_trainable_layout,
    logical_count,
    quantization_method,
    quantized_tensors,
    refuse_untrainable_config,
    stored_bytes,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class BytesByPart:
    """Where the bytes of a model's parameters and buffers are. Tied storage is counted once.

    Attributes:
        quantized: packed weights with their scales.
        embeddings: input embeddings, and the head where it is tied to them.
        head: the output head where it has its own weight.
        unquantized_linears: linear weights that stayed as they were, in a model that is quantized.
        rest: norms, biases, buffers; in an unquantized model everything but embeddings and head.
        parameters: number of weights, counting a packed weight by its logical shape.
        unquantized_names: names behind `unquantized_linears`.
        tied: whether head and embeddings share their storage.
    """

    quantized: int
    embeddings: int
    head: int
    unquantized_linears: int
    rest: int
    parameters: int
    unquantized_names: tuple[str, ...]
    tied: bool

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.quantized + self.embeddings + self.head + self.unquantized_linears + self.rest


def load_model(
    found: FoundModel,
    *,
    quantization: str = "none",
    double_quant: bool = True,
    dtype: str = "bfloat16",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal language model with its linear layers quantized by bitsandbytes.

    Args:
        found: where it is.
        quantization: `none`, `nf4`, `fp4` or `int8`. Output embeddings are left as they are.
        double_quant: for nf4 and fp4, quantize the scales too.
        dtype: type of unquantized weights, and of products with quantized ones.
        device: `cpu`, `cuda` or `cuda:N`; the whole model goes there.
        trust_remote_code: run the model's own Python code.

    Raises:
        ModelError: it cannot be loaded this way, or its format cannot be trained on; that is said before weights are
            read.
    """
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": found.path,
        "revision": found.revision,
        "trust_remote_code": trust_remote_code,
    }
    try:
        config = AutoConfig.from_pretrained(**source)
        already = getattr(config, "quantization_config", None)
        refuse_untrainable_config(found.path, already)
        if already is not None and quantization != "none":
            what = (
                f"is quantized already ({quantization_method(already)}), and model.quantization asks for {quantization}"
            )
            raise ModelError(Problem(found.path, what, "Write quantization: none, or name the unquantized model"))
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            **source,
            config=config,
            dtype=DTYPES[dtype],
            quantization_config=_quantization_config(quantization, double_quant, DTYPES[dtype]),
            device_map={"": device},
        )
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise ModelError(Problem(found.path, f"transformers cannot load it: {_one_line(error)}")) from error
    keep_trainable_layout(model)
    return model


def stored_dtype(config: Mapping[str, Any]) -> str:
    """The type that config.json states for the weights; float32, which holds any other, where it states none."""
    nested = config.get("text_config") or {}
    named = config.get("dtype") or config.get("torch_dtype") or nested.get("dtype") or nested.get("torch_dtype")
    return str(named) if named in DTYPES else "float32"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _quantization_config(quantization: str, double_quant: bool, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    if quantization == "none":
        return None
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


def count_bytes(model: PreTrainedModel) -> BytesByPart:
    """Sort the parameters and buffers of `model` by part."""
    embedding, head = _embedding_weights(model)
    tied = embedding is not None and embedding is head
    sizes = dict.fromkeys(("quantized", "embeddings", "head", "unquantized_linears", "rest"), 0)
    names: list[str] = []
    count = 0
    packed: set[int] = set()
    for module in model.modules():
        for _, tensor in quantized_tensors(module):
            if id(tensor) not in packed:
                packed.add(id(tensor))
                sizes["quantized"] += stored_bytes(tensor)
        sizes["quantized"] += described_bytes(module)
    for name, parameter in model.named_parameters():
        count += logical_count(model.get_submodule(name.rpartition(".")[0]), parameter)
        size = parameter.numel() * parameter.element_size()
        if id(parameter) in packed:
            continue
        if parameter is embedding:
            sizes["embeddings"] += size
        elif parameter is head:
            sizes["head"] += size
        elif packed and parameter.ndim >= 2:
            sizes["unquantized_linears"] += size
            names.append(name)
        else:
            sizes["rest"] += size
    plain = (buffer for buffer in model.buffers() if id(buffer) not in packed)
    sizes["rest"] += sum(buffer.numel() * buffer.element_size() for buffer in plain)
    return BytesByPart(**sizes, parameters=count, unquantized_names=tuple(names), tied=tied)


def _embedding_weights(model: PreTrainedModel) -> tuple[Any, Any]:
    getters = ("get_input_embeddings", "get_output_embeddings")
    found = [getattr(part_of(model, getter), "weight", None) for getter in getters]
    return found[0], found[1]
