"""Rows of several examples: each is attended alone, whatever the architecture, the window and the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lowmem_ft.errors import ModelError
from lowmem_ft.memory import attention, products
from lowmem_ft.memory.attention import apply_packed_attention, packed_attention, packed_examples, why_not_packed
from tests.tiny import FAMILIES, VOCABULARY, tiny_gemma3, tiny_llama

LENGTHS = (5, 19, 1, 12)


def _examples(seed: int, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (1, length), generator=generator) for length in lengths]


def _row(examples: Sequence[Tensor]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(e.shape[1]) for e in examples])[None]
    return {"input_ids": torch.cat(list(examples), dim=1), "position_ids": positions}


@pytest.mark.parametrize("kernel", ["plain", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_examples_alone(family: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "fused":
        monkeypatch.setattr(attention, "PLAIN_MOST_TOKENS", 0)
    model = FAMILIES[family]()
    examples = _examples(1)
    alone = torch.cat([model(input_ids=e, use_cache=False).logits for e in examples], dim=1)
    apply_packed_attention(model)
    with packed_examples(LENGTHS):
        packed = model(**_row(examples), use_cache=False).logits
    # fp32 sums in another order; logits of these models are of size 1
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-5)


def test_an_example_does_not_see_its_neighbours() -> None:
    model = tiny_llama()
    apply_packed_attention(model)
    first, second = _examples(1), _examples(2)
    second[1] = first[1]
    outputs = []
    for examples in (first, second):
        with packed_examples(LENGTHS):
            outputs.append(model(**_row(examples), use_cache=False).logits[:, 5:24])
    assert torch.equal(outputs[0], outputs[1])


def test_a_window_shorter_than_an_example_is_kept_and_changes_the_result() -> None:
    examples = _examples(1)
    windowed, wide = tiny_gemma3(window=8), tiny_gemma3(window=64)
    outputs = []
    for model in (windowed, wide):
        apply_packed_attention(model)
        with packed_examples(LENGTHS):
            outputs.append(model(**_row(examples), use_cache=False).logits)
    assert torch.equal(outputs[0][:, :5], outputs[1][:, :5])  # shorter than either window
    assert not torch.allclose(outputs[0][:, 20:24], outputs[1][:, 20:24], atol=1e-4)


def test_dropout_on_attention_weights_goes_to_the_kernel_that_knows_it() -> None:
    query = torch.randn(1, 4, 9, 16)
    mask = attention.ExampleMask((4, 5), (None, None))
    torch.manual_seed(0)
    dropped, _ = packed_attention(nn.Identity(), query, query, query, mask, dropout=0.9)
    kept, _ = packed_attention(nn.Identity(), query, query, query, mask)
    assert dropped.shape == kept.shape == (1, 9, 4, 16)
    assert not torch.allclose(dropped, kept)


def test_padding_caches_and_generation_work_as_before() -> None:
    model = tiny_llama()
    ids = torch.cat(_examples(5, (7, 7)))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(input_ids=ids, attention_mask=mask, **settings)
    logits = model(input_ids=ids, attention_mask=mask).logits
    assert apply_packed_attention(model) == "sdpa"
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, logits)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **settings), before)


def test_recompute_outside_the_context_sees_the_same_examples() -> None:
    """Backward runs when `packed_examples` has ended; the lengths travel in the mask."""
    gradients = []
    for recompute in (False, True):
        model = tiny_llama().train()
        apply_packed_attention(model)
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with packed_examples(LENGTHS):
            loss = model(**_row(_examples(1)), use_cache=False).logits.square().mean()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_lengths_that_do_not_fit_the_row_are_refused() -> None:
    model = tiny_llama()
    apply_packed_attention(model)
    with packed_examples((5, 5)), pytest.raises(ValueError, match=r"says 10 tokens, the row has 12"):
        model(input_ids=torch.ones(1, 12, dtype=torch.long), use_cache=False)


def test_models_whose_attention_cannot_be_exchanged_are_refused_with_the_reason() -> None:
    assert "not one of transformers" in (why_not_packed(nn.Linear(2, 2)) or "")
    model = tiny_llama()
    model.config.attn_logit_softcapping = 30.0
    with pytest.raises(ModelError, match="caps its attention scores"):
        apply_packed_attention(model)
    mixing = tiny_llama()
    mixing.config.layer_types = ["linear_attention", "full_attention"]
    assert "linear_attention" in (why_not_packed(mixing) or "")
    assert all(why_not_packed(make()) is None for make in FAMILIES.values())


def test_scores_that_packed_attention_cannot_compute_are_an_error() -> None:
    query = torch.randn(1, 2, 3, 8)
    mask = attention.ExampleMask((3,), (None,))
    with pytest.raises(ModelError, match="softcap"):
        packed_attention(nn.Identity(), query, query, query, mask, softcap=50.0)


def test_a_row_of_short_and_long_examples_goes_to_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    query, key, value = (torch.randn(1, heads, 37, 16) for heads in (6, 2, 2))
    mask = attention.ExampleMask(LENGTHS, (None,) * 4)
    results = []
    for most in (0, 10, 1000):
        monkeypatch.setattr(attention, "PLAIN_MOST_TOKENS", most)
        results.append(packed_attention(nn.Identity(), query, key, value, mask)[0])
    # fp32 sums in another order
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[2], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("most", [0, 1000], ids=["fused", "plain"])
def test_widened_products_give_the_result_and_gradients_of_16_bit_ones(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PLAIN_MOST_TOKENS", most)
    torch.manual_seed(3)
    values = [torch.randn(1, heads, 33, 16).bfloat16() for heads in (6, 2, 2)]
    target = torch.randn(1, 33, 6, 16)
    mask = attention.ExampleMask((33,), (None,))
    results = []
    for dtype, able in ((torch.float64, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda able=able: able)
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in values]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out, _ = packed_attention(nn.Identity(), *inputs, mask, scaling=0.25)
        (out.double() * target).sum().backward()
        results.append([out.detach(), *(t.grad for t in inputs if t.grad is not None)])
    exact, narrow, wide = results
    for reference, theirs, ours in zip(exact, narrow, wide, strict=True):
        assert ours.dtype == torch.bfloat16
        # what is kept is rounded to bf16 in both; fewer roundings on the way can only help
        assert not torch.equal(ours, theirs)
        assert (ours.double() - reference).norm() <= 1.1 * (theirs.double() - reference).norm()
        torch.testing.assert_close(ours.double(), reference, atol=0.05, rtol=0.05)
