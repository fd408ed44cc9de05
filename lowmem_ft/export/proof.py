"""The proof of an export: which models it is held against, by what prompts, one model in memory at a time."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowmem_ft.data.dataset import read_some
from lowmem_ft.data.template import Encoder
from lowmem_ft.errors import LowmemError
from lowmem_ft.export.merged_folder import RECORD, BaseChoice
from lowmem_ft.export.opened import open_encoder, open_subject
from lowmem_ft.export.prompts import GENERAL, read_prompts, user_prompts
from lowmem_ft.export.subject import Subject, find_subject
from lowmem_ft.export.verify import LOST, LOST_WITH_BASE, MOST_PROMPTS, Reference, check, make_reference

AS_TRAINED = "the trained model -> the export"
AS_STORED = "base as stored, with the adapter -> the export"


@dataclass(frozen=True)
class Proof:
    """How an export is to be proven.

    Attributes:
        subject: what was trained.
        base: which base the export holds; None: not known, and held against the trained one.
        prompts: file of prompts; None: the run's held-out data, or general questions.
        most_lost: part of what training changed that may be lost; None: as `verify` says.
        force: let it pass.
        say: gets lines for people.
    """

    subject: Subject
    base: BaseChoice | None = None
    prompts: Path | None = None
    most_lost: float | None = None
    force: bool = False
    say: Callable[[str], None] = print

    def __call__(self, export: Path) -> dict[str, Any]:
        """Compare, say what came of it, and return it for a file.

        Memory: one model at a time, its unquantized weights in float32, and the predictions of two.

        Args:
            export: a run, an adapter or a model.

        Raises:
            ExportError: the export is not what was trained.
        """
        references = self._references()
        opened = open_subject(find_subject(export), exact=True)
        return check(references, opened, self.force, self.say)

    def _references(self) -> list[Reference]:
        """The trained model; and where the export has another base than that, the adapter on this base too."""
        _, encoder = open_encoder(self.subject, self.subject.find_base())
        ids = self._prompts(encoder)
        quantized = self.subject.quantization is not None and self.subject.quantization.method != "none"
        if self.base != "full" or not quantized:
            name = AS_TRAINED if self.base != "full" else AS_STORED
            return [self._reference(name, ids, self.most_lost or LOST)]
        trained = self._reference(AS_TRAINED, ids, self.most_lost or LOST_WITH_BASE)
        stored = self._reference(AS_STORED, ids, self.most_lost or LOST, trained)
        return [stored, trained]

    def _reference(
        self, name: str, ids: Sequence[Sequence[int]], most_lost: float, earlier: Reference | None = None
    ) -> Reference:
        opened = open_subject(self.subject, as_trained=name == AS_TRAINED, exact=True)
        reference = make_reference(name, opened, ids, most_lost if opened.has_adapter else None, earlier)
        del opened
        _free()
        return reference

    def _prompts(self, encoder: Encoder) -> list[list[int]]:
        if self.prompts is not None:
            return [prompt.ids(encoder) for prompt in read_prompts(self.prompts)[:MOST_PROMPTS]]
        data = self.subject.data
        if data is not None and data.eval is not None:
            try:
                examples = read_some(data.eval, data, encoder, MOST_PROMPTS)
            except LowmemError as error:
                self.say(f"the held-out data cannot be read ({error.problems[0]}): general questions are asked instead")
            else:
                if examples:
                    self.say(f"comparing on the first {len(examples)} held-out prompts")
                    return [encoder.encode_prompt(example) for example in examples]
        self.say(f"comparing on {len(GENERAL)} general questions; --prompts FILE names others")
        return [prompt.ids(encoder) for prompt in user_prompts(GENERAL, "general question")]


def base_of_export(folder: Path) -> BaseChoice | None:
    """Which base a folder that was merged here holds; None for any other."""
    try:
        base = json.loads((folder / RECORD).read_text(encoding="utf-8"))["base"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return "full" if base == "full" else "trained"


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
