"""Examples become tokens once, and lie in a memory-mapped Arrow file from then on.

An entry is a folder named by its key:

    KEY/examples.arrow    one row an example: input_ids, weights, trained, file, line, source (a stream of `datasets`)
    KEY/manifest.json     hash of that file, names of the data files, what was left out and why, the caller's notes

It is written under another name and renamed when whole: a name that exists was finished. The key holds all that the
tokens follow from. An entry is never changed, only made, and made again where its hash does not hold.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lowmem_ft.data.formats import Example, LeftOut, TokenizedExample
from lowmem_ft.data.pool import Packed, Tokenize, tokenize_in_order
from lowmem_ft.errors import MOST_PROBLEMS, DataError, Problem

_log = logging.getLogger(__name__)
_LAYOUT = 1
_FLUSH_TOKENS = 2**20
_FLUSH_ROWS = 2**16
_LISTED = 20
_STALE_SECONDS = 24 * 3600
_LIBRARIES = ("tokenizers", "transformers", "jinja2")


@dataclass(frozen=True)
class LeftOutCount:
    """Examples left out for one reason.

    Attributes:
        reason: as in `LeftOut`.
        count: how many.
        longest_tokens: the longest of them, 0 where lengths are not known.
        first: the first 20.
    """

    reason: str
    count: int
    longest_tokens: int
    first: tuple[LeftOut, ...]


def cache_key(
    *, sources: str, tokenizer: str | Sequence[Path], template: str | None, max_tokens: int, **options: Any
) -> str:
    """The name of a cache entry: a hash of all that its tokens follow from.

    The code of this package's data modules and the versions of the tokenizing libraries are part of it, so that a
    changed program never finds the tokens of another.

    Args:
        sources: what `digest_sources` gave.
        tokenizer: the tokenizer as text (`tokenizer.backend_tokenizer.to_str()` and its settings), or its files.
        template: text of the chat template.
        max_tokens: longest example in tokens.
        **options: everything else that decides ids and weights (train_on, too_long, ...), as JSON can hold it.

    Returns:
        32 hexadecimal digits.
    """
    if not isinstance(tokenizer, str):
        tokenizer = " ".join(f"{path.name}:{_hash_file(path)}" for path in sorted(tokenizer))
    parts = {
        "layout": _LAYOUT,
        "code": _code_digest(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
        "sources": sources,
        "tokenizer": tokenizer,
        "template": template,
        "max_tokens": max_tokens,
        "options": options,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


@cache
def _code_digest() -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


class TokenizedData(Sequence[TokenizedExample]):
    """The tokens of a cache entry, read from disk as they are asked for.

    Memory: 12 bytes an example for the arrays below; ids and weights are views into the mapped file, which the system
    may drop and read again. They cannot be written to.

    Attributes:
        key: name of the entry.
        folder: where it lies.
        lengths: tokens of each example, int32.
        trained: positions of each example that are targets (weight above 0, the first position never), int32.
        sources: index of each example's source, int32; examples lie in the order of their sources.
        examples: examples that were read, left out or not. Not `len()`: a long document may be several.
        left_out: what was left out, by reason, most frequent first.
        notes: what the caller's `notes` gave when the entry was made.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        from datasets import Dataset

        self.key: str = manifest["key"]
        self.folder = folder
        self.examples: int = manifest["examples"]
        self.notes: Mapping[str, Any] = manifest["notes"]
        self.left_out = tuple(_left_out_from(made) for made in manifest["left_out"])
        self._files: list[str] = manifest["files"]
        self._dataset = Dataset.from_file(str(folder / "examples.arrow"))
        batches = self._dataset.data.table.to_batches()
        self._batches = [
            {
                "offsets": batch.column("input_ids").offsets.to_numpy(),
                "input_ids": batch.column("input_ids").values.to_numpy(),
                "weights": batch.column("weights").values.to_numpy(),
                "file": batch.column("file").to_numpy(),
                "line": batch.column("line").to_numpy(),
            }
            for batch in batches
        ]
        self._starts = np.cumsum([0] + [batch.num_rows for batch in batches])
        self.lengths = _joined([np.diff(batch["offsets"]) for batch in self._batches])
        self.trained = _joined([batch.column("trained").to_numpy() for batch in batches])
        self.sources = _joined([batch.column("source").to_numpy() for batch in batches])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        """The example at an index, or a list of those of a slice."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, row = self._batches[number], index - self._starts[number]
        start, end = batch["offsets"][row], batch["offsets"][row + 1]
        return TokenizedExample(
            batch["input_ids"][start:end],
            batch["weights"][start:end],
            self._files[batch["file"][row]],
            int(batch["line"][row]),
        )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int32) if arrays else np.zeros(0, np.int32)


def tokenize_to_cache(
    examples: Iterable[Example],
    tokenize: Tokenize,
    key: str,
    cache_folder: Path,
    *,
    workers: int | None = None,
    notes: Callable[[], Mapping[str, Any]] | None = None,
    say: Callable[[str], None] = _log.warning,
    on_progress: Callable[[int], None] | None = None,
) -> TokenizedData:
    """Opens the entry of a key, or makes it.

    Exactness: the entry's content follows from `examples` and `tokenize` alone, not from `workers`. Two processes that
    make the same entry both finish; one of the two stays.

    Args:
        examples: not touched where the entry is there, so that a second start parses nothing.
        tokenize: see `Tokenize`.
        key: what `cache_key` gave.
        cache_folder: made if it is not there.
        workers: processes that tokenize, see `tokenize_in_order`.
        notes: called after the last example; kept in the entry, as JSON can hold it.
        say: gets a line when a damaged entry is made again.
        on_progress: gets the number of examples done so far, some times a second.

    Raises:
        DataError: from reading or tokenizing, with ten problems or more at once; or the folder cannot be written.
    """
    entry = cache_folder / key
    with _writing(cache_folder):
        cache_folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache_folder)
    try:
        return _open(entry, key)
    except _DamagedError as damaged:
        if entry.exists():
            say(f"{entry} is damaged ({damaged}); tokenizing again")
    made = cache_folder / f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with _writing(cache_folder):
            made.mkdir()
        builder = _Builder(made, cache_folder)
        for packed in tokenize_in_order(examples, tokenize, workers):
            builder.add(packed)
            if on_progress is not None:
                on_progress(builder.examples)
        builder.finish(key, dict(notes()) if notes else {})
        with _writing(cache_folder):
            return _publish(made, entry, key)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the cache cannot be written: {error.strerror or error}"
        raise DataError(Problem(str(folder), what, "Make room, or make the folder writable.")) from error


class _DamagedError(Exception):
    """An entry that is not there, or not what was written."""


def _open(entry: Path, key: str) -> TokenizedData:
    try:
        manifest = json.loads((entry / "manifest.json").read_text("utf-8"))
        if manifest["layout"] != _LAYOUT or manifest["key"] != key:
            raise _DamagedError("its manifest is of another entry")
        if _hash_file(entry / "examples.arrow") != manifest["hash"]:
            raise _DamagedError("examples.arrow is not what was written")
        return TokenizedData(entry, manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedError(str(error)) from error


def _publish(made: Path, entry: Path, key: str) -> TokenizedData:
    """Gives a finished entry its name; one that another process finished first is taken instead."""
    while True:
        try:
            os.rename(made, entry)
        except OSError:
            if not entry.exists():
                raise
            with suppress(_DamagedError):
                return _open(entry, key)
            # Renamed before it is deleted: who has it open keeps its pages, and nobody sees half of it.
            trash = entry.with_name(f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
            with suppress(FileNotFoundError):
                os.rename(entry, trash)
            shutil.rmtree(trash, ignore_errors=True)
        else:
            return _open(entry, key)


def _remove_stale(cache_folder: Path) -> None:
    """Removes what killed processes left unfinished a day ago or longer; younger ones may be at work."""
    for path in cache_folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


class _Builder:
    """Writes one entry."""

    def __init__(self, folder: Path, cache_folder: Path) -> None:
        from datasets import Features, Value
        from datasets.arrow_writer import ArrowWriter

        self.examples = 0
        self._folder, self._cache_folder = folder, cache_folder
        columns: dict[str, Any] = {
            "input_ids": [Value("int32")],
            "weights": [Value("float32")],
            "trained": Value("int32"),
            "file": Value("int32"),
            "line": Value("int64"),
            "source": Value("int32"),
        }
        self._writer = ArrowWriter(features=Features(columns), path=str(folder / "examples.arrow"))
        self._waiting: list[Packed] = []
        self._tokens = self._rows = 0
        self._files: dict[str, int] = {}
        self._left_out: dict[str, LeftOutCount] = {}
        self._problems: list[Problem] = []

    def add(self, packed: Packed) -> None:
        """Takes the next examples; after an error nothing is written any more, and errors are collected.

        Raises:
            DataError: enough errors were collected.
        """
        self.examples += packed.examples
        for one in packed.left_out:
            count = self._left_out.get(one.reason, LeftOutCount(one.reason, 0, 0, ()))
            self._left_out[one.reason] = replace(
                count,
                count=count.count + 1,
                longest_tokens=max(count.longest_tokens, one.tokens),
                first=(*count.first, one) if count.count < _LISTED else count.first,
            )
        self._problems += packed.problems
        if len(self._problems) >= MOST_PROBLEMS:
            raise DataError(self._problems)
        if self._problems:
            return
        self._waiting.append(packed)
        self._tokens += len(packed.input_ids)
        self._rows += len(packed.lengths)
        if self._tokens >= _FLUSH_TOKENS or self._rows >= _FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        def joined(name: str) -> Any:
            return np.concatenate([getattr(packed, name) for packed in self._waiting])

        if self._rows:
            offsets = pyarrow.array(np.concatenate([[0], np.cumsum(joined("lengths"))]).astype(np.int32))
            files = [file for packed in self._waiting for file in packed.files]
            numbers = [self._files.setdefault(file, len(self._files)) for file in files]
            columns = {
                "input_ids": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(joined("input_ids"))),
                "weights": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(joined("weights"))),
                "trained": pyarrow.array(joined("trained")),
                "file": pyarrow.array(numbers, pyarrow.int32()),
                "line": pyarrow.array(joined("lines")),
                "source": pyarrow.array(joined("sources")),
            }
            with _writing(self._cache_folder):
                self._writer.write_table(pyarrow.table(columns), writer_batch_size=self._rows)
        self._waiting.clear()
        self._tokens = self._rows = 0

    def finish(self, key: str, notes: dict[str, Any]) -> None:
        """Writes the rest and the manifest.

        Raises:
            DataError: errors were collected.
        """
        if self._problems:
            raise DataError(self._problems)
        self._flush()
        with _writing(self._cache_folder):
            self._writer.finalize()
            counts = sorted(self._left_out.values(), key=lambda one: -one.count)
            manifest = {
                "layout": _LAYOUT,
                "key": key,
                "hash": _hash_file(self._folder / "examples.arrow"),
                "examples": self.examples,
                "files": list(self._files),
                "left_out": [_left_out_to(count) for count in counts],
                "notes": notes,
            }
            (self._folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")


def _left_out_to(count: LeftOutCount) -> dict[str, Any]:
    return {**count.__dict__, "first": [one.__dict__ for one in count.first]}


def _left_out_from(made: Mapping[str, Any]) -> LeftOutCount:
    return LeftOutCount(**{**made, "first": tuple(LeftOut(**one) for one in made["first"])})
