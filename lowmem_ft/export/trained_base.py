"""The base as it was in training: quantized weights taken to their few bits and back, as bitsandbytes does on load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowmem_ft.model.load import DTYPES
from lowmem_ft.model.targets import is_linear


@dataclass(frozen=True)
class Quantization:
    """How a base was loaded.

    Attributes:
        method: `none`, `nf4`, `fp4` or `int8`.
        double_quant: the scales of nf4 and fp4 are quantized too.
        dtype: of weights that are not quantized, and that others are turned back to.
    """

    method: str
    double_quant: bool
    dtype: str

    def __str__(self) -> str:
        if self.method == "none":
            return self.dtype
        double = ", double quantization" if self.double_quant and self.method in ("nf4", "fp4") else ""
        return f"{self.method} in {self.dtype}{double}"


def quantized_names(model: nn.Module) -> set[str]:
    """Names of the weights that are quantized on load: those of all linear layers but the head.

    Args:
        model: a transformers model, not quantized; may be on the meta device.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = (name for name, module in model.named_modules() if is_linear(module) and module is not head)
    return {f"{name}.weight" for name in linears}


def as_trained(weight: Tensor, quantization: Quantization) -> Tensor:
    """A weight as products in training saw it.

    Exactness: nf4 and fp4 bit for bit on the device that it is computed on. int8 is the stored weight; the product in
    training also rounds its input to 8 bits, which no merged weight can repeat.
    Memory: the weight, its quantized copy, and the result.

    Args:
        weight: (outputs, inputs), as in the checkpoint.
        quantization: not `none`.

    Returns:
        The same shape, in the type of training; float32 for int8.

    Source: Dettmers et al. 2023, arXiv:2305.14314 (nf4), and 2022, arXiv:2208.07339 (int8), by bitsandbytes.
    """
    from bitsandbytes import functional

    weight = weight.to(DTYPES[quantization.dtype]).contiguous()
    if quantization.method == "int8":
        rows, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return functional.int8_vectorwise_dequant(rows, scales)
    packed, state = functional.quantize_4bit(
        weight, quant_type=quantization.method, compress_statistics=quantization.double_quant
    )
    return functional.dequantize_4bit(packed, state)
