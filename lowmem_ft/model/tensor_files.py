"""Safetensors read and written a tensor at a time, so that a model larger than memory passes through.

The files are read with plain reads, not mapped: a private mapping counts whole against a limit on data (RLIMIT_DATA),
and pages of it against a limit on resident memory. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.errors import ModelError, Problem

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values.

    Attributes:
        name: in the checkpoint.
        dtype: of its elements.
        shape: as stored.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    spec: TensorSpec
    file: Path
    offset: int


class TensorFiles:
    """The tensors of a folder of safetensors files, or of one file, each read when asked for.

    Args:
        path: a file; or a folder, of which those files are read that transformers would read.

    Raises:
        ModelError: there is no such file, or one is not whole or not safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, _Place] = {}
        for file in [path] if path.is_file() else _files_of(path):
            self._places.update(_read_header(file))

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> TensorSpec:
        return self._places[name].spec

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, in memory of its own.

        Args:
            name: of the tensor.
            rows: a part of its first axis, from start to stop; only these bytes are read.

        Raises:
            ModelError: the file is shorter than it was.
        """
        place = self._places[name]
        shape = place.spec.shape
        start, stop = (0, math.prod(shape)) if rows is None else (rows.start, rows.stop)
        if rows is not None:
            row = math.prod(shape[1:])
            shape = (stop - start, *shape[1:])
            start, stop = start * row, stop * row
        size = place.spec.dtype.itemsize
        raw = self._bytes(place, start * size, (stop - start) * size)
        return raw.view(place.spec.dtype).reshape(shape)

    def samples(self, name: str, count: int) -> bytes:
        """The first, the middle and the last `count` bytes of a tensor; all of it where it is no longer than that."""
        place = self._places[name]
        size = place.spec.bytes
        starts = [0] if size <= 3 * count else [0, size // 2, size - count]
        parts = [self._bytes(place, start, size if len(starts) == 1 else count) for start in starts]
        return b"".join(part.numpy().tobytes() for part in parts)

    def _bytes(self, place: _Place, start: int, count: int) -> Tensor:
        raw = torch.empty(count, dtype=torch.uint8)
        with place.file.open("rb", buffering=0) as stream:
            stream.seek(place.offset + start)
            view = memoryview(raw.numpy().data)
            done = 0
            while done < count:
                read = stream.readinto(view[done:])
                if not read:
                    raise ModelError(
                        Problem(str(place.file), f"ends in the middle of {place.spec.name}", "Copy it anew")
                    )
                done += read
        return raw


def write_tensor_files(
    folder: Path,
    specs: Sequence[TensorSpec],
    make: Callable[[str], Tensor],
    shard_bytes: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Write `model*.safetensors`, a tensor at a time, with an index where there are several.

    Memory: one tensor, whatever the size of a file. The headers are written first: every size is known before.

    Args:
        folder: exists, and holds none of these files.
        specs: of all tensors.
        make: gives each of them, of the dtype and shape of its spec, when it is its turn.
        shard_bytes: a file gets no further tensor that would take it beyond this.
        progress: told the bytes written so far.

    Returns:
        The files with weights.

    Raises:
        OSError: they cannot be written.
        ValueError: `make` gave another dtype or shape.
    """
    shards = _split(specs, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i + 1, len(shards)) for i in range(len(shards))]
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as stream:
            stream.write(_header(shard))
            for spec in shard:
                tensor = make(spec.name).contiguous()
                if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                    raise ValueError(f"{spec.name} is {tensor.dtype} {tuple(tensor.shape)}, not {spec}")
                if tensor.numel():
                    stream.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
                done += spec.bytes
                progress(done)
    if len(shards) > 1:
        where = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        index = {
            "metadata": {"total_size": sum(spec.bytes for spec in specs)},
            "weight_map": dict(sorted(where.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _split(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Groups that each fit in a file. In a file wide types come first, so every tensor lies aligned to its type."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.bytes
    return [sorted(shard, key=lambda spec: -spec.dtype.itemsize) for shard in shards]


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.bytes],
        }
        start += spec.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _files_of(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(Problem(str(index), f"is no index of weights ({type(error).__name__})")) from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            what = f"names {len(missing)} files that are not there: {', '.join(missing[:6])}"
            raise ModelError(Problem(str(index), what, "Copy them into the folder"))
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ModelError(Problem(str(folder), f"has neither {SINGLE} nor {INDEX}", "Name a folder with a model's weights"))


def _read_header(file: Path) -> dict[str, _Place]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, _MOST_HEADER_BYTES):
                raise ModelError(Problem(str(file), "is not a whole safetensors file", "Copy it anew"))
            entries = json.loads(stream.read(length))
        places = {}
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            spec = TensorSpec(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            start, end = entry["data_offsets"]
            if end - start != spec.bytes or 8 + length + end > size:
                raise ModelError(Problem(str(file), f"does not hold all of {name}", "Copy it anew"))
            places[name] = _Place(spec, file, 8 + length + start)
    except OSError as error:
        raise ModelError(Problem(str(file), f"cannot be read: {error.strerror}")) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"its header is none of safetensors ({type(error).__name__}: {error})"
        raise ModelError(Problem(str(file), what, "Copy it anew")) from error
    return places
