"""Lean MLPs: the numbers of the model's own, with less kept, whole and in slices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP

from lowmem_ft.memory import products
from lowmem_ft.memory.lora import apply_lean_lora
from lowmem_ft.memory.mlp import FEWEST_ROWS, apply_lean_mlp, is_gated_mlp, remove_lean_mlp
from tests.tiny import VOCABULARY, add_lora, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_qwen3

HIDDEN, INNER, TOKENS = 64, 128, 80
GATED = {"llama": tiny_llama, "gemma3": tiny_gemma3, "qwen3": tiny_qwen3}


def _model(family: str = "llama", dropout: float = 0.0) -> Any:
    model, _ = add_lora(GATED[family](), rank=4, alpha=8, dropout=dropout, autocast=False)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def _mlp(model: Any) -> Any:
    return next(module for module in model.modules() if is_gated_mlp(module))


def _rows() -> Tensor:
    return torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(1))


def _run(mlp: Any, autocast: bool = False, recompute: bool = False) -> list[Tensor]:
    rows = _rows().requires_grad_()
    mlp.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = checkpoint(mlp, rows, use_reentrant=False) if recompute else mlp(rows)
    torch.manual_seed(7)
    (out * torch.randn(out.shape)).sum().backward()
    return [out.detach(), rows.grad, *(p.grad for p in mlp.parameters() if p.requires_grad)]  # type: ignore[list-item]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("slice_tokens", [None, 7, 1000])
@pytest.mark.parametrize("family", GATED)
def test_result_and_gradients_equal_the_models_own(
    family: str, slice_tokens: int | None, dropout: float, recompute: bool
) -> None:
    mlp = _mlp(_model(family, dropout))
    expected = _run(mlp)
    assert apply_lean_mlp(mlp, slice_tokens=slice_tokens) == 1
    got = _run(mlp, recompute=recompute)
    assert len(got) == len(expected) == 8
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)  # fp32 sums in another order


@pytest.mark.parametrize("able", [True, False], ids=["16-bit products", "widened products"])
@pytest.mark.parametrize("slice_tokens", [None, 16])
def test_under_autocast_it_is_as_near_to_fp32_as_the_models_own(
    slice_tokens: int | None, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: able)
    mlp = _mlp(_model())
    exact, theirs = _run(mlp), _run(mlp, autocast=True)
    apply_lean_mlp(mlp, slice_tokens=slice_tokens)
    ours = _run(mlp, autocast=True)
    assert ours[0].dtype == torch.bfloat16
    for one, other, reference in zip(ours, theirs, exact, strict=True):
        assert (one.float() - reference).norm() <= 1.2 * (other.float() - reference).norm()


@pytest.mark.parametrize("family", GATED)
def test_whole_models_train_as_before(family: str) -> None:
    ids = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    model = _model(family)
    results = []
    for lean in (False, True):
        if lean:
            assert apply_lean_lora(model) == 14
            assert apply_lean_mlp(model, slice_tokens=10) == 2
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) == 29
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def _kept_bytes(run: Callable[[], Tensor]) -> int:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.grad_fn is not None
    return sum(kept.values())


@pytest.mark.parametrize(("slice_tokens", "numbers"), [(None, HIDDEN + 2 * INNER), (16, HIDDEN)])
def test_it_keeps_what_its_formula_says(slice_tokens: int | None, numbers: int) -> None:
    mlp = _mlp(_model())
    apply_lean_mlp(mlp, slice_tokens=slice_tokens)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mlp(_rows().requires_grad_())

    assert _kept_bytes(run) == TOKENS * numbers * 2


class _Watch(TorchDispatchMode):
    """The largest result of an operator, and the count of products of at least so many numbers."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least, self.largest, self.products = least, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
            self.products += func._schema.name in ("aten::mm", "aten::addmm") and out.numel() >= self.least
        return out


def test_slices_bound_what_is_made_inside() -> None:
    tokens, step = 4096, 8
    mlp = _mlp(_model())
    apply_lean_mlp(mlp, slice_tokens=step)
    rows = torch.randn(1, tokens, HIDDEN, requires_grad=True)
    with _Watch() as watch:
        mlp(rows).sum().backward()
    assert watch.largest == tokens * HIDDEN
    apply_lean_mlp(mlp)
    with _Watch() as whole:
        mlp(rows).sum().backward()
    assert whole.largest == tokens * INNER


@pytest.mark.parametrize(("slice_tokens", "expected"), [(None, 2 + 3), (1000, 2 + 3)])
def test_the_last_product_is_not_made_again(slice_tokens: int | None, expected: int) -> None:
    mlp = _mlp(_model())
    apply_lean_mlp(mlp, slice_tokens=slice_tokens)
    out = checkpoint(mlp, _rows().requires_grad_(), use_reentrant=False)
    with _Watch(TOKENS * HIDDEN) as watch:
        out.sum().backward()
    assert watch.products == expected  # gate and up again; the gradients of three inputs


class _Summed(LlamaMLP):
    """The parts of a gated MLP, put together otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def test_an_mlp_that_computes_something_else_is_left_alone() -> None:
    model = tiny_llama().requires_grad_(False)
    model.model.layers[1].mlp = _Summed(model.config).requires_grad_(False)
    assert apply_lean_mlp(model) == 1
    assert "forward" not in model.model.layers[1].mlp.__dict__


def test_other_parts_or_weights_of_its_own_make_it_another_mlp() -> None:
    mlp = _mlp(tiny_llama())
    assert is_gated_mlp(mlp)
    mlp.norm = nn.LayerNorm(3)
    assert not is_gated_mlp(mlp)
    assert not any(is_gated_mlp(module) for module in tiny_gpt2().modules())
    own = _mlp(tiny_llama())
    own.scale = nn.Parameter(torch.ones(1))
    assert not is_gated_mlp(own)
    in_place = _mlp(tiny_llama())
    in_place.act_fn = nn.SiLU(inplace=True)
    assert not is_gated_mlp(in_place)


def test_trained_weights_switched_off_adapters_and_single_rows_take_the_models_own_path() -> None:
    whole = _mlp(tiny_llama())  # all weights train
    before = whole(_rows())
    apply_lean_mlp(whole)
    assert torch.equal(whole(_rows()), before)
    model = _model()
    mlp = _mlp(model)
    few = torch.randn(FEWEST_ROWS - 1, HIDDEN)
    with torch.no_grad():
        alone = mlp(few)
        with model.disable_adapter():
            base = mlp(_rows())
        apply_lean_mlp(mlp)
        assert torch.equal(mlp(few), alone)
        with model.disable_adapter():
            torch.testing.assert_close(mlp(_rows()), base, atol=1e-5, rtol=1e-5)


def test_twice_applied_is_once_and_it_can_be_taken_away_and_copied() -> None:
    mlp = _mlp(_model())
    before = mlp(_rows())
    apply_lean_mlp(mlp, slice_tokens=7)
    apply_lean_mlp(mlp)
    lean = mlp(_rows())
    assert torch.equal(copy.deepcopy(mlp)(_rows()), lean)
    remove_lean_mlp(mlp)
    assert "forward" not in mlp.__dict__
    assert torch.equal(mlp(_rows()), before)


def test_a_slice_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        apply_lean_mlp(tiny_llama(), slice_tokens=0)
