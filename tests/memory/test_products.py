"""Products in the type that the processor multiplies in: equal results, whatever the processor can do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowmem_ft.memory import products
from lowmem_ft.memory.products import (
    MOST_ROWS,
    cpu_multiplies_in_16_bits,
    multiply,
    product_dtype,
    times,
    times_transposed,
    widen,
)

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["without bf16 products", "with bf16 products"])
def able(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize(
    ("abilities", "expected"),
    [
        ({"architecture": "x86_64", "avx2": True}, False),
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, True),
        ({"architecture": "aarch64"}, True),
        ({}, True),
    ],
)
def test_a_cpu_is_asked_what_it_can_do(
    abilities: dict[str, object], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    cpu_multiplies_in_16_bits.cache_clear()
    try:
        assert cpu_multiplies_in_16_bits() is expected
    finally:
        cpu_multiplies_in_16_bits.cache_clear()


def test_only_16_bit_types_on_a_cpu_that_cannot_are_widened(able: bool) -> None:
    for dtype in products.HALVES:
        assert product_dtype(dtype, CPU) == (dtype if able else torch.float32)
        assert product_dtype(dtype, torch.device("cuda")) == product_dtype(dtype, torch.device("meta")) == dtype
    for dtype in (torch.float32, torch.float64):
        assert product_dtype(dtype, CPU) == dtype
    rows = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert (widen(rows) is rows) == able


def _operands(weight_dtype: torch.dtype, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    rows, weight = torch.randn(9, 16).bfloat16(), torch.randn(50, 16)
    weight = weight.bfloat16().to(weight_dtype) if exact else weight.to(weight_dtype)
    return rows, weight, torch.randn(9, 50)


@pytest.mark.parametrize("slice_bytes", [2**25, 100])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_products_with_a_frozen_weight_equal_those_of_the_rounded_operands(
    able: bool, weight_dtype: torch.dtype, exact: bool, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SLICE_BYTES", slice_bytes)
    rows, weight, grad = _operands(weight_dtype, exact)
    before = weight.clone()
    reference = weight.bfloat16().double()
    out = times_transposed(rows, weight)
    back = times(grad, weight, torch.bfloat16)
    assert out.dtype == back.dtype == product_dtype(torch.bfloat16, CPU)
    # fp32 sums of 16 to 50 terms; where the result is bf16 it is rounded once (2**-9), and so is `grad`; slices of
    # one row are added up in bf16, a rounding each
    tolerance = 2**-5 if able else 1e-5
    torch.testing.assert_close(out.double(), rows.double() @ reference.t(), atol=tolerance, rtol=tolerance)
    atol = tolerance * 20 if able else 1e-4
    torch.testing.assert_close(back.double(), grad.double() @ reference, atol=atol, rtol=tolerance)
    assert torch.equal(weight, before)


def test_a_weight_that_was_changed_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: False)
    rows, weight, _ = _operands(torch.float32, exact=True)
    assert torch.equal(times_transposed(rows, weight), rows.float() @ weight.t())
    weight.add_(2.0**-20)  # no longer a number of bf16
    rounded = weight.bfloat16().float()
    assert not torch.equal(rounded, weight)
    torch.testing.assert_close(times_transposed(rows, weight), rows.float() @ rounded.t(), atol=1e-6, rtol=1e-6)


def test_autocast_does_not_narrow_what_was_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: False)
    rows, weight, grad = _operands(torch.float32, exact=True)
    expected = times_transposed(rows, weight), times(grad, weight, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = times_transposed(rows, weight), times(grad, weight, torch.bfloat16)
        assert torch.is_autocast_enabled("cpu")
        assert (rows @ rows.t()).dtype == torch.bfloat16
    assert all(torch.equal(one, other) and one.dtype == torch.float32 for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(MOST_ROWS, 400, 300), (1100, 400, 300), (1100, 400, 64), (1100, 8, 300)], ids=str)
def test_a_product_in_parts_is_the_product(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    count, terms, width = shape
    rows, matrix = torch.randn(count, terms).to(dtype), torch.randn(width, terms).to(dtype).t()
    exact = rows.double() @ matrix.double()
    # each number is rounded once, to 8 or 24 digits, from a sum in fp32 of at most 400 terms of size 1
    torch.testing.assert_close(
        multiply(rows, matrix).double(), exact, rtol=2**-8 if dtype.itemsize == 2 else 1e-5, atol=1e-3
    )


def test_only_16_bit_products_of_middle_width_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    product = torch.mm

    def watched(rows: Tensor, matrix: Tensor, *, out: Tensor) -> Tensor:
        parts.append(rows.shape[0])
        return product(rows, matrix, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    rows = torch.randn(2 * MOST_ROWS + 5, 400).bfloat16()
    multiply(rows, torch.randn(400, 300).bfloat16())
    assert parts == [MOST_ROWS, MOST_ROWS, 5]
    parts.clear()
    multiply(rows, torch.randn(400, 64).bfloat16())
    multiply(rows, torch.randn(400, 1100).bfloat16())
    multiply(rows[:, :8], torch.randn(8, 300).bfloat16())
    multiply(rows[:MOST_ROWS], torch.randn(400, 300).bfloat16())
    multiply(rows.float(), torch.randn(400, 300))
    assert parts == []
