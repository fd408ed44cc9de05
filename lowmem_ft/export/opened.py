"""A run, a checkpoint, an adapter or a model, loaded to answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowmem_ft.data.template import Encoder, make_encoder
from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.export.fit import check_fits
from lowmem_ft.export.subject import Subject
from lowmem_ft.model.facts import make_empty_model
from lowmem_ft.model.find import FoundModel, fetch_weights
from lowmem_ft.model.load import load_model, stored_dtype
from lowmem_ft.model.packed import is_packed
from lowmem_ft.model.tokenizer import load_tokenizer

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
LONGEST = 1 << 20
"""Tokens of a prompt where nothing limits them: the encoder only cuts what is trained."""


@dataclass(frozen=True)
class Opened:
    """Something that answers, in memory.

    Attributes:
        model: transformers' model, or peft's around it.
        tokenizer: of the training.
        encoder: makes prompts as they were in training.
        device: where the model is.
        autocast: type of products under autocast; None without it.
    """

    model: Any
    tokenizer: Any
    encoder: Encoder
    device: torch.device
    autocast: torch.dtype | None

    @property
    def has_adapter(self) -> bool:
        """Whether there is a base to compare with."""
        return hasattr(self.model, "disable_adapter")

    @contextmanager
    def running(self, adapter: bool = True) -> Iterator[None]:
        """Products in the type of training, without gradients.

        Args:
            adapter: False: answer as the base alone.
        """
        off = nullcontext() if adapter or not self.has_adapter else self.model.disable_adapter()
        with (
            torch.no_grad(),
            torch.autocast(self.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None),
            off,
        ):
            yield


def open_encoder(subject: Subject, found: FoundModel) -> tuple[Any, Encoder]:
    """Tokenizer and encoder of a subject.

    Args:
        subject: whose.
        found: its base, or it itself.

    Raises:
        ModelError: there is no tokenizer.
        RecipeError: the template cannot be used.
    """
    place = FoundModel(str(subject.tokenizer), None, "") if subject.tokenizer else found
    tokenizer = load_tokenizer(place, subject.trust_remote_code)
    return tokenizer, make_encoder(tokenizer, template=subject.template, max_tokens=subject.max_tokens or LONGEST)


def open_subject(
    subject: Subject,
    *,
    as_trained: bool = True,
    exact: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Opened:
    """Load what a subject names.

    Args:
        subject: from `find_subject`.
        as_trained: load the base of an adapter quantized as in training, where that is known; False: as it is stored.
        exact: weights as they are, and all products in float32: what differs then is the weights. Takes four bytes for
            each weight that is not quantized.
        progress: told what is being done.

    Raises:
        ModelError: it cannot be loaded.
        ExportError: the adapter does not fit the base.
    """
    found = subject.find_base(progress)
    fetch_weights(found)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, encoder = open_encoder(subject, found)
    stored = stored_dtype(json.loads((Path(found.path) / "config.json").read_text(encoding="utf-8")))
    quantization = subject.quantization if as_trained else None
    method, double_quant, dtype = "none", True, "float32" if exact else stored
    if quantization is not None:
        method, double_quant = quantization.method, quantization.double_quant
        dtype = quantization.dtype
    if subject.adapter is not None:
        empty = make_empty_model(found, "float32", subject.trust_remote_code)
        check_fits(subject.adapter, empty, found.path)
    model: Any = load_model(
        found,
        quantization=method,
        double_quant=double_quant,
        dtype=dtype,
        device=str(device),
        trust_remote_code=subject.trust_remote_code,
    )
    if subject.adapter is not None:
        model = _with_adapter(model, subject.adapter)
    precision = None if exact or subject.precision is None else PRECISIONS[subject.precision]
    if exact:
        to_float32(model)
    return Opened(model.eval(), tokenizer, encoder, device, precision)


def to_float32(model: nn.Module) -> None:
    """Cast all that is not quantized to float32, and let quantized layers multiply in it, on the weights they have."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and not is_packed(tensor):
            tensor.data = tensor.data.float()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            setattr(module, "compute_dtype", torch.float32)  # noqa: B010  # an attribute of bitsandbytes' Linear4bit


def _with_adapter(base: Any, folder: Path) -> Any:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(base, str(folder))
    except (RuntimeError, ValueError) as error:
        what = f"peft cannot load it: {' '.join(str(error).split())}"
        raise ModelError(Problem(str(folder), what)) from error
