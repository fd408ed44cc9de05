"""One tiny Llama in every format that quantizes its linear layers, each with a way to add LoRA to it.

Real libraries: bitsandbytes, and torchao and HQQ where they are installed. GPTQ and AWQ have no library that installs
beside a CPU build of torch (gptqmodel wants CUDA packages), so `PackedLinear` stands in: packed int32 in a buffer
`qweight`, 16-bit `scales` and packed `qzeros`, as both libraries store them, with 4 bits, and the weight made anew in
each forward in the type of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import load_model
from tests.tiny import tiny_llama

BITSANDBYTES = ("nf4", "fp4", "int8")


class PackedLinear(nn.Module):
    """A 4-bit linear layer as GPTQ and AWQ keep it.

    Args:
        linear: to be packed.
        group: input features with one scale.
        scales_train: scales and zeros are parameters (some GPTQ libraries) and not buffers.
    """

    def __init__(self, linear: nn.Linear, group: int = 32, scales_train: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits, self.group_size = (
            linear.in_features,
            linear.out_features,
            4,
            group,
        )
        weight = linear.weight.detach().float().T.reshape(-1, group, linear.out_features)
        low, high = weight.amin(1), weight.amax(1)
        scales = ((high - low) / 15).clamp(min=1e-8)
        zeros = (-low / scales).round().clamp(0, 15)
        values = (weight / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
        self.register_buffer("qweight", _pack(values.reshape(linear.in_features, -1).int()))
        self.register_buffer("qzeros", _pack(zeros.int().T).T.contiguous())
        self.register_buffer("g_idx", torch.arange(linear.in_features, dtype=torch.int32) // group)
        kept = scales.to(linear.weight.dtype)
        if scales_train:
            self.scales = nn.Parameter(kept)
        else:
            self.register_buffer("scales", kept)
        self.bias = linear.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight, (out, in)."""
        groups = self.g_idx.long()
        zeros = _unpack(self.qzeros.T, self.out_features).T[groups]
        values = _unpack(self.qweight, self.in_features)
        return ((values - zeros).to(dtype) * self.scales.to(dtype)[groups]).T

    def forward(self, x: Tensor) -> Tensor:
        """x is (..., in)."""
        return nn.functional.linear(x, self.dequantize(x.dtype), self.bias)


def _pack(values: Tensor) -> Tensor:
    """(n, m) values of 4 bits as (ceil(n / 8), m) int32."""
    padded = torch.cat([values, values.new_zeros(-len(values) % 8, values.shape[1])]).reshape(-1, 8, values.shape[1])
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)[None, :, None]
    return (padded << shifts).sum(1, dtype=torch.int32)


def _unpack(packed: Tensor, rows: int) -> Tensor:
    shifts = torch.arange(0, 32, 4)[None, :, None]
    values = (packed.long()[:, None] >> shifts) & 15
    return values.reshape(-1, packed.shape[1])[:rows]


def _replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module], within: str = "") -> nn.Module:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and within in name and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, make(module))
    return model


def _torchao(bits: int) -> Any:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig() if bits == 8 else IntxWeightOnlyConfig(weight_dtype=torch.int4)
    model = tiny_llama().bfloat16()
    quantize_(model, config, lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    return model


def _hqq(view_as_float: bool) -> Any:
    quantize = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
    config = {"nbits": 4, "group_size": 64, "axis": 1, "view_as_float": view_as_float}

    def make(linear: nn.Linear) -> nn.Module:
        settings = quantize.BaseQuantizeConfig(**config)
        return quantize.HQQLinear(linear, settings, compute_dtype=torch.bfloat16, device="cpu")

    return _replace_linears(tiny_llama().bfloat16(), make)


def _standing_in(scales_train: bool) -> Any:
    return _replace_linears(tiny_llama().bfloat16(), lambda m: PackedLinear(m, scales_train=scales_train), ".mlp.")


def _loaded(folder: Path, kind: str) -> Any:
    return load_model(FoundModel(str(folder), None, ""), quantization=kind, dtype="bfloat16")


BACKENDS: dict[str, Callable[[Path], Any]] = {
    "none": lambda folder: _loaded(folder, "none"),
    "nf4": lambda folder: _loaded(folder, "nf4"),
    "fp4": lambda folder: _loaded(folder, "fp4"),
    "int8": lambda folder: _loaded(folder, "int8"),
    "dequantized": lambda folder: _loaded(folder, "nf4").dequantize(),
    "torchao-int8": lambda folder: _torchao(8),
    "torchao-int4": lambda folder: _torchao(4),
    "hqq": lambda folder: _hqq(False),
    "hqq-as-float": lambda folder: _hqq(True),
    "gptq-like": lambda folder: _standing_in(False),
    "gptq-like-parameters": lambda folder: _standing_in(True),
}
"""Name to a function of the folder of a saved tiny Llama."""

PACKED_LAYERS = {"none": 0, "dequantized": 0, "gptq-like": 6, "gptq-like-parameters": 6}
"""Linear layers that are quantized, of 14; 14 where the backend is not named."""

LORA_TARGETS = {
    "hqq": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "hqq-as-float": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gptq-like": ["q_proj", "v_proj"],
    "gptq-like-parameters": ["q_proj", "v_proj"],
}
"""What peft is told: its `all-linear` does not see HQQ's layers, and it does not know the stand-ins at all."""


def dequantized(model: Any) -> Any:
    """The same model in fp32, with the weights that the quantized layers stand for."""
    if any(type(module).__name__.startswith(("Linear4bit", "Linear8bit")) for module in model.modules()):
        return model.dequantize().float()
    for name, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        if isinstance(module, PackedLinear):
            plain = module.dequantize(torch.float32)
        elif type(module).__name__ == "HQQLinear":
            plain = module.dequantize()
        elif isinstance(module, nn.Linear) and hasattr(weight, "__tensor_flatten__"):
            plain = weight.dequantize()
        else:
            continue
        linear = nn.Linear(plain.shape[1], plain.shape[0], bias=False)
        linear.weight = nn.Parameter(plain.detach().float())
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)
    return model.float()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, copied as bytes (packed bits may read as NaN); a wrapper by its parts."""
    from lowmem_ft.model.packed import inner_tensors

    found: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        parts = dict(enumerate(inner_tensors(tensor) or [tensor]))
        state = getattr(tensor, "quant_state", None)
        hanging = state.as_dict(packed=True) if state is not None else {}
        found.update({f"{name}/{key}": part for key, part in [*parts.items(), *hanging.items()]})
    for name, module in model.named_modules():
        meta = module.__dict__.get("meta") or {}
        found.update({f"{name}/{key}": part for key, part in meta.items() if isinstance(part, Tensor)})
    return {name: part.detach().clone().reshape(-1).view(torch.uint8) for name, part in found.items()}
