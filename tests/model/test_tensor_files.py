"""Safetensors files are read and written a tensor at a time, as safetensors itself does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_ft.errors import ModelError
from lowmem_ft.model.tensor_files import DTYPES, INDEX, TensorFiles, TensorSpec, write_tensor_files


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(3, 5).mul(9).to(dtype) for name, dtype in DTYPES.items()}
    return {**made, "empty": torch.zeros(0, 4), "scalar": torch.tensor(7.0), "odd": torch.ones(3, dtype=torch.uint8)}


def specs_of(made: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in made.items()]


def same(a: Tensor, b: Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def test_every_type_that_safetensors_wrote_is_read_bit_for_bit(tmp_path: Path) -> None:
    made = tensors()
    save_file(made, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert sorted(files) == sorted(made)
    assert len(files) == len(DTYPES) + 3
    for name, tensor in made.items():
        assert same(files.read(name), tensor), name
        assert files[name].bytes == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("shard_bytes", [10**9, 100, 1])
def test_safetensors_reads_what_was_written_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    made = tensors()
    written = write_tensor_files(tmp_path, specs_of(made), made.__getitem__, shard_bytes)
    read: dict[str, Tensor] = {}
    for file in written:
        read |= load_file(file)
    assert sorted(read) == sorted(made)
    assert all(same(read[name], made[name]) for name in made)
    assert all(same(TensorFiles(tmp_path).read(name), made[name]) for name in made)
    for file in written:
        sizes = [t.numel() * t.element_size() for t in load_file(file).values()]
        assert sum(sizes) <= shard_bytes or sum(size > 0 for size in sizes) == 1
    index = tmp_path / INDEX
    assert index.exists() == (len(written) > 1)
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == set(made)


def test_rows_and_samples_read_only_their_bytes(tmp_path: Path) -> None:
    weight = torch.arange(40, dtype=torch.int32).reshape(10, 4)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path / "model.safetensors")
    assert torch.equal(files.read("w", slice(3, 6)), weight[3:6])
    raw = weight.numpy().tobytes()
    assert files.samples("w", 8) == raw[:8] + raw[80:88] + raw[-8:]
    assert files.samples("w", 1000) == raw


def test_a_tensor_of_another_shape_than_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a is torch\.float32"):
        write_tensor_files(tmp_path, [TensorSpec("a", torch.float32, (2,))], lambda _: torch.zeros(3), 100)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor"):
        TensorFiles(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(100)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(ModelError, match="does not hold all of w"):
        TensorFiles(tmp_path)
    file.write_bytes(whole[:20])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        TensorFiles(tmp_path)
    file.write_bytes((2).to_bytes(8, "little") + b"[]" + bytes(400))
    with pytest.raises(ModelError, match="header is none of safetensors"):
        TensorFiles(tmp_path)
    file.write_bytes(whole)
    files = TensorFiles(tmp_path)
    file.write_bytes(whole[:-10])
    with pytest.raises(ModelError, match="ends in the middle of w"):
        files.read("w")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="names 1 files that are not there: model-00001"):
        TensorFiles(tmp_path)
