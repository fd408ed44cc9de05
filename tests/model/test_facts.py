"""Bytes predicted from the configuration against bytes of the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_ft.errors import ModelError
from lowmem_ft.model.facts import make_empty_model, packed_bytes, predict_bytes
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import count_bytes, load_model
from tests.tiny import FAMILIES, save_tiny_model

CODE_TABLES = 64 + 1024 + 256
"""Most bytes of bitsandbytes' code tables and settings a 4-bit layer; int8 has none."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "double"), [("nf4", True), ("nf4", False), ("fp4", True), ("int8", True), ("none", True)]
)
def test_predicted_bytes_equal_the_loaded_ones(tmp_path: Path, family: str, kind: str, double: bool) -> None:
    found = FoundModel(str(save_tiny_model(tmp_path / "m", FAMILIES[family]())), None, "")
    empty = make_empty_model(found, "bfloat16")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    predicted = predict_bytes(empty, kind, double)
    model = load_model(found, quantization=kind, double_quant=double)
    loaded = count_bytes(model)
    assert predicted.parameters == loaded.parameters
    assert (predicted.embeddings, predicted.head, predicted.tied) == (loaded.embeddings, loaded.head, loaded.tied)
    layers = sum(hasattr(p, "quant_state") for p in model.parameters())
    slack = layers * CODE_TABLES if kind in ("nf4", "fp4") else 0
    assert 0 <= loaded.quantized - predicted.quantized <= slack
    assert predicted.rest + predicted.unquantized_linears == loaded.rest + loaded.unquantized_linears


def test_a_large_layer_takes_the_bits_that_the_papers_say() -> None:
    count = 4096 * 14336
    assert packed_bytes(14336, 4096, "nf4", True) * 8 / count == pytest.approx(4.127, abs=1e-3)
    assert packed_bytes(14336, 4096, "nf4", False) * 8 / count == 4.5
    assert packed_bytes(14336, 4096, "int8", True) == count + 14336 * 4


def test_a_configuration_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="configuration cannot be read"):
        make_empty_model(FoundModel(str(tmp_path), None, ""), "bfloat16")
