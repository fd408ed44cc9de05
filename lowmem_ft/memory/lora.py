"""LoRA layers that keep their input once, make few small products, and copy nothing to fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowmem_ft.memory.blocks import apply_around, remove_around
from lowmem_ft.memory.linears import LinearParts, cast_once, parts_of
from lowmem_ft.memory.products import compute_dtype

FEWEST_ROWS = 32
"""Below so many rows, without gradients (generation), the layer's own path stays: bitsandbytes multiplies single rows
without reading the weight into a matrix first."""


def apply_lean_lora(model: nn.Module, *, in_place: bool = True) -> int:
    """Let peft's LoRA layers over frozen linear layers run as one operation each. Returns how many.

    Their parameters stay where they are: saving, merging, switching off and peft's other functions work as before. What
    such a layer cannot do here (see `parts_of`) it goes on doing by itself, decided anew at each call.

    Exactness: equal to the layer's own result up to summation order in fp32. In 16 bits it rounds less often: base and
    adapter are added before the result is rounded. Under autocast the result has autocast's type, as that of a plain
    linear layer; bitsandbytes' own layers answer in the type of their input.
    Memory: for backward, the input in the type of the computation, once for all layers that read it, and 1 byte an
    element for dropout. peft keeps a copy for each layer and type, and the R-sized products. The workspace of a product
    is the base weight in the type of the product.
    Time: base and adapter are three products forward, without copies; five backward, and the R-sized one again.

    Args:
        model: with peft's LoRA inside; twice applied is once applied.
        in_place: see `LinearParts`; False under selective recompute.

    Source: LoRA: Hu et al. 2021, arXiv:2106.09685. Making the R-sized product again is known from unsloth and LoRA-FA.
    """
    remove_lean_lora(model)
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]
    layers = [m for m in layers if isinstance(getattr(m.base_layer, "weight", None), Tensor)]
    layers = [m for m in layers if not isinstance(m.base_layer, nn.Embedding)]
    for layer in layers:
        apply_around(layer, partial(_lean, in_place=in_place))
    return len(layers)


def remove_lean_lora(model: nn.Module) -> None:
    """Give the layers back their own forward."""
    for module in model.modules():
        remove_around(module, _lean)


def _lean(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool
) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return forward(*args, **kwargs)
    rows = args[0]
    parts = parts_of(module, rows, in_place)
    if parts is None or (not torch.is_grad_enabled() and rows.numel() < FEWEST_ROWS * rows.shape[-1]):
        return forward(*args, **kwargs)
    return lean_linear(parts, rows)


def lean_linear(parts: LinearParts, rows: Tensor) -> Tensor:
    """The layer's output in the type of the computation, with gradients for `rows`, A and B.

    Args:
        parts: of the layer.
        rows: shape (..., in).
    """
    dtype = compute_dtype(rows)
    kept: dict[str, Any] = {}
    mask = parts.draw(cast_once(rows, dtype))
    token = _Keep.apply(rows, *parts.trained, cast_once(rows, dtype), mask, kept) if torch.is_grad_enabled() else None
    return _Product.apply(rows, *parts.trained, token, parts, cast_once(rows, dtype), mask, kept)


class _Keep(torch.autograd.Function):
    """Saves what the product's gradient needs, and computes nothing.

    Under recompute, what a block needs for backward is complete once this has run: torch stops there, and the last
    product of a block is not made again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        copy: Tensor,
        mask: Tensor | None,
        kept: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(copy, mask, first, second)  # the parameters: a change before backward is an error
        ctx.set_materialize_grads(False)
        kept["ctx"] = ctx
        return copy.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        return (None,) * 6


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        token: Tensor | None,
        parts: LinearParts,
        copy: Tensor,
        mask: Tensor | None,
        kept: dict[str, Any],
    ) -> Tensor:
        ctx.parts, ctx.kept, ctx.dtype = parts, kept, rows.dtype
        out = parts.product(copy.flatten(0, -2), None if mask is None else mask.flatten(0, -2))
        return out.to(copy.dtype).view(*rows.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        copy, mask, _, _ = ctx.kept["ctx"].saved_tensors
        rows, mask = copy.flatten(0, -2), None if mask is None else mask.flatten(0, -2)
        parts: LinearParts = ctx.parts
        wants = ctx.needs_input_grad[0]
        grad_rows, grad_first, grad_second = parts.gradients(grad.flatten(0, -2), rows, mask, of_rows=wants)
        if grad_rows is not None:
            grad_rows = grad_rows.to(ctx.dtype).view(copy.shape)
        return grad_rows, _as(grad_first, parts.first), _as(grad_second, parts.second), *(None,) * 5


def _as(grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if grad is None or parameter is None else grad.to(parameter.dtype)
