"""Which weights are quantized is what transformers quantizes. That their values are, `test_merge.py` holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_ft.export.trained_base import Quantization, as_trained, quantized_names
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import load_model
from lowmem_ft.model.packed import quantized_tensors
from tests.tiny import FAMILIES, tiny_llama, tiny_qwen3


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_names_are_those_that_transformers_quantizes(tmp_path: Path, family: str) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    loaded = load_model(FoundModel(str(tmp_path), None, ""), quantization="nf4")
    quantized = {f"{name}.weight" for name, module in loaded.named_modules() if quantized_tensors(module)}
    assert quantized
    assert quantized == quantized_names(FAMILIES[family]())


@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen3])
def test_the_head_is_not_quantized_tied_or_not(family: Any) -> None:
    assert "lm_head.weight" not in quantized_names(family())


@pytest.mark.parametrize(("method", "most"), [("nf4", 0.12), ("fp4", 0.2), ("int8", 0.01)])
def test_the_error_is_that_of_so_many_bits(method: str, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    near = as_trained(weight, Quantization(method, True, "float32"))
    error = (near - weight).norm() / weight.norm()
    assert near.shape == weight.shape
    assert most / 4 < error < most


def test_a_text_says_what_it_was() -> None:
    assert str(Quantization("nf4", True, "bfloat16")) == "nf4 in bfloat16, double quantization"
    assert str(Quantization("int8", True, "float16")) == "int8 in float16"
    assert str(Quantization("none", True, "float32")) == "float32"
