"""Attention for rows that hold several examples end to end: each example attends only to itself.

transformers would build a mask of all positions times all positions for such a row and compute every product under
it. Here each example is attended alone, without a mask, and on CPU by the faster of two kernels for its length.

    apply_packed_attention(model)
    with packed_examples([120, 87, 203]):
        model(input_ids=row, position_ids=restarting, use_cache=False)      # row: shape (1, 410)

Outside `packed_examples` the model attends as with transformers' `sdpa`: padding, caches and generation work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.memory.products import HALVES, in_given_types, product_dtype, widen

NAME = "lowmem_packed"

PLAIN_MOST_TOKENS = 384
"""Longest example for which the plain product is used on CPU.

Forward and backward of 9 query and 3 key heads of 64 in bf16 on 2 cores (AMD EPYC with AVX512-BF16, torch 2.13,
2026-11-30), fused kernel / plain product: 1.9 / 0.5 ms at 105 tokens, 3.9 / 4.1 at 256, 7.7 / 5.3 at 384,
29.6 / 61.7 at 1,024. The probabilities it keeps are `heads * L * L` elements, small beside a block's other activations.
"""

PLAIN_MULTIPLE = 32
"""Lengths are filled up to a multiple of this for the plain product, so that few shapes occur.

For 16-bit products on CPU, torch's oneDNN keeps up to 1.4 MB for each shape it has seen (torch 2.13).
"""

_lengths: ContextVar[tuple[int, ...] | None] = ContextVar("lowmem_packed_lengths", default=None)


@dataclass(frozen=True)
class ExampleMask:
    """What the models pass to each layer in place of a mask.

    Attributes:
        lengths: tokens of each example of the row, in order.
        masks: for each example None (causal), or a mask (1, 1, L, L), True where attended, e.g. for a sliding window.
    """

    lengths: tuple[int, ...]
    masks: tuple[Tensor | None, ...]


@contextmanager
def packed_examples(lengths: Sequence[int]) -> Iterator[None]:
    """Within this context, a forward pass sees one row made of examples of these lengths, in tokens."""
    token = _lengths.set(tuple(lengths))
    try:
        yield
    finally:
        _lengths.reset(token)


def apply_packed_attention(model: PreTrainedModel) -> str:
    """Make `model` attend within examples of a packed row. Returns the name of the attention it had before.

    Exactness: equal to attending each example alone, up to summation order (bit for bit where the same kernel is used).
    Memory: no mask over the row; without recompute, `heads * L * L` elements a layer for examples up to
    `PLAIN_MOST_TOKENS` on CPU.

    Raises:
        ModelError: the architecture's attention cannot be exchanged, or needs what this one does not compute.

    Source: `AttentionInterface` and `AttentionMaskInterface` of transformers.
    """
    reason = why_not_packed(model)
    if reason is not None:
        raise ModelError(Problem(type(model).__name__, reason, "Give each example a row of its own"))
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _example_mask)
    before = str(model.config._attn_implementation)
    model.set_attn_implementation(NAME)
    return before


def why_not_packed(model: nn.Module) -> str | None:
    """Why several examples cannot share a row of this model, or None where they can."""
    if not isinstance(model, PreTrainedModel):
        return "the model is not one of transformers, so its attention is not known"
    if not model._supports_attention_backend or not model._supports_sdpa:
        return "the model does not let its attention function be chosen"
    for config in _configs(model.config):
        if getattr(config, "attn_logit_softcapping", None):
            return "the model caps its attention scores, which the fused kernel cannot"
        if getattr(config, "is_encoder_decoder", False):
            return "the model is an encoder-decoder"
        kinds = set(getattr(config, "layer_types", None) or ())
        if mixing := sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"}):
            return f"the model has layers that carry state over the row: {', '.join(mixing)}"
        if str(getattr(config, "model_type", "")).startswith("gpt_oss"):
            return "the model adds attention sinks, which the fused kernel cannot"
    return None


def _configs(config: Any) -> list[Any]:
    return [config, *(getattr(config, name) for name in (config.sub_configs or {}) if getattr(config, name, None))]


def _example_mask(*args: Any, **kwargs: Any) -> ExampleMask | Tensor | None:
    """The mask of a row of examples, or transformers' own where `packed_examples` is not active.

    Called by the model once a forward pass and kind of layer, so it is made once and not again in recompute.
    """
    lengths = _lengths.get()
    if lengths is None:
        return sdpa_mask(*args, **kwargs)
    if kwargs["q_length"] != sum(lengths):
        raise ValueError(f"packed_examples says {sum(lengths)} tokens, the row has {kwargs['q_length']}")
    window = kwargs.get("local_size")
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    masks: list[Tensor | None] = []
    for start, length in zip(starts, lengths, strict=True):
        if not kwargs.get("use_vmap") and (window is None or length <= window):
            masks.append(None)
            continue
        part = {"q_length": length, "kv_length": length, "q_offset": start, "kv_offset": start}
        masks.append(sdpa_mask(**{**kwargs, **part, "attention_mask": None, "allow_is_causal_skip": False}))
    return ExampleMask(lengths, tuple(masks))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ExampleMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function.

    Args:
        module: the attention module of the layer.
        query: shape (1, heads, S, D).
        key: shape (1, key heads, S, D); key heads divide heads.
        value: shape (1, key heads, S, D).
        attention_mask: an `ExampleMask`, or whatever `sdpa` takes.
        dropout: probability on the attention weights.
        scaling: factor on the scores; None is 1/sqrt(D).
        **kwargs: as transformers passes them.

    Returns:
        Attended values, shape (1, S, heads, D), and None for the weights.
    """
    if not isinstance(attention_mask, ExampleMask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for unknown in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(unknown) is not None:
            problem = Problem(type(module).__name__, f"uses {unknown}, which packed rows cannot", "Turn packing off")
            raise ModelError(problem)
    query, key, value = _common_dtype(query, key, value)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    outputs: list[Tensor] = []
    start = 0
    for length, mask in zip(attention_mask.lengths, attention_mask.masks, strict=True):
        part = slice(start, start + length)
        start += length
        outputs.append(_attend(query[0, :, part], key[0, :, part], value[0, :, part], mask, scale, dropout))
    return torch.cat(outputs, dim=0).unsqueeze(0), None


def _common_dtype(*tensors: Tensor) -> list[Tensor]:
    """Under autocast its type, as the fused kernel would take; else the widest of the three."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
    return [tensor.to(dtype) for tensor in tensors]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Attention of one example: query (heads, L, D), key and value (key heads, L, D) to (L, heads, D)."""
    short = query.shape[1] <= PLAIN_MOST_TOKENS
    if query.device.type == "cpu" and short and mask is None and dropout == 0.0:
        length = query.shape[1]
        # later positions are never attended, so filling up changes nothing before them
        narrow = product_dtype(query.dtype, query.device) in HALVES
        filler = (0, 0, 0, -length % PLAIN_MULTIPLE if narrow else 0)
        query, key, value = (nn.functional.pad(tensor, filler) for tensor in (query, key, value))
        return _plain_attention(query, key, value, scale)[:, :length].transpose(0, 1)
    return _fused_attention(widen(query), widen(key), widen(value), mask, scale, dropout).to(query.dtype)


@in_given_types
def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Attention of one example by torch's kernel, in the type of the operands."""
    groups = query.shape[0] // key.shape[0]
    out = nn.functional.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.repeat_interleave(groups, dim=0).unsqueeze(0),
        value.repeat_interleave(groups, dim=0).unsqueeze(0),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
    )
    return out[0].transpose(0, 1)


