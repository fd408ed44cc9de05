"""Gated MLPs (`down(act(gate(x)) * up(x))`) that keep little for backward, in slices of the tokens where asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowmem_ft.memory.blocks import apply_around, remove_around
from lowmem_ft.memory.linears import LinearParts, cast_once, parts_of
from lowmem_ft.memory.products import compute_dtype, in_given_types

PARTS = ("gate_proj", "up_proj", "down_proj")
FEWEST_ROWS = 32
"""Below so many rows, without gradients (generation), the model's own path stays."""


@dataclass(frozen=True)
class _Mlp:
    """One gated MLP at one call: its three layers, the function between them, and how it is run."""

    gate: LinearParts
    up: LinearParts
    down: LinearParts
    act: Callable[[Tensor], Tensor]
    slice_tokens: int | None

    @property
    def layers(self) -> tuple[LinearParts, LinearParts, LinearParts]:
        return self.gate, self.up, self.down

    @property
    def trained(self) -> tuple[Tensor | None, ...]:
        return tuple(parameter for layer in self.layers for parameter in layer.trained)


def apply_lean_mlp(model: nn.Module, *, slice_tokens: int | None = None, in_place: bool = True) -> int:
    """Let the gated MLPs of a model keep their input and two products, or only their input. Returns how many.

    A gated MLP is a module of `gate_proj`, `up_proj`, `down_proj` and `act_fn` with frozen weights, with or without
    LoRA, as Llama, Qwen, Gemma and Mistral have. At each call it is decided anew whether it can be run here.

    Exactness: equal to the model's own up to summation order, and in 16 bits to fewer roundings; see `apply_lean_lora`.
    Memory: for T tokens of width H and an inner width I, without slices `T * (H + 2 I)` numbers in the type of the
    computation (the model's own keeps `T * (2 H + 5 I)`, more where types differ); with slices `T * H`, and the peak
    inside the MLP is that of one slice: it stops growing with T times I.
    Time: without slices nothing is computed twice but the function between. With slices two products more backward.

    Args:
        model: its LoRA layers are those of peft; twice applied is once applied.
        slice_tokens: tokens that pass through the MLP at once, in forward and backward; None for all.
        in_place: see `LinearParts`; False under selective recompute.

    Source: slices over the sequence are known as tiled MLP (Bekman et al. 2025, arXiv:2506.13996).
    """
    if slice_tokens is not None and slice_tokens < 1:
        raise ValueError(f"slice_tokens is {slice_tokens}, at least 1 is needed")
    remove_lean_mlp(model)
    found = [module for module in model.modules() if is_gated_mlp(module)]
    alike: dict[Any, bool] = {}
    applied = 0
    for module in found:
        key = (type(module), type(module.act_fn))
        if key not in alike:
            alike[key] = _computes_the_same(module)
        if alike[key]:
            apply_around(module, partial(_lean, slice_tokens=slice_tokens, in_place=in_place))
            applied += 1
    return applied


