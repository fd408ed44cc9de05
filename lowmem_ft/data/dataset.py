"""From the recipe's data section to tokens on disk: locate, read, encode, keep."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowmem_ft.data.cache import TokenizedData, cache_key, tokenize_to_cache
from lowmem_ft.data.formats import Example
from lowmem_ft.data.mixing import mix_order
from lowmem_ft.data.reading import SourceReport, read_examples
from lowmem_ft.data.sources import as_sources, digest_sources, locate_sources
from lowmem_ft.data.template import Encoder, Result
from lowmem_ft.data.text_watch import TextWatch, watch_lines
from lowmem_ft.recipe.data_section import DataSection, Sources


@dataclass(frozen=True)
class Split:
    """Training or held-out data, ready to be drawn from.

    Attributes:
        tokens: the examples, memory-mapped.
        reports: what reading each source came to.
        weights: of each source.
        notes: lines about what the texts hold that may not be meant.
    """

    tokens: TokenizedData
    reports: tuple[SourceReport, ...]
    weights: tuple[float, ...]
    notes: tuple[str, ...]

    def indices(self, seed: int, epoch: int) -> np.ndarray:
        """Examples of an epoch in file order, each source as often as its weight says."""
        sizes = np.bincount(self.tokens.sources, minlength=len(self.weights))
        return mix_order([int(size) for size in sizes], self.weights, seed, epoch)


def load_split(
    sources: Sources,
    data: DataSection,
    encoder: Encoder,
    cache_folder: Path,
    on_progress: Callable[[int], None] | None = None,
) -> Split:
    """Tokenize `sources`, or open what was tokenized before from the same bytes in the same way.

    Args:
        sources: `data.train` or `data.eval`.
        data: how they are read.
        encoder: how an example becomes ids; made from `data`.
        cache_folder: where tokens are kept.
        on_progress: gets the number of examples done so far.

    Raises:
        DataError: with every problem found, up to ten printed.
    """
    located = locate_sources(sources)
    skip = data.on_bad_record == "skip"
    reading = {"default_format": data.format, "default_map": data.map, "on_bad_record": data.on_bad_record}
    key = cache_key(
        sources=digest_sources(located, **reading),
        tokenizer=_tokenizer_text(encoder.tokenizer),
        template=encoder.template_text,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        train_on=data.train_on,
        skip=skip,
    )
    reports: list[SourceReport] = []
    watch = TextWatch(encoder.control)
    examples = read_examples(
        located,
        default_format=data.format,
        default_map=data.map,
        on_bad_record=data.on_bad_record,
        reports=reports,
    )
    tokens = tokenize_to_cache(
        watch.through(examples),
        _Encode(encoder, skip),
        key,
        cache_folder,
        notes=lambda: {"reports": [report.to_dict() for report in reports], "watch": watch.to_dict()},
        on_progress=on_progress,
    )
    found = tuple(SourceReport.from_dict(report) for report in tokens.notes["reports"])
    weights = tuple(source.weight for source in as_sources(sources))
    return Split(tokens, found, weights, tuple(watch_lines(tokens.notes["watch"])))


def read_some(sources: Sources, data: DataSection, encoder: Encoder, count: int) -> list[Example]:
    """The first `count` examples that have an answer, as they were read: for generation."""
    examples: list[Example] = []
    reading = read_examples(sources, default_format=data.format, default_map=data.map, on_bad_record=data.on_bad_record)
    for example in reading:
        if len(examples) == count:
            break
        if example.kind in ("chat", "completion") and encoder.reference_answer(example).strip():
            examples.append(example)
    return examples


def _tokenizer_text(tokenizer: Any) -> str:
    """All that a tokenizer's ids follow from, as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.to_str() + repr(sorted(tokenizer.special_tokens_map.items()))
    with tempfile.TemporaryDirectory() as folder:  # a slow tokenizer: its files say it
        tokenizer.save_pretrained(folder)
        return "".join(f"{path.name}:{path.read_bytes().hex()}" for path in sorted(Path(folder).iterdir()))


@dataclass(frozen=True)
class _Encode:
    """A call that worker processes can unpickle."""

    encoder: Encoder
    skip_bad: bool

    def __call__(self, examples: Sequence[Example]) -> list[Result]:
        return self.encoder.encode_batch(examples, skip_bad=self.skip_bad)
