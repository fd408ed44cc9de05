"""What of a model is quantized, found by what tensors and modules are, never by the name of a method.

A tensor is packed where its type has no room for a weight's digits (integers, 8-bit floats), where a quantization
state hangs on it (bitsandbytes, whose storage type may be any), or where it wraps such a tensor (torchao). A module
holds a quantized weight where one of its own parameters is packed, where a packed buffer has a scale beside it (GPTQ,
AWQ), or where it keeps the description of a packed weight (HQQ).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.memory.tracking import scales_of
from lowmem_ft.units import format_bytes

MOST_NAMES = 6


@dataclass(frozen=True)
class WeightBytes:
    """How much of a model is quantized.

    Attributes:
        total: bytes of all weights; packed ones with their scales. Adapters are left out.
        unquantized: bytes of the weights that are not quantized.
        names: those weights with their bytes, the largest first; a `*` stands for numbers.
    """

    total: int
    unquantized: int
    names: tuple[tuple[str, int], ...]

    def line(self) -> str:
        """`N of M weight bytes are not quantized: names`."""
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.names[:MOST_NAMES])
        more = len(self.names) - MOST_NAMES
        rest = f", and {more} more" if more > 0 else ""
        which = f": {shown}{rest}" if self.names else ""
        return f"{format_bytes(self.unquantized)} of {format_bytes(self.total)} weight bytes are not quantized{which}"


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper, such as torchao's, is made of; none for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    parts = (getattr(tensor, name) for name in flatten()[0])
    return [part for part in parts if isinstance(part, Tensor)]


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor holds quantized values."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return True
    if getattr(tensor, "quant_state", None) is not None:
        return True
    return any(is_packed(part) for part in inner_tensors(tensor))


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module itself, not of its children."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def quantized_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What a module's quantized weight consists of: packed values, scales, zero points; not its bias.

    Empty where the module itself holds no quantized weight.
    """
    own = own_tensors(module)
    if not (
        any(is_packed(parameter) for parameter in module.parameters(recurse=False))
        or (
            any("scale" in name for name, _ in own) and any(_is_packed_buffer(b) for b in module.buffers(recurse=False))
        )
        or _description(module)
    ):
        return []
    return [(name, tensor) for name, tensor in own if name != "bias" or is_packed(tensor)]


def quantized_ids(model: nn.Module) -> set[int]:
    """Identities of all tensors that `quantized_tensors` names below `model`."""
    return {id(tensor) for module in model.modules() for _, tensor in quantized_tensors(module)}


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, with the scales that hang on it."""
    parts = inner_tensors(tensor)
    if parts:
        return sum(stored_bytes(part) for part in parts)
    size = tensor.numel() * tensor.element_size()
    beside = (t for t in scales_of(tensor) if t.shape != tensor.shape)  # int8 has its own values there once more
    return size + sum(t.numel() * t.element_size() for t in beside)


def described_bytes(module: nn.Module) -> int:
    """Bytes of scales that a module keeps in the description of its weight, outside parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in _description(module).values() if isinstance(t, Tensor))


def logical_count(module: nn.Module, tensor: Tensor) -> int:
    """Weights that a parameter of `module` stands for; a packed one by its shape before packing, where it is known."""
    state, description = getattr(tensor, "quant_state", None), _description(module)
    shape = description.get("shape") if tensor.ndim >= 2 else None
    if state is not None:
        shape = state.shape
    return int(torch.Size(shape).numel()) if shape is not None else tensor.numel()


def count_weight_bytes(model: nn.Module, adapters: set[int]) -> WeightBytes:
    """Sort the bytes of all weights into quantized and not.

    Args:
        model: on any device.
        adapters: identities of parameters that are no part of the base.
    """
    total, seen = 0, set(adapters)
    names: dict[str, int] = {}
    for name, module, key, tensor, packed in _weights(model):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        size = stored_bytes(tensor)
        total += size
        if not packed:
            short = _short_name(f"{name}.{key}" if name else key)
            names[short] = names.get(short, 0) + size
        elif isinstance(tensor, nn.Parameter):
            total += described_bytes(module)
    ordered = tuple(sorted(names.items(), key=lambda item: -item[1]))
    return WeightBytes(total, sum(names.values()), ordered)


