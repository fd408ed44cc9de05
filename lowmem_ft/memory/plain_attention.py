"""Causal attention of a row of short examples by plain products on CPU: the whole row is one operation.

Faster there than the fused kernel while an example is short; `attention` says up to where, and does the choosing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.memory.products import HALVES, in_given_types, product_dtype, widen

MULTIPLE = 32
"""Lengths are filled up to a multiple of this for 16-bit products, so that few shapes occur.

For these on CPU, torch's oneDNN keeps up to 1.4 MB for each shape that it has seen (torch 2.13).
"""


def plain_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attend each example of a row to itself, each position to those up to it.

    Exactness: equal to the fused kernel up to summation order; the softmax is computed in fp32 whatever the type, and
    the probabilities are rounded to the type of the operands, as eager attention does.
    Memory: keeps query, key and value, and `heads * L * L` probabilities an example, L filled up to `MULTIPLE`.

    Args:
        query: shape (heads, S, D).
        key: shape (key heads, S, D); key heads divide heads.
        value: shape (key heads, S, D).
        lengths: tokens of each example; their sum is S.
        scale: factor on the scores.

    Returns:
        Shape (S, heads, D).
    """
    out: Tensor = _PlainAttention.apply(query, key, value, tuple(lengths), scale)
    return out


class _PlainAttention(torch.autograd.Function):
    """The query heads of one key head stand in one matrix, example by example.

    An example is filled up with what follows it in the row: later positions are never attended by earlier ones, so the
    results at the filler are left out, and their gradients are zero.
    """

    @staticmethod
    @in_given_types
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        multiple = MULTIPLE if product_dtype(query.dtype, query.device) in HALVES else 1
        heads, length, width = query.shape
        groups = heads // key.shape[0]
        out = query.new_empty(length, heads, width)
        filler = (0, 0, 0, -lengths[-1] % multiple)
        query, key, value = (nn.functional.pad(tensor, filler) for tensor in (query, key, value))
        kept: list[Tensor] = []
        for start, real, filled in _examples(lengths, multiple):
            part = slice(start, start + filled)
            grouped = widen(query[:, part].reshape(-1, groups * filled, width))
            future = grouped.new_full((filled, filled), -math.inf).triu_(1).repeat(groups, 1)
            # nothing is changed in place that a product gave: selective recompute may keep it
            scores = torch.baddbmm(future, grouped, widen(key[:, part]).transpose(1, 2), alpha=scale)
            weights = scores.softmax(-1).to(query.dtype)
            kept.append(weights)
            mixed = torch.bmm(widen(weights), widen(value[:, part])).view(-1, groups, filled, width)
            _by_position(out, start, real, groups).copy_(mixed[:, :, :real])
        ctx.save_for_backward(query, key, value, *kept)
        ctx.lengths, ctx.scale, ctx.multiple = lengths, scale, multiple
        return out

    @staticmethod
    @in_given_types
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        (grad,) = grad_outputs
        length, heads, width = grad.shape
        groups = heads // key.shape[0]
        wide = product_dtype(query.dtype, query.device)
        grads = [tensor.new_empty(tensor.shape[0], length, width) for tensor in (query, key, value)]
        for weights, (start, real, filled) in zip(kept, _examples(ctx.lengths, ctx.multiple), strict=True):
            part, own = slice(start, start + filled), slice(start, start + real)
            grad_mixed = grad.new_zeros(heads // groups, groups, filled, width, dtype=wide)
            grad_mixed[:, :, :real].copy_(_by_position(grad, start, real, groups))
            grad_mixed = grad_mixed.view(-1, groups * filled, width)
            weights = weights.to(wide)
            grad_value = torch.bmm(weights.transpose(1, 2), grad_mixed)
            grad_weights = torch.bmm(grad_mixed, value[:, part].to(wide).transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, wide)
            grad_grouped = torch.bmm(grad_scores, key[:, part].to(wide)).mul_(ctx.scale)
            grouped = query[:, part].reshape(-1, groups * filled, width).to(wide)
            grad_key = torch.bmm(grad_scores.transpose(1, 2), grouped).mul_(ctx.scale)
            grads[0][:, own] = grad_grouped.view(heads, filled, width)[:, :real]
            grads[1][:, own] = grad_key[:, :real]
            grads[2][:, own] = grad_value[:, :real]
        return *grads, None, None


def _examples(lengths: Sequence[int], multiple: int) -> Iterator[tuple[int, int, int]]:
    """Of each example: where it starts, its tokens, and its tokens filled up."""
    start = 0
    for length in lengths:
        yield start, length, length + -length % multiple
        start += length


def _by_position(rows: Tensor, start: int, length: int, groups: int) -> Tensor:
    """An example of `rows` (S, heads, D) as (key heads, groups, L, D): a view."""
    return rows[start : start + length].view(length, -1, groups, rows.shape[-1]).permute(1, 2, 0, 3)
