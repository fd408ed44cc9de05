"""Which parameters of the base go to fp32, and how what stays in 16 bits works beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lowmem_ft.memory.blocks import apply_around, part_of, remove_around
from lowmem_ft.model.packed import inner_tensors, quantized_ids, quantized_tensors

Cast = Literal["all", "norms", "none"]
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CastGroup:
    """Parameters of one part of the model that were treated alike.

    Attributes:
        part: `embeddings`, `head`, `norms`, `experts` or `other`.
        parameters: how many weights.
        before: type before.
        bytes_before: their bytes before.
        bytes_after: their bytes after: in fp32, or the same where they were left as they are.
    """

    part: str
    parameters: int
    before: torch.dtype
    bytes_before: int
    bytes_after: int

    @property
    def after(self) -> torch.dtype:
        """Type after."""
        return torch.float32 if self.bytes_after != self.bytes_before else self.before


@dataclass(frozen=True)
class CastPlan:
    """What a cast will touch, worked out before anything is.

    Attributes:
        cast: groups that go to fp32.
        kept: groups that are not quantized and stay as they are.
        targets: the parameters of `cast`; those that share a storage stand together.
    """

    cast: tuple[CastGroup, ...]
    kept: tuple[CastGroup, ...]
    targets: tuple[tuple[nn.Parameter, ...], ...]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization: by torch's classes, or by the name of its class with a 1-D weight."""
    if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
        return True
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, Tensor) and weight.ndim == 1


def holds_experts(module: nn.Module) -> bool:
    """Whether a module itself holds the weights of several experts in one 3-D parameter, as transformers' MoE do."""
    if isinstance(module, _ConvNd):
        return False
    return any(p.ndim == 3 and p.shape[0] > 1 for p in module.parameters(recurse=False))


def plan_casts(
    model: nn.Module, cast: Cast, left_out: set[int], *, head: bool = True, embeddings: bool = True
) -> CastPlan:
    """Sort the parameters that are not quantized into those that go to fp32 and those that stay.

    Args:
        model: may be on the meta device.
        cast: `all`, `norms` or `none`.
        left_out: identities of parameters that are adapters, or will be quantized.
        head: cast the output head, under `all`. A tied head is cast only if `embeddings` is true too.
        embeddings: cast the input embeddings, under `all`.
    """
    parts, quantized = _parts_of_parameters(model), quantized_ids(model)
    kept_parts = {"experts"} | (set() if head else {"head"}) | (set() if embeddings else {"embeddings"})
    shared: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if id(parameter) not in left_out and id(parameter) not in quantized:
            shared.setdefault(_place(parameter), []).append(parameter)
    cast_groups: dict[tuple[str, torch.dtype], int] = {}
    kept_groups: dict[tuple[str, torch.dtype], int] = {}
    targets = []
    for same in shared.values():
        whole, dtype = set().union(*(parts.get(id(p), {"other"}) for p in same)), same[0].dtype
        part = next(name for name in ("embeddings", "head", "norms", "experts", "other") if name in whole)
        wanted = not whole & kept_parts if cast == "all" else cast == "norms" and part == "norms"
        wanted = wanted and dtype in HALVES
        groups = cast_groups if wanted else kept_groups
        groups[part, dtype] = groups.get((part, dtype), 0) + same[0].numel()
        if wanted:
            targets.append(tuple(same))
    return CastPlan(_groups(cast_groups, 4), _groups(kept_groups, None), tuple(targets))


def apply_casts(plan: CastPlan) -> None:
    """Cast one parameter after the other; the old storage goes before the next is made.

    Memory: at most the largest parameter beyond what is there after. Parameters that share a storage still do.
    """
    for same in plan.targets:
        whole = same[0].data.to(torch.float32)
        for parameter in same:
            parameter.data = whole
        del whole


