"""The loss of a row through the model's own parts, and the check that a head does nothing unknown."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM

from lowmem_ft.data.batches import make_row
from lowmem_ft.data.formats import TokenizedExample
from lowmem_ft.errors import ModelError
from lowmem_ft.memory.attention import apply_packed_attention
from lowmem_ft.training.causal import CausalLoss, fill_up
from tests.tiny import FAMILIES, VOCABULARY, add_lora, tiny_gemma3, tiny_llama

EXAMPLES = [
    TokenizedExample([5, 6, 7, 8, 2], [0, 0, 1, 1, 1], "f", 1),
    TokenizedExample([9, 10, 2], [0, 1, 1], "f", 2),
]


def _plain_loss(model: nn.Module) -> Tensor:
    total = torch.zeros(())
    for example in EXAMPLES:
        ids = torch.tensor([list(example.input_ids)])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total = total + (losses * torch.tensor(list(example.weights))[1:]).sum()
    return total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_peft", [True, False])
def test_the_loss_is_the_plain_one(family: str, with_peft: bool) -> None:
    model = FAMILIES[family]()
    expected = _plain_loss(model)
    apply_packed_attention(model)
    loss = CausalLoss(add_lora(model, rank=2, alpha=4)[0] if with_peft else model)
    loss.check_head()
    torch.testing.assert_close(loss(make_row(EXAMPLES)), expected, atol=1e-5, rtol=1e-5)


def test_final_soft_capping_is_applied() -> None:
    model = tiny_gemma3()
    model.config.final_logit_softcapping = 0.5
    expected = _plain_loss(model)
    apply_packed_attention(model)
    loss = CausalLoss(model)
    loss.check_head()
    torch.testing.assert_close(loss(make_row(EXAMPLES)), expected, atol=1e-5, rtol=1e-5)


def test_a_head_that_scales_its_logits_is_refused() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = GraniteConfig(vocab_size=VOCABULARY, num_key_value_heads=2, logits_scaling=0.05, **sizes)
    with pytest.raises(
        ModelError, match=r"GraniteForCausalLM: its own loss is .* a token, ours .*: it changes its logits"
    ):
        CausalLoss(GraniteForCausalLM(config)).check_head()


def test_only_the_head_is_checked_whatever_the_body_rounds_to() -> None:
    model = tiny_llama()

    def other_each_time(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + torch.randn_like(output)

    model.get_input_embeddings().register_forward_hook(other_each_time)
    apply_packed_attention(model)
    CausalLoss(model).check_head()


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ModelError, match="no separate backbone and output head"):
        CausalLoss(tiny_llama().model)


def test_checking_leaves_the_mode_as_it_was() -> None:
    loss = CausalLoss(tiny_llama(), packed=False).train()
    loss.check_head()
    assert loss.training
    assert loss.model.training


@pytest.mark.parametrize("packed", [True, False])
def test_filling_rows_up_changes_no_loss_and_no_gradient(packed: bool) -> None:
    rows = [make_row(EXAMPLES)] if packed else [make_row([example]) for example in EXAMPLES]
    results = []
    for multiple in (1, 32):
        model = tiny_llama().train()
        if packed:
            apply_packed_attention(model)
        loss = CausalLoss(model, packed=packed, row_multiple=multiple)
        total = sum(loss(row) for row in rows)
        assert isinstance(total, Tensor)
        total.backward()
        results.append([total.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for plain, filled in zip(*results, strict=True):
        torch.testing.assert_close(filled, plain, atol=1e-5, rtol=1e-5)


def test_filler_makes_rows_of_few_lengths_behind_the_examples() -> None:
    row = fill_up(make_row(EXAMPLES), 32, packed=True)
    assert row.input_ids.shape == row.position_ids.shape == row.labels.shape == (1, 32)
    assert row.lengths == (5, 3, 24)
    assert row.position_ids[0, 8:].tolist() == list(range(24))
    assert set(row.labels[0, 8:].tolist()) == {-100}
    assert row.trained_tokens == make_row(EXAMPLES).trained_tokens
    assert fill_up(make_row(EXAMPLES), 8, packed=True).lengths == (5, 3)
    weighted = make_row([TokenizedExample([5, 6, 7], [0, 0.5, 1], "f", 1)])
    alone = fill_up(weighted, 4, packed=False)
    assert (alone.lengths, alone.position_ids.tolist()) == ((4,), [[0, 1, 2, 3]])
    assert alone.weights is not None
    assert alone.weights.tolist() == [[0.5, 1.0, 0.0, 0.0]]
