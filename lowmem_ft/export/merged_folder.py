"""A merged model as a folder that is complete or not there: weights, settings, tokenizer, template, and what it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lowmem_ft.errors import ExportError, Problem
from lowmem_ft.export.adapter_weights import read_adapter
from lowmem_ft.export.fit import check_fits
from lowmem_ft.export.merge import MergedWeights
from lowmem_ft.export.subject import Subject
from lowmem_ft.export.trained_base import Quantization
from lowmem_ft.model.facts import make_empty_model
from lowmem_ft.model.find import fetch_weights
from lowmem_ft.model.load import DTYPES, stored_dtype
from lowmem_ft.model.tensor_files import write_tensor_files
from lowmem_ft.units import format_bytes

BaseChoice = Literal["full", "trained"]
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt", "*.model",
    "spiece*", "sentencepiece*",
)  # fmt: skip
MODEL_FILES = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "*.py")
RECORD = "export.json"


@dataclass(frozen=True)
class MergeRequest:
    """What is to be merged, and how.

    Attributes:
        subject: with an adapter.
        out: a folder that is not there yet.
        base: `full`: into the base as it is stored; `trained`: into the base as it was quantized in training.
        dtype: `bfloat16`, `float16` or `float32`; None: as the base's config.json says.
        shard_bytes: size of a file of weights, beyond which another is begun.
        force: merge though the base is not what it was.
    """

    subject: Subject
    out: Path
    base: BaseChoice = "full"
    dtype: str | None = None
    shard_bytes: int = 2 << 30
    force: bool = False


@dataclass(frozen=True)
class Merged:
    """What was written.

    Attributes:
        folder: where.
        bytes: of its weights.
        tensors: their number.
        changed: how many of them the adapter changed.
        dtype: of the weights.
        notes: what a user should know.
    """

    folder: Path
    bytes: int
    tensors: int
    changed: int
    dtype: str
    notes: tuple[str, ...]


def merge(
    request: MergeRequest,
    prove: Callable[[Path], Mapping[str, Any]],
    progress: Callable[[str], None] = lambda _: None,
) -> Merged:
    """Write the merged model under another name, prove it, and give it its name.

    Memory: one tensor and the index of the others; see `MergedWeights`.

    Args:
        request: what.
        prove: gets the folder before it has its name, and returns what is to be written down; an error of it means
            that nothing is left.
        progress: told what is being done.

    Raises:
        ExportError: it cannot be merged or written, or is not what was trained.
        ModelError: adapter or base cannot be read.
    """
    subject, out = request.subject, request.out
    if subject.adapter is None:
        what = "is a model without an adapter, and there is nothing to merge"
        raise ExportError(Problem(str(subject.path), what, "Name a run, a checkpoint or an adapter"))
    if out.exists():
        raise ExportError(Problem(str(out), "is there already, and is not written over", "Name another folder"))
    trained = _trained(request)
    adapter = read_adapter(subject.adapter)
    found = subject.find_base(progress)
    fetch_weights(found)
    if not request.force:
        subject.check_base(found)
    config = json.loads((Path(found.path) / "config.json").read_text(encoding="utf-8"))
    name = request.dtype or stored_dtype(config)
    check_fits(subject.adapter, make_empty_model(found, "float32", subject.trust_remote_code), found.path)
    weights = MergedWeights(
        found, adapter, dtype=DTYPES[name], trained=trained, trust_remote_code=subject.trust_remote_code
    )
    size = sum(spec.bytes for spec in weights.specs)
    _check_space(out, size)
    record: dict[str, Any] = {
        "merged": subject.model,
        "base": request.base,
        "into": "the base as stored" if trained is None else f"the base as trained, {trained}",
        "dtype": name,
    }
    with _whole(out) as part:
        files = write_tensor_files(
            part,
            weights.specs,
            weights.tensor,
            request.shard_bytes,
            lambda done: progress(f"{format_bytes(done)} of {format_bytes(size)} written"),
        )
        _write_settings(part, config, weights, name)
        _copy_others(part, Path(found.path), subject)
        record["proof"] = dict(prove(part))
        (part / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for file in files:
            _sync(file)
    return Merged(out, size, len(weights.specs), weights.changed, name, _notes(weights, trained))


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end; after an error nothing of it is left."""
    part = out.with_name(f".{out.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        os.rename(part, out)
    except OSError as error:
        raise ExportError(
            Problem(str(out), f"cannot be written: {error.strerror or error}", "Make room there")
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _trained(request: MergeRequest) -> Quantization | None:
    """How the base is to be quantized before the sum."""
    if request.base == "full":
        return None
    known = request.subject.quantization
    if known is None:
        what = "does not say how its base was quantized in training"
        raise ExportError(Problem(str(request.subject.path), what, "Write --quantization nf4, or --base full"))
    return known


def _write_settings(part: Path, config: dict[str, Any], weights: MergedWeights, dtype: str) -> None:
    changes: dict[str, Any] = {"dtype": dtype}
    if weights.untied:
        changes["tie_word_embeddings"] = False
    if weights.vocabulary is not None:
        changes["vocab_size"] = weights.vocabulary
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = {**config, "text_config": {**nested, **{k: v for k, v in changes.items() if k in nested}}}
        changes = {key: value for key, value in changes.items() if key in config or key != "vocab_size"}
    if "torch_dtype" in config:
        changes["torch_dtype"] = dtype
    text = json.dumps({**config, **changes}, indent=2, sort_keys=True)
    (part / "config.json").write_text(text + "\n", encoding="utf-8")


def _copy_others(part: Path, base: Path, subject: Subject) -> None:
    """Tokenizer and template of the training, and what else belongs to the base."""
    tokenizer = subject.tokenizer or base
    for folder, patterns in ((base, MODEL_FILES), (tokenizer, TOKENIZER_FILES)):
        for pattern in patterns:
            for file in folder.glob(pattern):
                if file.is_file():
                    shutil.copy(file, part / file.name)
    if subject.kind == "checkpoint":  # which has no tokenizer of its own
        from lowmem_ft.data.template import make_encoder
        from lowmem_ft.model.find import FoundModel
        from lowmem_ft.model.tokenizer import load_tokenizer

        loaded = load_tokenizer(FoundModel(str(tokenizer), None, ""), subject.trust_remote_code)
        encoder = make_encoder(loaded, template=subject.template, max_tokens=subject.max_tokens or 1024)
        (part / "chat_template.jinja").write_text(encoder.template_text, encoding="utf-8")


def _check_space(out: Path, needed: int) -> None:
    there = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        what = f"the merged model takes {format_bytes(needed)}, and {format_bytes(free)} are free"
        raise ExportError(Problem(str(out), what, "Make room, name another folder, or write --dtype bfloat16"))


def _notes(weights: MergedWeights, trained: Quantization | None) -> tuple[str, ...]:
    notes = []
    if weights.untied:
        notes.append("head and embedding shared a weight and no longer do: the adapter changes one of them alone")
    if trained is not None:
        notes.append(f"merged into the base as it was in training, {trained}, turned back")
    return tuple(notes)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