def apply_matching(model: nn.Module, cast: Cast) -> None:
    """Let parts in fp32 and parts in 16 bits work together, inside autocast and outside.

    Under `norms` a norm computes in fp32 and answers in the type of its input, so the residual stream stays as it was.
    Under `all` the stream is fp32, also behind an embedding that was left in 16 bits; what has a 16-bit weight, or
    multiplies in one type only, gets its input in that.
    """
    for module in model.modules():
        if cast == "norms" and is_norm(module):
            apply_around(module, _norm_in_fp32)
        elif cast == "all" and isinstance(module, nn.Embedding) and module.weight.dtype in HALVES:
            apply_around(module, _answer_in_fp32)
        elif cast == "all" and _takes_one_type(module) is not None:
            apply_around(module, _match_input)


def remove_matching(model: nn.Module) -> None:
    """Take away what `apply_matching` added."""
    for module in model.modules():
        for around in (_norm_in_fp32, _match_input, _answer_in_fp32):
            remove_around(module, around)


def _parts_of_parameters(model: nn.Module) -> dict[int, set[str]]:
    parts: dict[int, set[str]] = {}
    for module in model.modules():
        own = [id(p) for p in module.parameters(recurse=False)]
        part = "norms" if is_norm(module) else "experts" if holds_experts(module) else None
        if part is not None:
            for key in own:
                parts.setdefault(key, set()).add(part)
    for name, getter in (("head", "get_output_embeddings"), ("embeddings", "get_input_embeddings")):
        found = part_of(model, getter)
        for parameter in found.parameters() if found is not None else ():
            parts.setdefault(id(parameter), set()).add(name)
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # of positions, or in a model that does not name its embedding
            for parameter in module.parameters(recurse=False):
                parts.setdefault(id(parameter), {"embeddings"})
    return parts


def _place(parameter: nn.Parameter) -> Any:
    """Equal for parameters that share their whole storage, even where they are two objects."""
    if parameter.is_meta or parameter.numel() == 0 or inner_tensors(parameter):
        return id(parameter)
    return parameter.device, parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def _groups(counts: dict[tuple[str, torch.dtype], int], itemsize: int | None) -> tuple[CastGroup, ...]:
    return tuple(
        CastGroup(part, count, dtype, count * dtype.itemsize, count * (itemsize or dtype.itemsize))
        for (part, dtype), count in counts.items()
    )


def _takes_one_type(module: nn.Module) -> torch.dtype | None:
    """The 16-bit type that a module's input must have, or None where any will do.

    A linear layer with a 16-bit weight, experts, HQQ (says `compute_dtype`), and torchao's wrappers, some of which
    multiply in their own type only. bitsandbytes casts by itself.
    """
    if holds_experts(module):
        dtype = next(p.dtype for p in module.parameters(recurse=False) if p.ndim == 3)
    elif (weight := getattr(module, "weight", None)) is not None and isinstance(module, nn.Linear):
        if quantized_tensors(module) and not inner_tensors(weight):
            return None
        dtype = weight.dtype
    elif "W_q" in dict(module.named_parameters(recurse=False)):
        dtype = getattr(module, "compute_dtype", torch.float32)
    else:
        return None
    return dtype if dtype in HALVES else None


def _norm_in_fp32(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _to(_call_in(torch.float32, forward, args, kwargs), _first(args, kwargs).dtype)


def _match_input(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype, first = _takes_one_type(module), _first(args, kwargs)
    if dtype is None:
        return forward(*args, **kwargs)
    output = _call_in(dtype, forward, args, kwargs)
    # inside autocast a product answers in 16 bits anyway; outside, products that meet must be of one type
    return output if torch.is_autocast_enabled(first.device.type) else _to(output, first.dtype)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _answer_in_fp32(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return _to(forward(*args, **kwargs), torch.float32)


def _call_in(dtype: torch.dtype, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call with the first tensor in another type."""
    if args:
        return forward(_to(args[0], dtype), *args[1:], **kwargs)
    first = next((key for key, value in kwargs.items() if isinstance(value, Tensor)), None)
    return forward(**{key: _to(value, dtype) if key == first else value for key, value in kwargs.items()})


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
