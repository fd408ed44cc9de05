"""A row of short examples by plain products: the result, the gradients and what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowmem_ft.memory import products
from lowmem_ft.memory.plain_attention import MULTIPLE, plain_attention

LENGTHS = (5, 33, 1, 32, 19)


def _operands(dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, width: int = 16) -> list[Tensor]:
    torch.manual_seed(3)
    wide = [torch.randn(heads, sum(lengths), width, dtype=torch.float64) for heads in (6, 2, 2)]
    return [tensor.to(torch.bfloat16).to(dtype) for tensor in wide]


def _eager(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Each example alone, with a mask and repeated key heads."""
    groups, outputs, start = query.shape[0] // key.shape[0], [], 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        keys, values = (tensor[:, part].repeat_interleave(groups, 0) for tensor in (key, value))
        scores = (query[:, part] @ keys.transpose(1, 2)) * scale
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs.append((scores.masked_fill(future, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


def _run(function: object, inputs: list[Tensor], scale: float) -> list[Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    out: Tensor = function(*inputs, LENGTHS, scale)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(5)
    (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


@pytest.mark.parametrize("scale", [0.25, 0.3], ids=["power of two", "any"])
def test_result_and_gradients_equal_eager_attention_of_each_example_alone(scale: float) -> None:
    inputs = _operands(torch.float64)
    ours, reference = _run(plain_attention, inputs, scale), _run(_eager, inputs, scale)
    assert len(ours) == len(reference) == 4
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)  # sums in another order


@pytest.mark.parametrize("scale", [0.25, 0.3], ids=["power of two", "any"])
def test_in_16_bits_it_is_as_exact_as_eager_attention_with_its_softmax_in_fp32(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: True)

    def eager_16(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        return _eager(query.float(), key.float(), value.float(), lengths, scale).to(query.dtype)

    exact = _run(_eager, _operands(torch.float64), scale)
    theirs, ours = (
        _run(eager_16, _operands(torch.bfloat16), scale),
        _run(plain_attention, _operands(torch.bfloat16), scale),
    )
    for reference, other, one in zip(exact, theirs, ours, strict=True):
        assert one.dtype == torch.bfloat16
        size = reference.norm()
        # bf16 has 8 digits: each of the few roundings on the way moves a number by at most 1/256 of itself
        assert (one.double() - reference).norm() <= 3 / 256 * size
        assert (other.double() - reference).norm() <= 3 / 256 * size


def test_few_shapes_occur_in_16_bits_and_filling_up_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, ...]] = set()
    product = torch.bmm

    def watched(first: Tensor, second: Tensor) -> Tensor:
        seen.add(tuple(first.shape))
        return product(first, second)

    monkeypatch.setattr(torch, "bmm", watched)
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: True)
    filled = plain_attention(*_operands(torch.bfloat16), LENGTHS, 0.25)
    assert {shape[-1] for shape in seen} == {MULTIPLE, 2 * MULTIPLE}
    start = 0
    for length in LENGTHS:
        inputs = [tensor[:, start : start + length] for tensor in _operands(torch.bfloat16)]
        alone = plain_attention(*inputs, (length,), 0.25)  # filled up with zeros, not with the next example
        assert torch.equal(filled[start : start + length], alone)
        start += length


def test_what_is_kept_is_the_operands_and_the_probabilities_in_their_type() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    inputs = [tensor.requires_grad_() for tensor in _operands(torch.float32)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        plain_attention(*inputs, LENGTHS, 0.25)
    numbers = sum(tensor.numel() for tensor in inputs) + sum(6 * length * length for length in LENGTHS)
    assert sum(tensor.numel() for tensor in kept) == numbers
    assert all(tensor.dtype == torch.float32 for tensor in kept)
