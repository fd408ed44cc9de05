"""Attention for rows that hold several examples end to end: each example attends only to itself.

transformers would build a mask of all positions times all positions for such a row and compute every product under
it. Here each example is attended alone, without a mask, and on CPU by the faster of two kernels for its length.

    apply_packed_attention(model)
    with packed_examples([120, 87, 203]):
        model(input_ids=row, position_ids=restarting, use_cache=False)      # row: shape (1, 410)

Outside `packed_examples` the model attends as with transformers' `sdpa`: padding, caches and generation work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from lowmem_ft.memory.plain_attention import plain_attention
from lowmem_ft.memory.products import device_kind, in_given_types, widen

NAME = "lowmem_packed"

PLAIN_MOST_TOKENS = 384
"""Longest example for which the plain product is used on CPU.

Forward and backward of 9 query and 3 key heads of 64 in bf16 on 2 cores (AMD EPYC with AVX512-BF16, torch 2.13,
2026-11-30), fused kernel / plain product: 1.9 / 0.5 ms at 105 tokens, 3.9 / 4.1 at 256, 7.7 / 5.3 at 384,
29.6 / 61.7 at 1,024. The probabilities it keeps are `heads * L * L` elements, small beside a block's other activations.
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

    @property
    def parts(self) -> list[tuple[int, Tensor | None]]:
        """Length and mask of each example."""
        return list(zip(self.lengths, self.masks, strict=True))


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
    return _attend_row(query[0], key[0], value[0], attention_mask, scale, dropout).unsqueeze(0), None


def _common_dtype(*tensors: Tensor) -> list[Tensor]:
    """Under autocast its type, as the fused kernel would take; else the widest of the three."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
    return [tensor.to(dtype) for tensor in tensors]


def _attend_row(query: Tensor, key: Tensor, value: Tensor, mask: ExampleMask, scale: float, dropout: float) -> Tensor:
    """Each example by the faster kernel: query (heads, S, D), key and value (key heads, S, D) to (S, heads, D)."""
    on_cpu = device_kind(query.device) == "cpu" and dropout == 0.0
    plain = [on_cpu and length <= PLAIN_MOST_TOKENS and own is None for length, own in mask.parts]
    if all(plain):
        return plain_attention(query, key, value, mask.lengths, scale)
    outputs: list[Tensor] = []
    start = 0
    for (length, own), is_plain in zip(mask.parts, plain, strict=True):
        q, k, v = (tensor[:, start : start + length] for tensor in (query, key, value))
        start += length
        if is_plain:
            outputs.append(plain_attention(q, k, v, (length,), scale))
        else:
            outputs.append(_fused_attention(widen(q), widen(k), widen(v), own, scale, dropout).to(query.dtype))
    return torch.cat(outputs, dim=0)


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
