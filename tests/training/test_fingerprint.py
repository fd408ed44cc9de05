"""Equal for the same model and data, wherever they lie; different for others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lowmem_ft.training.fingerprint import base_digest, data_digest, digests
from tests.tiny import add_lora, tiny_llama


def split(folder: Path, data: bytes, weight: float = 1.0) -> Any:
    folder.mkdir()
    (folder / "examples.arrow").write_bytes(data)
    return SimpleNamespace(tokens=SimpleNamespace(folder=folder), weights=(weight,))


def test_the_base_decides_and_not_what_trains() -> None:
    first, _ = add_lora(tiny_llama(), rank=4, alpha=8)
    before = base_digest(first)
    with torch.no_grad():
        for p in first.parameters():
            if p.requires_grad:
                p.add_(1)
    assert base_digest(first) == before
    assert base_digest(add_lora(tiny_llama(), rank=4, alpha=8)[0]) == before
    assert base_digest(add_lora(tiny_llama(seed=1), rank=4, alpha=8)[0]) != before
    assert base_digest(add_lora(tiny_llama().bfloat16(), rank=4, alpha=8)[0]) != before


def test_data_counts_by_its_tokens_and_not_by_its_place(tmp_path: Path) -> None:
    one, same, other = (split(tmp_path / n, d) for n, d in (("a", b"x" * 99), ("b", b"x" * 99), ("c", b"y" * 99)))
    assert data_digest(one) == data_digest(same) != data_digest(other)
    assert data_digest(split(tmp_path / "d", b"x" * 99, weight=2.0)) != data_digest(one)
    assert set(digests(tiny_llama(), one)) == {"base model", "training data"}
