"""Lean LoRA layers: the numbers of peft's, with less kept and fewer products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lowmem_ft.memory import products
from lowmem_ft.memory.lora import FEWEST_ROWS, apply_lean_lora, remove_lean_lora
from tests.memory.test_linears import INPUTS, LAYERS, adapted
from tests.tiny import FAMILIES, VOCABULARY, add_lora, tiny_llama


def _rows(seed: int = 1) -> Tensor:
    return torch.randn(2, 40, INPUTS, generator=torch.Generator().manual_seed(seed))


def _run(layer: Any, rows: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Output, and the gradients of rows, A and B."""
    rows = rows.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        out = layer(rows)
    torch.manual_seed(7)
    (out * torch.randn(out.shape)).sum().backward()
    return [out.detach(), rows.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", LAYERS)
def test_result_and_gradients_equal_those_of_peft(kind: str, dropout: float, recomputed: bool) -> None:
    layer = adapted(kind, dropout)
    expected = _run(layer, _rows())
    assert apply_lean_lora(layer) == 1
    if recomputed:
        inner = layer.forward
        layer.forward = lambda rows: checkpoint(inner, rows, use_reentrant=False)
    for ours, theirs in zip(_run(layer, _rows()), expected, strict=True):
        assert ours.dtype == theirs.dtype
        # fp32 sums of up to 96 terms in another order, of numbers up to 50
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("able", [True, False], ids=["16-bit products", "widened products"])
@pytest.mark.parametrize("kind", LAYERS)
def test_under_autocast_it_is_as_near_to_fp32_as_peft(kind: str, able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: able)
    layer = adapted(kind)
    exact, theirs = _run(layer, _rows()), _run(layer, _rows(), torch.bfloat16)
    apply_lean_lora(layer)
    ours = _run(layer, _rows(), torch.bfloat16)
    assert ours[0].dtype == torch.bfloat16
    for one, other, reference in zip(ours, theirs, exact, strict=True):
        # int8 and nf4 of bitsandbytes multiply in fp32 where the rows are: the rounding of the weight is ours alone
        bound = max(1.2 * float((other - reference).norm()), 2**-7 * float(reference.norm()))
        assert float((one.float() - reference).norm()) <= bound


def _kept_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of storages that the graph of `run` keeps, parameters left out."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def test_layers_that_read_one_input_keep_it_once_in_the_type_of_the_computation() -> None:
    layers = [adapted("nf4") for _ in range(3)]
    for layer in layers:
        apply_lean_lora(layer)

    def run() -> Tensor:
        rows = _rows().requires_grad_() * 1
        with torch.autocast("cpu", torch.bfloat16):
            return torch.stack([layer(rows) for layer in layers]).sum()

    assert _kept_bytes(run) == _rows().numel() * 2


class _Products(TorchDispatchMode):
    """Counts products whose result has at least so many numbers."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.count = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm") and out.numel() >= self.least:
            self.count += 1
        return out


def test_the_last_product_of_a_block_is_not_made_again() -> None:
    layer: Any = adapted("no bias")
    apply_lean_lora(layer)
    rows = _rows().requires_grad_()
    out = checkpoint(layer, rows, use_reentrant=False)
    with _Products(80 * 60) as products_of_backward:
        out.sum().backward()
    assert products_of_backward.count == 1  # the gradient of the rows


def test_the_products_of_a_layer_are_three_forward_and_five_backward() -> None:
    layer: Any = adapted("no bias")
    apply_lean_lora(layer)
    rows = _rows().requires_grad_()
    with _Products(0) as forward:
        out = layer(rows)
    with _Products(0) as backward:
        out.sum().backward()
    # in-place sums of products are not counted: one forward, one backward
    assert (forward.count, backward.count) == (2, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_trains_as_with_peft(family: str) -> None:
    ids = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    model, _ = add_lora(FAMILIES[family](), rank=4, alpha=8, autocast=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    results = []
    for lean in (False, True):
        if lean:
            assert apply_lean_lora(model) >= 8
        model.train().zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_twice_applied_is_once_and_taking_it_away_brings_back_the_layers_own() -> None:
    layer: Any = adapted("nf4")
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(_rows())
        apply_lean_lora(layer)
        lean = layer(_rows())
        apply_lean_lora(layer)
        assert torch.equal(layer(_rows()), lean)
        assert lean.dtype == torch.bfloat16 != before.dtype
        assert torch.equal(copy.deepcopy(layer)(_rows()), lean)
        remove_lean_lora(layer)
        assert torch.equal(layer(_rows()), before)
    assert "forward" not in layer.__dict__


def test_what_it_cannot_do_the_layer_does_as_before() -> None:
    layer: Any = adapted("plain")
    layer.enable_adapters(False)
    base = layer(_rows())
    layer.enable_adapters(True)
    apply_lean_lora(layer)
    assert not torch.allclose(layer(_rows()), base)
    layer.enable_adapters(False)
    assert torch.equal(layer(_rows()), base)


def test_single_rows_without_gradients_take_the_layers_own_path() -> None:
    layer: Any = adapted("plain")
    few = torch.randn(FEWEST_ROWS - 1, INPUTS)
    with torch.no_grad():
        before = layer(few)
        apply_lean_lora(layer)
        assert torch.equal(layer(few), before)


def test_a_parameter_that_changed_before_backward_is_an_error() -> None:
    layer: Any = adapted("plain")
    apply_lean_lora(layer)
    out = layer(_rows().requires_grad_())
    with torch.no_grad():
        layer.lora_B["default"].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_generation_is_as_before() -> None:
    model, _ = add_lora(tiny_llama(), rank=4, alpha=8, autocast=False)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(3, 43)[None]
    before = model.generate(input_ids=ids, **settings)
    apply_lean_lora(model)
    assert torch.equal(model.generate(input_ids=ids, **settings), before)
