"""What a recipe's training step will take, from the configuration of its model alone: its own step is traced."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from lowmem_ft.data.batches import IGNORED, Row
from lowmem_ft.memory.blocks import find_stacks
from lowmem_ft.memory.estimate import Blocks, Estimate, Knobs, Traced, shortest_period, trace_step, traced_counts
from lowmem_ft.memory.products import traced_as
from lowmem_ft.memory.recompute import plan_recompute
from lowmem_ft.model.facts import make_empty_model
from lowmem_ft.model.fake import make_fake, quantize_empty
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import DTYPES
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.causal import CausalLoss, fill_up
from lowmem_ft.training.optim import state_bytes
from lowmem_ft.training.reporter import Reporter
from lowmem_ft.training.setup import PreparedModel, load_prepared, predict_prepared, prepare, row_multiple

CUDA_CONTEXT_BYTES = 600 * 2**20
"""Of a process on the device before any tensor: kernels and libraries. Between 300 and 700 MB by device and driver."""

CUDA_SHARE = 0.04
"""What torch's caching allocator adds to the tensors of a step, in blocks that are partly empty."""


class Foresight:
    """Estimates for one recipe; traces are kept, so asking again costs nothing.

    Args:
        recipe: of its settings those that matter to memory are read.
        found: where the model's configuration is.
        kind: `cpu` or `cuda`, where it will run; this machine need not have one.
        longest: tokens of the longest example.
        typical: tokens of an example in the middle, for how examples fill a row.
        trained_share: of the tokens of a row that have a label, at most.

    Raises:
        ModelError: the configuration cannot be read, or the model cannot be prepared.
    """

    def __init__(
        self,
        recipe: Recipe,
        found: FoundModel,
        kind: str,
        *,
        longest: int,
        typical: int | None = None,
        trained_share: float = 1.0,
    ) -> None:
        self.recipe = recipe
        self.found = found
        self.kind = kind
        self.longest = longest
        self.typical = typical or longest
        self.trained_share = trained_share
        self._blocks: dict[tuple[Any, ...], Blocks] = {}

    @cached_property
    def prepared(self) -> PreparedModel:
        """The whole model on the meta device, prepared as far as bytes go."""
        return predict_prepared(self.recipe, self.found)

    @cached_property
    def count(self) -> int:
        """Blocks of the model."""
        return plan_recompute(self.prepared.model.get_base_model(), "block").of

    @cached_property
    def period(self) -> int:
        """After how many blocks their kinds repeat; all of them where the model's blocks are not one stack."""
        settings = self.recipe.model
        config = AutoConfig.from_pretrained(
            self.found.path, revision=self.found.revision, trust_remote_code=settings.trust_remote_code
        ).get_text_config()
        stacks = [s for s in find_stacks(self.prepared.model.get_base_model()).values() if len(s) == self.count]
        if len(stacks) != 1 or getattr(config, "num_hidden_layers", None) != self.count:
            return self.count
        kinds = getattr(config, "layer_types", None) or [None] * self.count
        shapes = [tuple((n, p.shape, p.dtype) for n, p in block.named_parameters()) for block in stacks[0]]
        return shortest_period([(str(kind), shape) for kind, shape in zip(kinds, shapes, strict=True)])

    def estimate(self, knobs: Knobs) -> Estimate:
        """What the step takes with these knobs."""
        tokens = max(knobs.micro_batch_tokens, self.longest)
        chosen = plan_recompute(self.prepared.model.get_base_model(), knobs.recompute).chosen
        traced = self.blocks(replace(knobs, micro_batch_tokens=tokens)).with_recompute(chosen)
        trained = self.prepared.adapters.trainable_bytes
        state = state_bytes(self.recipe.train.optimizer, self.prepared.adapters.trainable_parameters)
        by_part, casts = self.prepared.bytes, self.prepared.preparation.added_bytes
        peak = max(traced.forward, traced.backward) + state
        return Estimate(
            knobs=knobs,
            parts={
                "quantized weights": by_part.quantized,
                "embeddings and head": by_part.embeddings + by_part.head,
                "other weights": by_part.unquantized_linears + by_part.rest,
                "casts to fp32": casts,
                "adapters": trained,
                "gradients": trained,
                "optimizer": state,
                "activations": round(peak - state - traced.held),
            },
            tensor_bytes=round(peak),
            process_bytes=self.process_bytes(round(peak)),
            recomputed=len(chosen),
            blocks=self.count,
            row_tokens=tokens,
            step=traced,
        )

    def process_bytes(self, tensors: int) -> int:
        """What the process takes beside its tensors, in the end."""
        if self.kind == "cuda":
            return CUDA_CONTEXT_BYTES + round(CUDA_SHARE * tensors)
        return 0

    def blocks(self, knobs: Knobs) -> Blocks:
        """The step of the whole model with no block and with every block recomputing, at these rows and chunks."""
        key = (knobs.micro_batch_tokens, knobs.loss_chunk_tokens, knobs.mlp_slice_tokens)
        if key not in self._blocks:
            few, more = traced_counts(self.count, self.period)
            keep = self._trace(few, "none", knobs), self._trace(more, "none", knobs)
            again = self._trace(few, "block", knobs), self._trace(more, "block", knobs)
            self._blocks[key] = Blocks.from_traces(keep, again, self.count)
        return self._blocks[key]

    def _trace(self, layers: int, recompute: str, knobs: Knobs) -> Traced:
        settings = self.recipe.model
        recipe = with_knobs(self.recipe, replace(knobs, recompute=recompute))
        count = None if layers == self.count else layers
        with traced_as(self.kind):
            model = make_empty_model(self.found, settings.dtype, settings.trust_remote_code, layers=count)
            quantize_empty(model, settings.quantization, settings.double_quant, DTYPES[settings.dtype])
            prepared = prepare(recipe, model, self.prepared.bytes)
            row = self.filled_row(recipe, prepared, knobs.micro_batch_tokens)
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            make_fake(prepared.model, mode)
            with mode:
                return run_step(recipe, prepared, _on(row, mode), layers)

    def measure(self, knobs: Knobs, reporter: Reporter) -> int:
        """Peak bytes of the tensors of the same step with its weights and numbers, on this machine's CPU.

        To hold `estimate` against; it takes the memory that the step takes.
        """
        tokens = max(knobs.micro_batch_tokens, self.longest)
        recipe = with_knobs(self.recipe, replace(knobs, micro_batch_tokens=tokens))
        prepared = load_prepared(recipe, self.found, torch.device("cpu"), reporter)
        row = self.filled_row(recipe, prepared, tokens)
        measured = run_step(recipe, prepared, row, self.count)
        state = state_bytes(recipe.train.optimizer, prepared.adapters.trainable_parameters)
        return round(max(measured.forward, measured.backward)) + state

    def filled_row(self, recipe: Recipe, prepared: PreparedModel, tokens: int) -> Row:
        """The row, filled up as the run would."""
        return fill_up(self.row(tokens), row_multiple(recipe, torch.device(self.kind)), prepared.attends_apart)

    def row(self, tokens: int) -> Row:
        """A row of `tokens` tokens: the longest example, then typical ones; labels at the end of each."""
        lengths = self.lengths(tokens)
        labels = torch.full((1, tokens), IGNORED)
        start = 0
        for length in lengths:
            trained = min(length - 1, round(self.trained_share * length))
            labels[0, start + length - 1 - trained : start + length - 1] = 0
            start += length
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        where = (labels.flatten() != IGNORED).nonzero().squeeze(-1)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        return Row(ids, positions, labels, None, lengths, len(where), float(len(where)), (), where)

    def lengths(self, tokens: int) -> tuple[int, ...]:
        """Of the examples in a row of `tokens` tokens."""
        if self.prepared.not_packed is not None or self.longest >= tokens:
            return (tokens,)
        rest = tokens - self.longest
        typical = min(self.typical, self.longest)
        return (self.longest, *([typical] * (rest // typical)), *([rest % typical] if rest % typical else []))


def with_knobs(recipe: Recipe, knobs: Knobs) -> Recipe:
    """The recipe with these knobs instead of its own."""
    memory = {
        "recompute": knobs.recompute if isinstance(knobs.recompute, str) else list(knobs.recompute),
        "mlp_slice_tokens": knobs.mlp_slice_tokens,
        "loss_chunk_tokens": knobs.loss_chunk_tokens or "auto",
    }
    return recipe.model_copy(
        update={
            "memory": recipe.memory.model_copy(update=memory),
            "train": recipe.train.model_copy(update={"micro_batch_tokens": knobs.micro_batch_tokens}),
        }
    )


def run_step(recipe: Recipe, prepared: PreparedModel, row: Row, blocks: int) -> Traced:
    """Forward and backward of one row as the run does them, counted."""
    chunk = recipe.memory.loss_chunk_tokens
    loss = CausalLoss(prepared.model, None if chunk == "auto" else chunk, prepared.attends_apart).train()
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.train.precision)
    autocast = torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None)
    return trace_step(loss, [row], blocks=blocks, loss=autocast(loss))


def _on(row: Row, mode: FakeTensorMode) -> Row:
    moved: dict[str, Any] = {
        name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in vars(row).items()
    }
    return Row(**moved)
