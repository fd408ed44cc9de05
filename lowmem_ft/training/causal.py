"""A causal language model as the loop sees it: rows in, summed loss out, never the full logits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_ft.data.batches import IGNORED, Row
from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.memory.attention import packed_examples
from lowmem_ft.memory.loss import auto_chunk_tokens, chunked_loss

AGREEMENT = 0.02
"""Largest relative difference between our loss and the model's own in `check_head`, from the same hidden states.

16-bit logits differ by up to 0.5 % with summation order; a head that scales or shifts its logits in a way unknown here,
by tens of per cent.
"""


class CausalLoss(nn.Module):
    """Summed loss of a row, through the model's own backbone and head.

    Args:
        model: a causal language model, with or without peft around it.
        chunk_tokens: trained tokens whose logits are held at once; None for what 32 MiB hold.
        packed: whether each example of a row is attended alone; `apply_packed_attention` was called for it.
        row_multiple: rows are filled up to a multiple of this many tokens, behind their last example and untrained, so
            that few shapes occur. Changes memory and speed only; see `fill_up`.

    Raises:
        ModelError: backbone or head cannot be found.
    """

    def __init__(
        self, model: nn.Module, chunk_tokens: int | None = None, packed: bool = True, row_multiple: int = 1
    ) -> None:
        super().__init__()
        self.model = model
        self.packed = packed
        self.row_multiple = row_multiple
        base = _base_of(model)
        self.chunk_tokens = chunk_tokens or auto_chunk_tokens(base.config.get_text_config().vocab_size)
        self.softcap: float | None = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
        _split(base)

    def forward(self, row: Row) -> Tensor:
        """Summed loss of the trained tokens of `row`, scalar fp32; see `chunked_loss`."""
        backbone, head = _split(_base_of(self.model))
        row = fill_up(row, self.row_multiple, self.packed)
        packing = packed_examples(row.lengths) if self.packed else nullcontext()
        with packing:
            hidden = backbone(input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False).last_hidden_state
        return chunked_loss(
            hidden,
            head,
            row.labels,
            weights=row.weights,
            chunk_tokens=self.chunk_tokens,
            softcap=self.softcap,
            positions=row.trained,
        )

    @torch.no_grad()
    def check_head(self) -> None:
        """Compare with the loss from the model's own logits on sixteen tokens. Call it under the autocast of the run.

        Raises:
            ModelError: they differ, so this model does something to its logits that is not known here.
        """
        base = _base_of(self.model)
        backbone, head = _split(base)
        device = next(base.get_input_embeddings().parameters()).device
        ids = torch.arange(16, device=device)[None] % base.config.get_text_config().vocab_size
        positions = torch.arange(16, device=device)[None]
        labels = torch.cat([ids[:, 1:], ids.new_full((1, 1), IGNORED)], dim=1)
        seen: list[Tensor] = []
        was_training = self.training
        self.eval()
        hook = backbone.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
        try:
            logits = base(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        finally:
            hook.remove()
            self.train(was_training)
        # the same hidden states for both: on ids that make no text a 16-bit model's own vary by 10 % with rounding
        expected = nn.functional.cross_entropy(logits[0, :-1], labels[0, :-1], reduction="sum") / 15
        ours = chunked_loss(seen[0], head, labels, chunk_tokens=self.chunk_tokens, softcap=self.softcap) / 15
        if not abs(float(expected) - float(ours)) <= AGREEMENT * float(expected):
            what = f"its own loss is {float(expected):.4f} a token, ours {float(ours):.4f}: it changes its logits"
            raise ModelError(Problem(type(base).__name__, what, "This architecture cannot be trained here yet"))


def fill_up(row: Row, multiple: int, packed: bool) -> Row:
    """A row whose length is a multiple of `multiple`, with filler behind the last example. Nothing attends to it.

    For each shape of a 16-bit product on CPU, torch's oneDNN keeps 0.3 to 1.4 MB (torch 2.13); a row of another length
    is another shape of every linear layer, and memory grew by 26 MB a step on a 135 M model. With 16 lengths of rows it
    stops growing once each has occurred.

    Args:
        row: at least one example.
        multiple: 1 leaves it as it is.
        packed: the filler becomes an example of its own; else it goes on where the only example ends.
    """
    filler = -sum(row.lengths) % multiple
    if not filler:
        return row
    ids = nn.functional.pad(row.input_ids, (0, filler), value=int(row.input_ids[0, 0]))
    start = 0 if packed else int(row.position_ids[0, -1]) + 1
    positions = torch.arange(start, start + filler, device=ids.device)[None]
    return replace(
        row,
        input_ids=ids,
        position_ids=torch.cat([row.position_ids, positions], dim=1),
        labels=nn.functional.pad(row.labels, (0, filler), value=IGNORED),
        weights=None if row.weights is None else nn.functional.pad(row.weights, (0, filler)),
        lengths=(*row.lengths, filler) if packed else (sum(row.lengths) + filler,),
    )


def _base_of(model: nn.Module) -> PreTrainedModel:
    get = getattr(model, "get_base_model", None)
    base: Any = get() if callable(get) else model
    return base


def _split(base: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Backbone (ids to hidden states) and head (hidden states to logits)."""
    backbone = getattr(base, base.base_model_prefix, None) if base.base_model_prefix else None
    head = base.get_output_embeddings()
    if backbone is None or backbone is base or head is None:
        what = "has no separate backbone and output head"
        raise ModelError(Problem(type(base).__name__, what, "Name a model that transformers loads as a causal LM"))
    return backbone, head