def remove_lean_mlp(model: nn.Module) -> None:
    """Give the MLPs back their own forward."""
    for module in model.modules():
        remove_around(module, _lean)


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module consists of the parts of a gated MLP, and of nothing else that computes."""
    children = dict(module.named_children())
    act = getattr(module, "act_fn", None)
    others = set(children) - {*PARTS, "act_fn"}
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    in_place = getattr(act, "inplace", False)
    return set(PARTS) <= set(children) and callable(act) and not others and not own and not in_place


def _computes_the_same(module: Any) -> bool:
    """Compare with the module's own forward on four rows; True on the meta device, where there are no numbers."""
    base = getattr(module.gate_proj, "base_layer", module.gate_proj)
    weight = base.weight
    if weight.is_meta:
        return True
    dtype = getattr(base, "compute_dtype", None) or (weight.dtype if weight.is_floating_point() else torch.float32)
    device = weight.device
    rows = torch.randn(4, base.in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            mlp = _read(module, rows, None, True)
            if mlp is None:
                return True  # decided again at each call
            own = module(rows).float()
            ours = _run(mlp, rows).float()
    finally:
        for part, mode in modes:
            part.training = mode
    return bool((ours - own).norm() <= 0.02 * own.norm())  # three products in bf16, each rounded to 2**-9


def _lean(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slice_tokens: int | None,
    in_place: bool,
) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return forward(*args, **kwargs)
    rows = args[0]
    if not torch.is_grad_enabled() and rows.numel() < FEWEST_ROWS * rows.shape[-1]:
        return forward(*args, **kwargs)
    mlp = _read(module, rows, slice_tokens, in_place)
    return forward(*args, **kwargs) if mlp is None else _run(mlp, rows)


def _read(module: Any, rows: Tensor, slice_tokens: int | None, in_place: bool) -> _Mlp | None:
    """What the module computes now, or None where one of its layers does more."""
    layers = [parts_of(getattr(module, name), rows, in_place) for name in PARTS]
    gate, up, down = layers
    if gate is None or up is None or down is None:
        return None
    return _Mlp(gate, up, down, module.act_fn, slice_tokens)


def _run(mlp: _Mlp, rows: Tensor) -> Tensor:
    copy, kept = cast_once(rows, compute_dtype(rows)), _Kept()
    token = _Keep.apply(rows, copy, mlp, kept, *mlp.trained)
    return _Product.apply(rows, token, copy, mlp, kept, *mlp.trained)


class _Kept:
    """What the two operations hand each other: the first one's saved tensors, and what it has computed already."""

    def __init__(self) -> None:
        self.ctx: Any = None
        self.now: tuple[Any, ...] | None = None


class _Keep(torch.autograd.Function):
    """Saves what the gradient needs. Under recompute torch stops here: the product of `down` is not made again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copy: Tensor, mlp: _Mlp, kept: _Kept, *trained: Tensor | None) -> Tensor:
        flat = copy.flatten(0, -2)
        # drawn in the order in which the layers would
        masks = [layer.draw(flat) for layer in (mlp.gate, mlp.up)]
        width = _width(mlp.down)
        masks.append(mlp.down.draw(flat.new_empty(flat.shape[0], width)) if mlp.down.dropout else None)
        if mlp.slice_tokens is None:
            gate = mlp.gate.product(flat, masks[0]).to(flat.dtype)
            up = mlp.up.product(flat, masks[1]).to(flat.dtype)
        else:
            gate = up = None
        ctx.save_for_backward(flat, gate, up, *masks, *trained)
        ctx.set_materialize_grads(False)
        kept.ctx, kept.now = ctx, (gate, up, masks)
        return copy.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, token: Tensor, copy: Tensor, mlp: _Mlp, kept: _Kept, *trained: Tensor | None
    ) -> Tensor:
        assert kept.now is not None
        (gate, up, masks), kept.now = kept.now, None
        flat = copy.flatten(0, -2)
        outs = []
        for part in _slices(flat.shape[0], mlp.slice_tokens):
            ours = [None if mask is None else mask[part] for mask in masks]
            if mlp.slice_tokens is not None:
                gate = mlp.gate.product(flat[part], ours[0]).to(flat.dtype)
                up = mlp.up.product(flat[part], ours[1]).to(flat.dtype)
            outs.append(mlp.down.product(_activate(gate, mlp.act).mul(up), ours[2]).to(flat.dtype))
        ctx.mlp, ctx.kept, ctx.dtype, ctx.shape = mlp, kept, rows.dtype, rows.shape
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.view(*rows.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        mlp: _Mlp = ctx.mlp
        flat, gate, up, *rest = ctx.kept.ctx.saved_tensors
        masks, grad, wants = rest[:3], grad_outputs[0].flatten(0, -2), ctx.needs_input_grad[0]
        grad_rows: list[Tensor] = []
        sums: list[Tensor | None] = [None] * 6
        for part in _slices(flat.shape[0], mlp.slice_tokens):
            ours = [None if mask is None else mask[part] for mask in masks]
            one, *grads = _gradients(mlp, grad[part], flat[part], gate, up, ours, wants)
            if one is not None:
                grad_rows.append(one.to(ctx.dtype))
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, grads, strict=True)]
        whole = None
        if wants:
            whole = (grad_rows[0] if len(grad_rows) == 1 else torch.cat(grad_rows)).view(ctx.shape)
        typed = (
            None if g is None or parameter is None else g.to(parameter.dtype)
            for g, parameter in zip(sums, mlp.trained, strict=True)
        )
        return whole, None, None, None, None, *typed


def _gradients(
    mlp: _Mlp, grad: Tensor, flat: Tensor, gate: Tensor | None, up: Tensor | None, masks: list[Any], wants: bool
) -> tuple[Any, ...]:
    """Gradients of the rows and of A and B of each layer, for some tokens; `gate` and `up` are made again if None."""
    dtype = flat.dtype
    if gate is None or up is None:
        gate, up = mlp.gate.product(flat, masks[0]).to(dtype), mlp.up.product(flat, masks[1]).to(dtype)
    with torch.enable_grad():
        gate = gate.detach().requires_grad_()
        activated = _activate(gate, mlp.act)
    inner = activated.detach() * up
    grad_inner, *of_down = mlp.down.gradients(grad, inner, masks[2])
    del inner
    assert grad_inner is not None
    grad_inner = grad_inner.to(dtype)
    (grad_gate,) = torch.autograd.grad(activated, gate, grad_inner * up)
    grad_up = grad_inner.mul_(activated.detach())
    del activated, gate
    grad_rows, *of_gate = mlp.gate.gradients(grad_gate, flat, masks[0], of_rows=wants)
    del grad_gate
    more, *of_up = mlp.up.gradients(grad_up, flat, masks[1], of_rows=wants)
    if grad_rows is not None and more is not None:
        grad_rows += more
    return grad_rows, *of_gate, *of_up, *of_down


@in_given_types
def _activate(gate: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    return act(gate)


def _width(layer: LinearParts) -> int:
    """Inputs of a layer."""
    return layer.first.shape[1] if layer.first is not None else int(layer.base.in_features)  # type: ignore[arg-type]


def _slices(tokens: int, most: int | None) -> list[slice]:
    step = tokens if most is None else most
    return [slice(start, start + step) for start in range(0, max(tokens, 1), max(step, 1))]
