"""What a base was when an adapter was trained on it, in `base.json`, so that another base is not taken for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.tensor_files import TensorFiles

FILE = "base.json"
SAMPLE_BYTES = 4096
CHANGES_NOTHING = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "_commit_hash"
}  # fmt: skip
"""Keys of config.json that may differ between two copies of one model."""


@dataclass(frozen=True)
class BaseRecord:
    """A base and how it was loaded.

    Attributes:
        model: as the recipe names it.
        revision: of a hub id.
        quantization: `none`, `nf4`, `fp4` or `int8`.
        double_quant: see the recipe.
        dtype: of weights that are not quantized.
        precision: of products in training: `bf16`, `fp16` or `fp32`.
        config: its config.json, without what changes nothing.
        weights: a hash of each stored tensor's type, shape, and first, middle and last 4 kB.
    """

    model: str
    revision: str | None
    quantization: str
    double_quant: bool
    dtype: str
    precision: str
    config: Mapping[str, Any]
    weights: Mapping[str, str]

    def text(self) -> str:
        """For `base.json`."""
        return json.dumps(asdict(self), indent=1) + "\n"


def record_base(
    found: FoundModel, *, model: str, quantization: str, double_quant: bool, dtype: str, precision: str
) -> BaseRecord:
    """What `found` is now; reads 12 kB of each tensor.

    Args:
        found: with its weights.
        model: as the recipe names it.
        quantization: see `BaseRecord`, as all below.
        double_quant: ...
        dtype: ...
        precision: ...

    Raises:
        ModelError: it cannot be read.
    """
    config, weights = _config(Path(found.path)), _weights(Path(found.path))
    return BaseRecord(model, found.revision, quantization, double_quant, dtype, precision, config, weights)


def read_record(*folders: Path) -> BaseRecord | None:
    """The record in the first of these folders that has one.

    Raises:
        ModelError: it cannot be read.
    """
    for folder in folders:
        file = folder / FILE
        if file.is_file():
            try:
                return BaseRecord(**json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                what = f"is no record of a base ({type(error).__name__})"
                raise ModelError(Problem(str(file), what, "Copy it anew, or remove it")) from error
    return None


def differences(record: BaseRecord, found: FoundModel) -> list[Problem]:
    """How a base is not what it was in training: settings, and weights that changed, are missing or are new.

    Args:
        record: of the training.
        found: the base now.

    Raises:
        ModelError: it cannot be read.
    """
    config, weights = _config(Path(found.path)), _weights(Path(found.path))
    where = str(Path(found.path) / "config.json")
    problems = [
        Problem(where, f"{key} is {config.get(key)}, and in training it was {record.config.get(key)}")
        for key in sorted({*config, *record.config})
        if config.get(key) != record.config.get(key)
    ]
    for names, what in (
        (record.weights.keys() - weights.keys(), "is not there any more"),
        (weights.keys() - record.weights.keys(), "was not there in training"),
        ({n for n in weights.keys() & record.weights.keys() if weights[n] != record.weights[n]}, "has other values"),
    ):
        problems += [Problem(found.path, f"{name} {what}") for name in sorted(names)]
    return problems


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return {key: value for key, value in config.items() if key not in CHANGES_NOTHING}
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(Problem(str(file), f"cannot be read ({type(error).__name__})")) from error


def _weights(folder: Path) -> dict[str, str]:
    files = TensorFiles(folder)
    found = {}
    for name in sorted(files):
        digest = xxhash.xxh3_64(f"{files[name].dtype} {files[name].shape}".encode())
        digest.update(files.samples(name, SAMPLE_BYTES))
        found[name] = digest.hexdigest()
    return found