class _PlainAttention(torch.autograd.Function):
    """Causal attention by plain products, the query heads of one key head in one matrix; softmax in fp32."""

    @staticmethod
    @in_given_types
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, length, width = query.shape
        key_heads = key.shape[0]
        grouped = query.reshape(key_heads, -1, width)  # (key heads, groups * L, D)
        wide = widen(grouped)
        exact = wide.dtype.itemsize > 2  # the factor goes to the smaller operand where that has the digits for it
        future = wide.new_full((length, length), -math.inf).triu_(1).repeat(heads // key_heads, 1)
        scores = torch.baddbmm(future, wide * scale if exact else wide, widen(key).transpose(1, 2))
        # nothing is changed in place that a product gave: selective recompute may keep it
        weights = (scores if exact else scores.float().mul_(scale)).softmax(-1).to(query.dtype)
        ctx.save_for_backward(grouped, key, value, weights)
        ctx.scale = scale
        return torch.bmm(widen(weights), widen(value)).to(query.dtype).view(heads, length, width)

    @staticmethod
    @in_given_types
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grouped, key, value, weights = ctx.saved_tensors
        (grad,) = grad_outputs
        dtype = grouped.dtype
        wide = product_dtype(dtype, grouped.device)
        grad_grouped = grad.reshape(grouped.shape).to(wide)
        weights = weights.to(wide)
        grad_value = torch.bmm(weights.transpose(1, 2), grad_grouped).to(dtype)
        grad_weights = torch.bmm(grad_grouped, value.to(wide).transpose(1, 2)).float()
        weights = weights.float()
        # d softmax: w * (g - sum(w * g))
        inner = (grad_weights * weights).sum(-1, keepdim=True)
        grad_scores = grad_weights.sub_(inner).mul_(weights).mul_(ctx.scale).to(wide)
        grad_query = torch.bmm(grad_scores, key.to(wide)).view(grad.shape).to(dtype)
        grad_key = torch.bmm(grad_scores.transpose(1, 2), grouped.to(wide)).to(dtype)
        return grad_query, grad_key, grad_value, None


_plain_attention: Callable[[Tensor, Tensor, Tensor, float], Tensor] = _PlainAttention.apply
