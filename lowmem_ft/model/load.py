"""Reads a model, quantizing each weight as it arrives, and says where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.model.find import FoundModel

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
        ModelError: it cannot be loaded this way.
    """
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": found.path,
        "revision": found.revision,
        "trust_remote_code": trust_remote_code,
    }
    try:
        config = AutoConfig.from_pretrained(**source)
        already = getattr(config, "quantization_config", None)
        if already is not None and quantization != "none":
            method = already.get("quant_method") if isinstance(already, dict) else already.quant_method
            what = f"is quantized already ({method}), and model.quantization asks for {quantization}"
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
    _keep_trainable_layout(model)
    return model


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


def _keep_trainable_layout(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking weights for inference on CPUs with AVX512-BF16.

    Its Linear4bit does so at the first call in eval mode without gradients, with scales rounded to bf16, and does not
    undo it for training: the layer then has no gradient to its input, without a word. The flag is read at each call.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # an attribute of Linear4bit


def is_packed(parameter: nn.Parameter) -> bool:
    """Whether a parameter holds quantized values: not a floating type, or with a quantization state."""
    return not parameter.is_floating_point() or getattr(parameter, "quant_state", None) is not None


def _packed_bytes(parameter: nn.Parameter) -> int:
    size = parameter.numel() * parameter.element_size()
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        size += sum(t.numel() * t.element_size() for t in state.as_dict(packed=True).values())
    scales = getattr(parameter, "SCB", None)
    return size + (scales.numel() * scales.element_size() if isinstance(scales, torch.Tensor) else 0)


def _logical_count(parameter: nn.Parameter) -> int:
    state = getattr(parameter, "quant_state", None)
    return int(torch.Size(state.shape).numel()) if state is not None else parameter.numel()


def count_bytes(model: PreTrainedModel) -> BytesByPart:
    """Sort the parameters and buffers of `model` by part."""
    embedding, head = _embedding_weights(model)
    tied = embedding is not None and embedding is head
    sizes = dict.fromkeys(("quantized", "embeddings", "head", "unquantized_linears", "rest"), 0)
    names: list[str] = []
    count = 0
    any_packed = any(is_packed(p) for p in model.parameters())
    for name, parameter in model.named_parameters():
        count += _logical_count(parameter)
        if is_packed(parameter):
            sizes["quantized"] += _packed_bytes(parameter)
            continue
        size = parameter.numel() * parameter.element_size()
        if parameter is embedding:
            sizes["embeddings"] += size
        elif parameter is head:
            sizes["head"] += size
        elif any_packed and parameter.ndim >= 2:
            sizes["unquantized_linears"] += size
            names.append(name)
        else:
            sizes["rest"] += size
    sizes["rest"] += sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return BytesByPart(**sizes, parameters=count, unquantized_names=tuple(names), tied=tied)


def _embedding_weights(model: PreTrainedModel) -> tuple[Any, Any]:
    weights = []
    for getter in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            module = getter()
        except (NotImplementedError, AttributeError):
            module = None
        weights.append(getattr(module, "weight", None))
    return weights[0], weights[1]