def refuse_untrainable_config(where: str, quantization: Any) -> None:
    """Refuse a checkpoint whose configuration says that it is in a format that nothing can be trained on.

    Args:
        where: the model, for the message.
        quantization: `quantization_config` of its configuration, a dict or an object; None where there is none.

    Raises:
        ModelError: transformers says that the format is not trainable, and it is not dequantized on load.
    """
    if quantization is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer  # imports every method's quantizer

    try:
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
    except Exception:  # an unknown method or a missing library: loading will say so in the library's own words
        return
    if not getattr(quantizer.quantization_config, "dequantize", False):
        _refuse_untrainable(where, quantizer)


def refuse_untrainable(model: nn.Module) -> None:
    """Refuse a loaded model whose packed weights pass no gradient on. A model that was dequantized on load is fine.

    Raises:
        ModelError: transformers says that the format is not trainable, or a packed weight cuts the gradient.
    """
    if not quantized_ids(model):
        return
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        _refuse_untrainable(type(model).__name__, quantizer)
    tried: set[tuple[Any, ...]] = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            what = "bitsandbytes has repacked its weight for inference, and has no gradient for that layout"
            raise ModelError(Problem(name, what, "Load the model again, and prepare it before it is first called"))
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or not inner_tensors(weight):
            continue
        kind = (type(module), type(weight), str(getattr(weight, "act_quant_kwargs", None)))
        if kind not in tried and is_packed(weight) and _cuts_gradient(weight):
            what = f"its weight is a {type(weight).__name__} whose product has no gradient, so nothing below it trains"
            raise ModelError(Problem(name, what, "Quantize weights only, not activations, or use nf4"))
        tried.add(kind)


def keep_trainable_layout(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking weights for inference on CPUs with AVX512-BF16.

    Its Linear4bit does so at the first call in eval mode without gradients, with scales rounded to bf16, and does not
    undo it for training: the layer then has no gradient to its input, without a word. The flag is read at each call.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # an attribute of Linear4bit


def quantization_method(quantization: Any) -> str:
    """The name of a method, from a `quantization_config` in either form."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method))


def _refuse_untrainable(where: str, quantizer: Any) -> None:
    try:
        trainable = quantizer.is_trainable
    except Exception:  # some ask for the version of a library that is not there: not known
        return
    if trainable:
        return
    config = quantizer.quantization_config
    kind = getattr(config, "quant_type", None)  # torchao's configurations, some of which train
    of_kind = f" ({type(kind).__name__})" if kind is not None and not isinstance(kind, str) else ""
    what = f"is quantized in {quantization_method(config)}{of_kind}, which cannot be trained on"
    instead = "Name the unquantized model and write quantization: nf4"
    if hasattr(config, "dequantize"):
        instead += f", or load it with {type(config).__name__}(dequantize=True)"
    raise ModelError(Problem(where, what, instead))


def _cuts_gradient(weight: Tensor) -> bool:
    probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
    try:
        with torch.enable_grad():
            return not F.linear(probe, weight).requires_grad
    except Exception:  # a kernel that this device lacks: the first step will say so
        return False


def _is_packed_buffer(buffer: Tensor) -> bool:
    """Integers of at most 32 bits in a matrix. 64-bit ones are positions, booleans are masks."""
    return buffer.ndim >= 2 and buffer.dtype not in (torch.bool, torch.int64) and is_packed(buffer)


def _description(module: nn.Module) -> dict[str, Any]:
    """How HQQ keeps the shape, bits and scales of its weight, whose own type may be a float's; or nothing."""
    meta = module.__dict__.get("meta")
    return meta if isinstance(meta, dict) and "nbits" in meta else {}


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor, bool]]:
    """Parameters, and the buffers of quantized weights."""
    for name, module in model.named_modules():
        quantized = quantized_tensors(module)
        packed = {id(tensor) for _, tensor in quantized}
        yield from ((name, module, key, tensor, True) for key, tensor in quantized)
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in packed:
                yield name, module, key, parameter, False


def _short_name(name: str) -> str:
    for part in ("base_model.model.", ".base_layer", ".original_module"):
        name = name.replace(part, "", 1)
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
