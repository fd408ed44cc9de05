"""Cross entropy without the logits of all positions: only trained positions meet the head, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.memory import products

IGNORED = -100
AUTO_LOGIT_BYTES = 32 * 2**20
CPU_MULTIPLE = 32


def auto_chunk_tokens(vocabulary: int) -> int:
    """Trained tokens whose fp32 logits take at most 32 MiB, at least 16.

    At a vocabulary of 49,152 this is 170 tokens: enough rows for the product with the head to run at full speed.
    """
    return max(16, AUTO_LOGIT_BYTES // (vocabulary * 4))


def chunked_loss(
    hidden: Tensor,
    head: nn.Module | Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    chunk_tokens: int = 256,
    softcap: float | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Sum of next-token cross entropy over the trained positions, without ever holding the full logits.

    The gradients of each chunk are taken while its logits are there, so the head's products run once: nothing of
    size V is kept for backward and nothing is recomputed.

    Memory: `chunk_tokens * V * 8` bytes of fp32 logits and their gradient, plus the head's own output and, where the
    head is trained, one gradient of its parameters; not `B * S * V * 4`. T is known to the caller, so is the peak.
    Time: the plain loss' products, without those of positions that are not trained.
    Exactness: equal to the plain loss up to summation order, for any `chunk_tokens`. Log-sum-exp and all sums are in
    fp32. No trained position gives 0, which stays in the graph.

    Args:
        hidden: last hidden states, shape (B, S, H), any float type.
        head: output layer, maps (T, H) to logits (T, V): a linear with or without bias, tied or not, frozen or
            trained, with or without LoRA. Called under the autocast state that is active now.
        labels: shape (B, S), already shifted: `labels[b, s]` is the token after position s; -100 is not trained.
        weights: factor of each position's loss, shape (B, S), or None for 1.
        chunk_tokens: trained tokens per chunk, at least 1.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2), or None.
        positions: which of the B * S positions have a label, shape (T,), int64; None to look. Known beforehand, a
            device need not wait for the count, and the step can be traced without numbers.

    Returns:
        Scalar float32, a sum. The loop divides once, by the trained tokens of the step.

    Raises:
        ModelError: `hidden` and `labels` disagree on shape, or a label is outside the vocabulary.

    Source: Wijmans et al. 2024, arXiv:2411.09009 and Liger Kernel (Hsu et al. 2024, arXiv:2410.10989) for the idea of
    taking the gradient in forward; here in plain PyTorch, for any head module.
    """
    if hidden.shape[:-1] != labels.shape:
        what = f"hidden states have shape {tuple(hidden.shape)}, labels {tuple(labels.shape)}"
        raise ModelError(Problem("chunked_loss", what, "Both need the same rows and positions"))
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, at least 1 is needed")
    if positions is None:
        positions = (labels.flatten() != IGNORED).nonzero().squeeze(-1)
    picked = hidden.flatten(0, -2).index_select(0, positions)  # (T, H)
    targets = labels.flatten().index_select(0, positions)
    factors = None if weights is None else weights.flatten().index_select(0, positions).float()
    parameters = [p for p in head.parameters() if p.requires_grad] if isinstance(head, nn.Module) else []
    loss: Tensor = _ChunkedLoss.apply(picked, targets, factors, head, chunk_tokens, softcap, *parameters)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        factors: Tensor | None,
        head: Callable[[Tensor], Tensor],
        chunk_tokens: int,
        softcap: float | None,
        *parameters: Tensor,
    ) -> Tensor:
        wants = [ctx.needs_input_grad[0], *ctx.needs_input_grad[6:]]
        grad_hidden = torch.zeros_like(hidden) if wants[0] else None
        grad_parameters = [torch.zeros_like(p, dtype=torch.float32) for p in parameters] if any(wants) else []
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        frozen = _frozen_weight(head, hidden)
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            chunk_factors = None if factors is None else factors[part]
            if frozen is not None:
                raw = _frozen_logits(hidden[part], frozen)
                loss, grad_raw = _loss_and_gradient(raw, targets[part], chunk_factors, softcap, wants[0], ours=True)
                total += loss
                del raw
                if grad_hidden is not None and grad_raw is not None:
                    grad_hidden[part] = products.times(grad_raw, frozen.weight, products.compute_dtype(hidden))
                continue
            chunk = hidden[part].detach().requires_grad_(wants[0])
            with torch.set_grad_enabled(any(wants)):
                raw = _apply_head(head, chunk)
            loss, grad_raw = _loss_and_gradient(raw.detach(), targets[part], chunk_factors, softcap, any(wants))
            total += loss
            if grad_raw is None:
                continue
            inputs = [chunk, *parameters] if wants[0] else list(parameters)
            grads = list(torch.autograd.grad(raw, inputs, grad_raw, allow_unused=True))
            if grad_hidden is not None:
                grad_hidden[part] = grads.pop(0)
            for grad_parameter, grad in zip(grad_parameters, grads, strict=True):
                if grad is not None:
                    grad_parameter += grad
        ctx.dtypes = [p.dtype for p in parameters]
        ctx.has_hidden = grad_hidden is not None
        ctx.save_for_backward(*([grad_hidden] if grad_hidden is not None else []), *grad_parameters)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        saved = list(ctx.saved_tensors)
        # the factor is exact in fp32 for any sum of micro-batches, and small: one number
        grad_hidden = saved.pop(0).mul(grad) if ctx.has_hidden else None
        grads = [(one * grad).to(dtype) for one, dtype in zip(saved, ctx.dtypes, strict=True)]
        return grad_hidden, None, None, None, None, None, *grads


