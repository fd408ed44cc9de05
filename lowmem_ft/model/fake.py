"""A model without numbers whose step can be run all the same: every shape, type and byte, and no memory.

What `lowmem_ft plan` traces. It is made from the configuration alone: transformers' modules on the meta device, their
linear layers exchanged for those of bitsandbytes as loading would, and then every tensor made one of torch's fake ones.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt, Params4bit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from lowmem_ft.model.facts import BLOCK, DOUBLE_BLOCK
from lowmem_ft.model.targets import is_linear

CODES = {"nf4": 16, "fp4": 16}
DOUBLE_CODES = 256


def quantize_empty(
    model: PreTrainedModel, quantization: str, double_quant: bool, dtype: torch.dtype
) -> PreTrainedModel:
    """Exchange the linear layers of a model on the meta device, all but the head, as `load_model` does. In place.

    Args:
        model: from `make_empty_model`.
        quantization: `none`, `nf4`, `fp4` or `int8`.
        double_quant: scales of nf4 and fp4 are quantized too.
        dtype: in which packed weights are multiplied.
    """
    if quantization == "none":
        return model
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if module is not head and is_linear(module):
            model.set_submodule(name, _packed(module, quantization, double_quant, dtype))
    return model


def _packed(module: Any, quantization: str, double_quant: bool, dtype: torch.dtype) -> nn.Module:
    rows, columns = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
    has_bias = module.bias is not None
    with torch.device("meta"):
        layer: Any
        if quantization == "int8":
            layer = Linear8bitLt(columns, rows, has_bias, has_fp16_weights=False, threshold=6.0)
            layer.weight = _parameter(torch.empty(rows, columns, dtype=torch.int8))
            # where they lie until the first forward pass takes them
            layer.weight.CB, layer.weight.SCB = layer.weight.data, torch.empty(rows, dtype=torch.float32)
        else:
            layer = Linear4bit(
                columns, rows, has_bias, dtype, compress_statistics=double_quant, quant_type=quantization
            )
            layer.weight = Params4bit(
                torch.empty(-(-rows * columns // 2), 1, dtype=torch.uint8),
                requires_grad=False,
                quant_state=_state((rows, columns), quantization, double_quant, dtype),
                compress_statistics=double_quant,
                quant_type=quantization,
                bnb_quantized=True,
            )
            layer.quant_state = layer.weight.quant_state
        if has_bias:
            layer.bias = _parameter(torch.empty(rows, dtype=module.bias.dtype))
    layer.source_cls = type(module)
    return layer.train(module.training)


def _parameter(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def _state(shape: tuple[int, int], kind: str, double_quant: bool, dtype: torch.dtype) -> QuantState:
    scales = -(-shape[0] * shape[1] // BLOCK)
    settings: dict[str, Any] = {"shape": torch.Size(shape), "dtype": dtype, "blocksize": BLOCK, "quant_type": kind}
    settings["code"] = torch.empty(CODES[kind], dtype=torch.float32)
    if not double_quant:
        return QuantState(absmax=torch.empty(scales, dtype=torch.float32), **settings)
    second = QuantState(
        absmax=torch.empty(-(-scales // DOUBLE_BLOCK), dtype=torch.float32),
        blocksize=DOUBLE_BLOCK,
        code=torch.empty(DOUBLE_CODES, dtype=torch.float32),
        dtype=torch.float32,
    )
    absmax = torch.empty(scales, dtype=torch.uint8)
    return QuantState(absmax=absmax, offset=torch.empty((), dtype=torch.float32), state2=second, **settings)


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Make every tensor of a model on the meta device one of `mode` that says it is on the CPU. In place.

    What shared a storage still does, and so does what is one parameter under two names.

    Args:
        model: parameters, buffers, and what bitsandbytes keeps beside a packed weight.
        mode: in which the model's step will be run.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            with mode:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made[id(tensor)] = new
            kept.append(tensor)
        return made[id(tensor)]

    kept: list[Tensor] = []  # or a freed one's identity would be given to another
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = _fake_parameter(parameter, fake)
                module._parameters[name] = parameters[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = fake(buffer)
        for name, value in list(vars(module).items()):  # e.g. the rotary embedding's first frequencies
            if isinstance(value, Tensor):
                setattr(module, name, fake(value))


def _fake_parameter(parameter: nn.Parameter, fake: Any) -> nn.Parameter:
    new = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        for holder in (state, state.state2):
            for name in ("absmax", "code", "offset"):
                if getattr(holder, name, None) is not None:
                    setattr(holder, name, fake(getattr(holder, name)))
        new.quant_state = state  # type: ignore[attr-defined]
        new.__class__ = _FakeParams4bit
    if hasattr(parameter, "SCB"):
        new.CB, new.SCB = new.detach(), fake(parameter.SCB)  # type: ignore[attr-defined]
    return new


_FakeParams4bit = type("Params4bit", (FakeTensor,), {})
"""A packed weight without numbers: peft reads one (for DoRA) by the name of its class."""
