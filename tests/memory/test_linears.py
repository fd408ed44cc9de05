"""Products and gradients of a linear layer, read from what it is stored as, against torch's own."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lowmem_ft.memory import products
from lowmem_ft.memory.linears import LinearParts, cast_once, parts_of

INPUTS, OUTPUTS, ROWS = 64, 96, 40


def _conv1d() -> nn.Module:
    layer = Conv1D(OUTPUTS, INPUTS)
    nn.init.normal_(layer.bias)
    return layer


def _nf4(double: bool) -> nn.Module:
    layer = bnb.nn.Linear4bit(
        INPUTS, OUTPUTS, bias=True, quant_type="nf4", compress_statistics=double, compute_dtype=torch.float32
    )
    return layer.to("cpu")


def _int8() -> nn.Module:
    return bnb.nn.Linear8bitLt(INPUTS, OUTPUTS, has_fp16_weights=False).to("cpu")


LAYERS: dict[str, Any] = {
    "plain": lambda: nn.Linear(INPUTS, OUTPUTS),
    "no bias": lambda: nn.Linear(INPUTS, OUTPUTS, bias=False),
    "conv1d": _conv1d,
    "nf4": lambda: _nf4(False),
    "nf4 twice": lambda: _nf4(True),
    "int8": _int8,
}


def adapted(kind: str, dropout: float = 0.0, **settings: Any) -> nn.Module:
    """A model of one layer of this kind, frozen, with LoRA whose B is not zero."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": LAYERS[kind]().requires_grad_(False)})
    given = {"r": 4, "lora_alpha": 6, "lora_dropout": dropout, "target_modules": ["layer"], **settings}
    layer: Any = get_peft_model(model, LoraConfig(**given)).base_model.model["layer"]  # type: ignore[arg-type]
    nn.init.normal_(layer.lora_B["default"].weight)
    return layer.train()


def _rows() -> Tensor:
    return torch.randn(2, ROWS, INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", LAYERS)
def test_products_and_gradients_equal_those_of_the_layer(kind: str, dropout: float, in_place: bool) -> None:
    layer: Any = adapted(kind, dropout)
    rows = _rows().requires_grad_()
    torch.manual_seed(5)
    reference = layer(rows)
    torch.manual_seed(7)
    target = torch.randn_like(reference)
    (reference * target).sum().backward()
    parts = parts_of(layer, rows, in_place)
    assert parts is not None
    torch.manual_seed(5)
    flat = rows.detach().flatten(0, 1)
    mask = parts.draw(flat)
    out = parts.product(flat, mask)
    grads = parts.gradients(target.flatten(0, 1), flat, mask)
    # fp32 sums of up to 96 terms in another order
    torch.testing.assert_close(out.view_as(reference), reference, atol=2e-5, rtol=1e-5)
    expected = [rows.grad.flatten(0, 1), layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_without_an_adapter_has_no_adapter_gradients(kind: str) -> None:
    layer = LAYERS[kind]().requires_grad_(False)
    rows = _rows()[0]
    parts = parts_of(layer, rows)
    assert parts is not None
    torch.testing.assert_close(parts.product(rows), layer(rows), atol=2e-5, rtol=1e-5)
    assert parts.gradients(torch.ones(ROWS, OUTPUTS), rows)[1:] == (None, None)
    assert parts.gradients(torch.ones(ROWS, OUTPUTS), rows, of_rows=False) == (None, None, None)


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_weight_is_rounded_to_the_type_of_the_computation_whatever_multiplies_it(
    kind: str, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: able)
    layer = LAYERS[kind]().requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        parts = parts_of(layer, _rows())
    assert parts is not None
    weight = parts.weight(torch.bfloat16)
    assert weight.dtype == (torch.bfloat16 if able else torch.float32)
    assert weight.shape == (OUTPUTS, INPUTS)
    assert torch.equal(weight.bfloat16().float(), weight.float())


def _switched_off(layer: Any) -> None:
    layer.enable_adapters(False)


def _merged(layer: Any) -> None:
    layer.merge()


def _base_trains(layer: Any) -> None:
    layer.base_layer.weight.requires_grad_()


def _hooked(layer: Any) -> None:
    layer.base_layer.register_forward_hook(lambda *_: None)


def _second(layer: Any) -> None:
    layer.update_layer("other", 4, 4, config=LoraConfig(r=4))
    layer.set_adapter(["default", "other"])


def _wrapped(layer: Any) -> None:
    layer.base_layer.forward = lambda rows: rows


CHANGES = [_switched_off, _merged, _base_trains, _hooked, _second, _wrapped]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_more_than_base_and_adapter_is_left_to_the_layer(change: Any) -> None:
    layer = adapted("plain")
    assert isinstance(parts_of(layer, _rows()), LinearParts)
    change(layer)
    assert parts_of(layer, _rows()) is None


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_variants_are_left_to_the_layer(settings: dict[str, bool]) -> None:
    assert parts_of(adapted("plain", **settings), _rows()) is None


def test_types_that_a_layer_would_convert_by_itself_are_left_to_it() -> None:
    layer: Any = adapted("nf4")
    assert parts_of(layer, _rows()) is not None
    assert parts_of(layer, _rows().bfloat16()) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert parts_of(layer, _rows().bfloat16()) is not None
    assert parts_of(nn.Embedding(3, 3), _rows()) is None


def test_layers_that_read_the_same_rows_share_one_copy_until_the_rows_change() -> None:
    rows = _rows()
    first = cast_once(rows, torch.bfloat16)
    assert cast_once(rows, torch.bfloat16) is first
    assert cast_once(rows, torch.float16) is not first
    same = cast_once(rows, torch.float32)
    assert same.data_ptr() == rows.data_ptr()
    again = cast_once(rows, torch.bfloat16)
    rows.add_(1)
    changed = cast_once(rows, torch.bfloat16)
    assert changed is not again
    assert torch.equal(changed, rows.bfloat16())
