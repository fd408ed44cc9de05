"""What a frozen linear layer with LoRA consists of, and its products outside the graph.

Below the mechanisms that run such layers with less kept and fewer small operations: they hand in rows and get back
products and gradients, whatever the base weight is stored as.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes.functional as bnb
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_ft.memory.blocks import WrappedForward
from lowmem_ft.memory.products import compute_dtype, device_kind, in_given_types, multiply, product_dtype


@dataclass(frozen=True)
class LinearParts:
    """A frozen linear layer, with or without LoRA: `rows @ W.T + bias + scaling * (dropout(rows) @ A.T) @ B.T`.

    Attributes:
        base: the layer whose weight is read at each product, so a weight may be moved or streamed between products.
        read: gives the weight of `base` in a type, shape (out, in).
        bias: shape (out,), or None.
        first: A, shape (R, in), or None without LoRA.
        second: B, shape (out, R), or None.
        scaling: factor of the adapter.
        dropout: probability on the adapter's input; 0 while not training.
        in_place: the adapter's product is added to the base's in place. Not under selective recompute, which keeps what
            a product gave and must find it unchanged.
    """

    base: nn.Module
    read: Callable[[nn.Module, torch.dtype], Tensor]
    bias: Tensor | None
    first: Tensor | None
    second: Tensor | None
    scaling: float = 1.0
    dropout: float = 0.0
    in_place: bool = True

    @property
    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """A and B, for the graph."""
        return self.first, self.second

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The base weight, rounded to `dtype`, in the type in which its device multiplies. Shape (out, in)."""
        weight = self.read(self.base, dtype)
        return weight.to(product_dtype(dtype, weight.device))

    def draw(self, rows: Tensor) -> Tensor | None:
        """Which elements of `rows` the adapter sees, as nn.Dropout draws them: bool, like `rows`; None for all."""
        return torch.native_dropout(rows, self.dropout, True)[1] if self.dropout else None

    @in_given_types
    def product(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        """Output of the layer, shape (T, out), in the type in which the device multiplies.

        Args:
            rows: shape (T, in), in the type of the computation.
            mask: from `draw`.
        """
        dtype, wide = rows.dtype, _wide(rows)
        if self.bias is None and self.in_place:
            out = multiply(wide, self.weight(dtype).t())
        else:
            out = nn.functional.linear(wide, self.weight(dtype), _like(self.bias, dtype, wide))
        if self.first is None or self.second is None:
            return out
        small = self._small(wide, dtype, mask)
        second = _like(self.second, dtype, wide)
        add = out.addmm_ if self.in_place else out.addmm
        return add(small, second.t(), alpha=self.scaling)

    @in_given_types
    def gradients(
        self, grad: Tensor, rows: Tensor, mask: Tensor | None = None, *, of_rows: bool = True
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of rows, A and B; the R-sized product is made again.

        Args:
            grad: of the output, shape (T, out).
            rows: as they were in `product`.
            mask: likewise.
            of_rows: the gradient of `rows` is wanted.

        Returns:
            In the type in which the device multiplies: (T, in), (R, in), (out, R); None where not wanted or not there.
        """
        dtype, wide = rows.dtype, _wide(rows)
        grad = grad.to(wide.dtype)
        product = multiply if self.in_place else torch.matmul
        grad_rows = product(grad, self.weight(dtype)) if of_rows else None
        if self.first is None or self.second is None:
            return grad_rows, None, None
        first, second = _like(self.first, dtype, wide), _like(self.second, dtype, wide)
        small = self._small(wide, dtype, mask)
        grad_small = (grad @ second).mul_(self.scaling)
        grad_second = (grad.t() @ small).mul_(self.scaling)
        grad_first = grad_small.t() @ self._dropped(wide, mask)
        if grad_rows is None:
            return None, grad_first, grad_second
        if mask is not None:
            grad_rows += self._dropped(grad_small @ first, mask)
        elif self.in_place:
            grad_rows.addmm_(grad_small, first)
        else:
            grad_rows = grad_rows.addmm(grad_small, first)
        return grad_rows, grad_first, grad_second

    def _small(self, wide: Tensor, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
        """The R-sized product of A, rounded as a product in `dtype` is; shape (T, R)."""
        assert self.first is not None
        return (self._dropped(wide, mask) @ _like(self.first, dtype, wide).t()).to(dtype).to(wide.dtype)

    def _dropped(self, wide: Tensor, mask: Tensor | None) -> Tensor:
        return wide if mask is None else (wide * mask).mul_(1 / (1 - self.dropout))


def parts_of(module: nn.Module, rows: Tensor, in_place: bool = True) -> LinearParts | None:
    """What `module` computes on an input like `rows` now, or None where it is more, or other, than `LinearParts` says.

    None for: a base that trains; a quantization that is not read here; several adapters, merged or switched-off ones,
    and variants (DoRA and others); hooks; types that the layer would convert by rules of its own.

    Args:
        module: a linear layer, or peft's LoRA layer around one.
        rows: the input; only its type, its device and the state of autocast matter.
        in_place: see `LinearParts`.
    """
    base, adapted = (module.base_layer, True) if hasattr(module, "base_layer") else (module, False)
    if not isinstance(base, nn.Module) or _has_hooks(module, base) or any(p.requires_grad for p in base.parameters()):
        return None
    read = _reader(base)
    dtype = compute_dtype(rows)
    autocast = torch.is_autocast_enabled(rows.device.type)
    if read is None or not (autocast or _computes_in(base, dtype)):
        return None
    bias: Any = base.bias
    if not adapted:
        return LinearParts(base, read, bias, None, None, in_place=in_place)
    layer: Any = module
    if not hasattr(layer, "lora_A") or layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    (name,) = layer.active_adapters
    if name not in layer.lora_A or layer.lora_variant.get(name) is not None or layer.lora_bias.get(name):
        return None
    first, second, drop = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if type(first) is not nn.Linear or type(second) is not nn.Linear or not isinstance(drop, nn.Identity | nn.Dropout):
        return None
    if not autocast and not first.weight.dtype == second.weight.dtype == dtype:
        return None
    dropout = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
    if dropout >= 1:
        return None
    scaling = float(layer.scaling[name])
    return LinearParts(base, read, bias, first.weight, second.weight, scaling, dropout, in_place)


def _has_hooks(module: nn.Module, base: nn.Module) -> bool:
    """Whether something stands around the layer or its base that a product here would pass by.

    A `WrappedForward` of ours around the base only brings types together, which is done here too.
    """
    own = base.__dict__.get("forward")
    hooks = [m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in {module, base}]
    return any(hooks) or not (own is None or isinstance(own, WrappedForward))


def _computes_in(base: nn.Module, dtype: torch.dtype) -> bool:
    """Whether outside autocast the layer multiplies in `dtype`, its input's."""
    kind = type(base).__name__
    if kind == "Linear8bitLt":
        return True
    own: Any = base.compute_dtype if kind == "Linear4bit" else base.weight.dtype
    return own is None or own == dtype


def _reader(base: nn.Module) -> Callable[[nn.Module, torch.dtype], Tensor] | None:
    kind, weight = type(base), getattr(base, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    if kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes"):
        state: Any = getattr(weight, "quant_state", None)
        plain = state is not None and not getattr(state, "packing_format_for_cpu", False) and weight.shape[0] != 1
        return _read_4bit if plain else None
    if kind.__name__ == "Linear8bitLt" and kind.__module__.startswith("bitsandbytes"):
        return _read_int8 if device_kind(weight.device) == "cpu" and weight.dtype == torch.int8 else None
    if kind is nn.Linear and weight.is_floating_point() and type(weight.data) in (Tensor, FakeTensor):
        return _read_plain
    if kind.__name__ == "Conv1D" and weight.is_floating_point():
        return _read_conv1d
    return None


def _read_plain(base: Any, dtype: torch.dtype) -> Tensor:
    return base.weight.detach().to(dtype)


def _read_conv1d(base: Any, dtype: torch.dtype) -> Tensor:
    return base.weight.detach().t().to(dtype)


def _read_4bit(base: Any, dtype: torch.dtype) -> Tensor:
    """As bitsandbytes' own product reads it: scales of scales first, then each number rounded once, to `dtype`."""
    weight, state = base.weight, base.weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = (bnb.dequantize_blockwise(scales, state.state2) + state.offset).float()
    read = torch.ops.bitsandbytes.dequantize_4bit.default
    return read(weight.detach(), scales, state.blocksize, state.quant_type, state.shape, dtype)


def _read_int8(base: Any, dtype: torch.dtype) -> Tensor:
    """As bitsandbytes' product on CPU reads it. The scales lie with the weight until its first forward pass."""
    scales = base.state.SCB if base.state.SCB is not None else base.weight.SCB
    return base.weight.detach().to(dtype).mul_(scales.unsqueeze(1).mul(1 / 127))


def _wide(rows: Tensor) -> Tensor:
    return rows.to(product_dtype(rows.dtype, rows.device))


def _like(tensor: Tensor | None, dtype: torch.dtype, wide: Tensor) -> Any:
    """A parameter rounded to the type of the computation, in the type of the product."""
    return None if tensor is None else tensor.detach().to(dtype).to(wide.dtype)


def cast_once(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows` in `dtype`, outside the graph. The layers that read the same input (q, k and v) share one copy.

    The copy lies with the tensor that it was made from, as long as that one lives and is not changed.
    """
    if rows.dtype == dtype:
        return rows.detach()
    known = getattr(rows, "_lowmem_copy", None)
    if known is None or known[0] != rows._version or known[1].dtype != dtype:
        known = (rows._version, rows.detach().to(dtype))
        rows._lowmem_copy = known  # type: ignore[attr-defined]
    return known[1]