def _frozen_weight(head: Callable[[Tensor], Tensor], hidden: Tensor) -> nn.Linear | None:
    """The head itself where it is a plain frozen linear layer, whose products are made here without a graph.

    Not where something stands around its forward, or where its type is not the one that the product would be in.
    """
    if type(head) is not nn.Linear or "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks:
        return None
    if any(parameter.requires_grad for parameter in head.parameters()):
        return None
    autocast = torch.is_autocast_enabled(hidden.device.type)
    return head if autocast or hidden.dtype == head.weight.dtype else None


def _frozen_logits(chunk: Tensor, head: nn.Linear) -> Tensor:
    """Logits of a chunk, (T, V), outside the graph. Rows are filled up as in `_apply_head`, for the same reason."""
    dtype, rows = products.compute_dtype(chunk), chunk.shape[0]
    narrow = products.product_dtype(dtype, chunk.device) in products.HALVES
    filler = -rows % CPU_MULTIPLE if chunk.device.type == "cpu" and narrow else 0
    raw = products.times_transposed(nn.functional.pad(chunk.to(dtype), (0, 0, 0, filler)), head.weight)[:rows]
    return raw if head.bias is None else raw.add_(head.bias)


def _apply_head(head: Callable[[Tensor], Tensor], chunk: Tensor) -> Tensor:
    """Logits of a chunk. On CPU in 16 bits its rows are filled up to a multiple of 32, and the filler's logits dropped.

    For 16-bit products, torch's oneDNN keeps about 0.6 MB for each shape that it has seen (torch 2.13): the last chunk
    of a row would be another shape each time.
    """
    short = chunk.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cpu")
    filler = -chunk.shape[0] % CPU_MULTIPLE if chunk.device.type == "cpu" and short else 0
    return head(nn.functional.pad(chunk, (0, 0, 0, filler)))[: chunk.shape[0]] if filler else head(chunk)


def _loss_and_gradient(
    raw: Tensor,
    targets: Tensor,
    factors: Tensor | None,
    softcap: float | None,
    wants_gradient: bool,
    ours: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of one chunk and its gradient with respect to `raw`, in the type of `raw`; raw is (T, V).

    `ours`: nobody else reads `raw`, so the gradient may take its place.
    """
    vocabulary = raw.shape[-1]
    known = targets.numel() and not isinstance(targets, FakeTensor)  # a traced step has no numbers
    if known and (int(targets.max()) >= vocabulary or int(targets.min()) < 0):
        what = f"a label is {int(targets.max())}, the head knows {vocabulary} tokens"
        raise ModelError(Problem("chunked_loss", what, "The tokenizer does not belong to this model"))
    logits = raw.float()
    slope = None
    if softcap is not None:
        squashed = torch.tanh(logits / softcap)
        slope = 1 - squashed * squashed
        logits = squashed.mul_(softcap)
    elif logits is raw and not ours:
        logits = raw.clone()  # fp32 head: the in-place steps below must not reach into the graph
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    losses = (normalizer - logits.gather(-1, targets[:, None])).squeeze(-1)
    loss = losses.sum() if factors is None else (losses * factors).sum()
    if not wants_gradient:
        return loss, None
    gradient = logits.sub_(normalizer).exp_()
    gradient.scatter_add_(-1, targets[:, None], torch.full_like(targets, -1, dtype=torch.float32)[:, None])
    if factors is not None:
        gradient *= factors[:, None]
    if slope is not None:
        gradient *= slope
    return loss, gradient.to(raw.dtype)
