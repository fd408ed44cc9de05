"""The `train` and `memory` sections of a recipe: the update, and the knobs that do not change it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lowmem_ft.errors import nearest
from lowmem_ft.recipe.section import Auto, Fraction, Positive, Section, SettingError, Text

RECOMPUTE = ("auto", "none", "block", "every-2", "first-12")
"""The ways to recompute, one example of each form. `memory.recompute` is what does them."""

_COUNTED = re.compile(r"(every|first)-[1-9][0-9]*")

BlockNumbers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class TrainSection(Section):
    """The update."""

    epochs: Annotated[Annotated[float, Field(gt=0)] | None, Field(examples=[1])] = None
    """Passes over the training data; 1 if neither this nor `steps` is given."""

    steps: Annotated[Positive | None, Field(examples=[100])] = None
    """Number of optimizer steps, instead of `epochs`. Of the two only one may be given."""

    batch_size: Positive = 16
    """Examples in one optimizer step, over all processes. The loss is divided by their trained tokens, once."""

    micro_batch_tokens: Positive | Auto = "auto"
    """Most tokens of one forward pass; gradient accumulation follows from it. `auto`: `data.max_tokens`.

    One example longer than this is a micro-batch by itself. Changes memory and speed only."""

    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up: to zero along a cosine or a line, or constant."""

    warmup_ratio: Fraction = 0.03
    """Share of the steps over which the learning rate rises from zero."""

    shuffle: bool = True
    """Draw the examples in a new order each epoch, a function of seed and epoch."""

    optimizer: Literal["adamw"] = "adamw"
    """The optimizer."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay on the trained matrices."""

    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Automatic mixed precision: `bf16`, `fp16` with loss scaling (GPU only), or `fp32` (none)."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm, once a step; null turns it off."""

    max_seconds: Annotated[Annotated[float, Field(gt=0)] | None, Field(examples=[3600])] = None
    """Save and leave in time, so that the run ends within so many seconds of its start; exit code 9.

    For job limits: with `checkpoint: {resume: auto}` the same command goes on in the next job."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if self.epochs is not None and self.steps is not None:
            raise SettingError(
                ("train.steps", "train.epochs"),
                "epochs and steps are both given, and only one can end the run",
                "Remove one of them",
            )
        return self


class MemorySection(Section):
    """Memory knobs. None of them changes what is learned."""

    recompute: Literal["auto", "none", "block"] | Text | BlockNumbers = "auto"
    """Which blocks compute their activations a second time in backward (gradient checkpointing), instead of keeping
    them: `none`; `block`: every one; `every-2`: each second one; `first-12`: the first twelve; or a list of block
    numbers from 0. `auto`: block."""

    loss_chunk_tokens: Positive | Auto = "auto"
    """Trained tokens whose logits are held at once. `auto`: as many as keep the logits under 32 MiB."""

    lean: bool = True
    """Layers with LoRA and gated MLPs run as one operation each and keep their input once, in 16 bits under bf16.

    Changes memory and speed only, up to summation order and fewer roundings in 16 bits. False: the libraries' own."""

    mlp_slice_tokens: Annotated[Positive | None, Field(examples=[1024])] = None
    """Tokens that pass through a gated MLP at once, forward and backward: its peak stops growing with the row's length.

    Two products more in backward. Needs `lean`. Left out: all tokens of a row."""

    @model_validator(mode="after")
    def _recompute_is_known(self) -> MemorySection:
        name = self.recompute
        if isinstance(name, str) and name not in RECOMPUTE and not _COUNTED.fullmatch(name):
            raise SettingError(
                ("memory.recompute",),
                f'"{name}" is no way to recompute',
                f"Write recompute: {nearest(name, RECOMPUTE) or 'block'}. There are {', '.join(RECOMPUTE)} "
                "(with any number) and a list of block numbers",
            )
        return self

    @model_validator(mode="after")
    def _slices_are_lean(self) -> MemorySection:
        if self.mlp_slice_tokens is not None and not self.lean:
            raise SettingError(
                ("memory.mlp_slice_tokens", "memory.lean"),
                "the MLP runs in slices only where it is lean, and memory.lean is false",
                "Remove one of them",
            )
        return self
