"""What is quantized is found in every backend by what its tensors are, and formats that cannot train are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_ft.errors import ModelError
from lowmem_ft.model.facts import make_empty_model
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import count_bytes, load_model
from lowmem_ft.model.packed import (
    count_weight_bytes,
    is_packed,
    logical_count,
    quantized_ids,
    quantized_tensors,
    refuse_untrainable,
    refuse_untrainable_config,
)
from tests.model.backends import BACKENDS, PACKED_LAYERS, PackedLinear
from tests.tiny import save_tiny_model, tiny_gpt2, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_quantized_layers_are_found_and_nothing_else(folder: Path, backend: str) -> None:
    model = BACKENDS[backend](folder)
    found = [name for name, module in model.named_modules() if quantized_tensors(module)]
    assert len(found) == PACKED_LAYERS.get(backend, 14)
    assert all("_proj" in name for name in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_bytes_are_those_of_embeddings_norms_and_unquantized_linears(folder: Path, backend: str) -> None:
    model = BACKENDS[backend](folder)
    weights = count_weight_bytes(model, set())
    packed = quantized_ids(model)
    plain = [p for p in model.parameters() if id(p) not in packed]
    assert weights.unquantized == sum(p.numel() * 2 for p in plain) == sum(size for _, size in weights.names)
    linears = PACKED_LAYERS.get(backend, 14)
    # 4 bits a weight and a scale for 32, 64 or a row of them; 8 bits for int8
    elements = {14: 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128), 6: 6 * 64 * 128, 0: 0}[linears]
    bits = 8 * (weights.total - weights.unquantized) / max(elements, 1)
    assert (
        bits == 0 if linears == 0 else (4 if backend not in ("int8", "torchao-int8", "torchao-int4") else 8) < bits < 9
    )
    assert "model.embed_tokens.weight 56.0 KiB" in weights.line()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_by_part_know_every_backend(folder: Path, backend: str) -> None:
    model = BACKENDS[backend](folder)
    by_part, weights = count_bytes(model), count_weight_bytes(model, set())
    assert by_part.quantized == weights.total - weights.unquantized
    if not backend.startswith("gptq-like"):  # how many weights a stand-in holds is not written anywhere
        assert by_part.parameters == sum(p.numel() for p in tiny_llama().parameters())


@pytest.mark.parametrize(
    ("tensor", "packed"),
    [
        (torch.zeros(2, 2, dtype=torch.uint8), True),
        (torch.zeros(2, 2, dtype=torch.int8), True),
        (torch.zeros(2, 2).to(torch.float8_e4m3fn), True),
        (torch.zeros(2, 2, dtype=torch.bfloat16), False),
        (nn.Parameter(torch.zeros(2, 2)), False),
    ],
)
def test_a_type_with_no_room_for_digits_is_packed(tensor: torch.Tensor, packed: bool) -> None:
    assert is_packed(tensor) is packed


def test_a_4bit_weight_in_16bit_storage_is_packed() -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(64, 64, bias=True, quant_type="nf4", quant_storage=torch.bfloat16)
    layer.load_state_dict(nn.Linear(64, 64).state_dict())
    layer.to("cpu")
    assert layer.weight.dtype == torch.bfloat16
    assert [name for name, _ in quantized_tensors(layer)] == ["weight"]
    assert logical_count(layer, layer.weight) == 64 * 64


def test_masks_and_positions_are_not_packed_weights() -> None:
    module = nn.Module()
    module.register_buffer("position_ids", torch.arange(4)[None])
    module.register_buffer("scale_mask", torch.ones(4, 4, dtype=torch.bool))
    module.weight = nn.Parameter(torch.zeros(4, 4))
    assert quantized_tensors(module) == []
    assert quantized_ids(tiny_gpt2()) == set()


def test_a_bias_is_no_part_of_the_quantized_weight() -> None:
    names = [name for name, _ in quantized_tensors(PackedLinear(nn.Linear(64, 32)))]
    assert sorted(names) == ["g_idx", "qweight", "qzeros", "scales"]


def test_the_stand_in_computes_with_the_weight_it_packed() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    packed = PackedLinear(linear)
    step = (linear.weight.amax() - linear.weight.amin()) / 15
    assert (packed.dequantize(torch.float32) - linear.weight).abs().max() <= step
    x = torch.randn(3, 64)
    assert torch.allclose(packed(x), nn.functional.linear(x, packed.dequantize(torch.float32), linear.bias))


def _plan(found: FoundModel) -> Any:
    return make_empty_model(found, "bfloat16")


def _with_config(folder: Path, quantization: dict[str, Any]) -> FoundModel:
    folder.mkdir()
    config = tiny_llama().config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return FoundModel(str(folder), None, "")


@pytest.mark.parametrize("read", [load_model, lambda found: load_model(found, quantization="nf4"), _plan])
def test_a_format_that_cannot_train_is_refused_before_weights_are_read(tmp_path: Path, read: Any) -> None:
    """There are no weights in the folder: to read them would be another error."""
    found = _with_config(tmp_path / "m", {"quant_method": "mxfp4"})
    with pytest.raises(
        ModelError, match=r"is quantized in mxfp4, which cannot be trained on.*Mxfp4Config\(dequantize=Tr"
    ):
        read(found)


def test_a_config_that_dequantizes_on_load_is_no_reason_to_refuse() -> None:
    refuse_untrainable_config("here", {"quant_method": "mxfp4", "dequantize": True})
    refuse_untrainable_config("here", {"quant_method": "bitsandbytes", "load_in_4bit": True})
    refuse_untrainable_config("here", None)


def test_a_method_that_transformers_does_not_know_is_an_error_of_loading(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_model(_with_config(tmp_path / "m", {"quant_method": "nothing"}))


def test_a_loaded_model_that_cannot_train_is_refused_and_a_dequantized_one_is_not(folder: Path) -> None:
    quantizer = SimpleNamespace(is_trainable=False, quantization_config=SimpleNamespace(quant_method="fancy"))
    for kind, refused in (("nf4", True), ("none", False)):
        model = BACKENDS[kind](folder)
        model.hf_quantizer = quantizer
        if refused:
            with pytest.raises(ModelError, match="is quantized in fancy, which cannot be trained on"):
                refuse_untrainable(model)
        else:
            refuse_untrainable(model)


def test_a_packed_weight_that_cuts_the_gradient_is_refused_by_name() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = tiny_llama().bfloat16()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(), lambda m, n: n.endswith("down_proj"))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj: its weight is a .* has no gradient"):
        refuse_untrainable(model)
