"""The chunked loss against the plain one: value and every gradient, for every kind of head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_ft.errors import ModelError
from lowmem_ft.memory import products
from lowmem_ft.memory.loss import auto_chunk_tokens, chunked_loss
from tests.tiny import tiny_llama

ROWS, POSITIONS, HIDDEN, VOCABULARY = 2, 9, 16, 50


def _inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, POSITIONS, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCABULARY, (ROWS, POSITIONS), generator=generator)
    labels[torch.rand(ROWS, POSITIONS, generator=generator) < 0.4] = -100
    return hidden, labels


def _plain(hidden: Tensor, head: nn.Module, labels: Tensor, softcap: float | None = None) -> Tensor:
    logits = head(hidden).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


class _LoraHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
        self.first = nn.Linear(HIDDEN, 4, bias=False)
        self.second = nn.Linear(4, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.second(self.first(hidden))


HEADS: dict[str, Any] = {
    "frozen": lambda: nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False),
    "trained": lambda: nn.Linear(HIDDEN, VOCABULARY, bias=False),
    "bias": lambda: nn.Linear(HIDDEN, VOCABULARY, bias=True),
    "lora": _LoraHead,
}


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", HEADS)
def test_value_and_gradients_equal_the_plain_loss(kind: str, softcap: float | None, chunk_tokens: int) -> None:
    torch.manual_seed(1)
    head = HEADS[kind]()
    results = []
    for chunked in (True, False):
        hidden, labels = _inputs()
        hidden.requires_grad_()
        head.zero_grad(set_to_none=True)
        if chunked:
            loss = chunked_loss(hidden, head, labels, chunk_tokens=chunk_tokens, softcap=softcap)
        else:
            loss = _plain(hidden, head, labels, softcap)
        (loss / 7).backward()
        trained = [p.grad.clone() for p in head.parameters() if p.grad is not None]
        assert hidden.grad is not None
        results.append([loss.detach(), hidden.grad, *trained])
    assert len(results[0]) == len(results[1]) == {"frozen": 2, "trained": 3, "bias": 4, "lora": 4}[kind]
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


def test_a_tied_head_adds_its_gradient_to_that_of_the_embedding() -> None:
    gradients = []
    for chunked in (True, False):
        model = tiny_llama().train()
        ids = torch.arange(3, 23)[None]
        labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        loss = (
            chunked_loss(hidden, model.lm_head, labels, chunk_tokens=4)
            if chunked
            else _plain(hidden, model.lm_head, labels)
        )
        loss.backward()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.grad is not None
        gradients.append(model.lm_head.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-5)


def test_lora_by_peft_on_the_head_gets_the_plain_gradients() -> None:
    gradients = []
    for chunked in (True, False):
        torch.manual_seed(4)
        config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        model = get_peft_model(tiny_llama(tie_word_embeddings=False), config).get_base_model()
        hidden, labels = torch.randn(1, 8, 64), torch.randint(0, 448, (1, 8))
        loss = (
            chunked_loss(hidden, model.lm_head, labels, chunk_tokens=3)
            if chunked
            else _plain(hidden, model.lm_head, labels)
        )
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(gradients[0]) == 2
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


def test_weights_scale_the_loss_and_gradient_of_their_positions() -> None:
    head = HEADS["trained"]()
    hidden, labels = _inputs()
    weights = torch.rand(ROWS, POSITIONS)
    results = []
    for chunked in (True, False):
        inputs = hidden.clone().requires_grad_()
        head.zero_grad(set_to_none=True)
        if chunked:
            loss = chunked_loss(inputs, head, labels, weights=weights, chunk_tokens=4)
        else:
            losses = nn.functional.cross_entropy(head(inputs).flatten(0, 1), labels.flatten(), reduction="none")
            loss = (losses * weights.flatten()).sum()
        loss.backward()
        assert inputs.grad is not None
        results.append([loss.detach(), inputs.grad, head.weight.grad.clone()])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


def test_positions_known_beforehand_change_no_bit() -> None:
    hidden, labels = _inputs()
    head = HEADS["frozen"]()
    found = []
    for positions in (None, (labels.flatten() != -100).nonzero().squeeze(-1)):
        asking = hidden.clone().requires_grad_()
        loss = chunked_loss(asking, head, labels, chunk_tokens=3, positions=positions)
        loss.backward()
        found.append((loss, asking.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_no_trained_position_gives_zero_that_stays_in_the_graph() -> None:
    hidden = torch.randn(1, 4, HIDDEN, requires_grad=True)
    loss = chunked_loss(hidden, HEADS["frozen"](), torch.full((1, 4), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_the_head_never_sees_more_positions_than_a_chunk_nor_any_untrained_one() -> None:
    seen: list[int] = []
    head = HEADS["frozen"]()
    head.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[0]))
    hidden, labels = _inputs()
    chunked_loss(hidden.requires_grad_(), head, labels, chunk_tokens=4).backward()
    trained = int((labels != -100).sum())
    assert sum(seen) == trained < ROWS * POSITIONS
    assert max(seen) <= 4


def test_evaluation_computes_no_gradient() -> None:
    hidden, labels = _inputs()
    head = HEADS["trained"]()
    with torch.no_grad():
        loss = chunked_loss(hidden, head, labels, chunk_tokens=4)
    torch.testing.assert_close(loss, _plain(hidden, head, labels).detach(), atol=1e-5, rtol=1e-5)
    assert not loss.requires_grad


def test_bf16_autocast_keeps_sums_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: True)
    hidden, labels = _inputs()
    head = HEADS["frozen"]()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(hidden.requires_grad_(), head, labels, chunk_tokens=4)
        reference = _plain(hidden.detach(), head, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, reference, atol=1e-4, rtol=1e-5)  # same bf16 logits, other order of the sum


def test_shapes_and_labels_that_cannot_be_are_errors() -> None:
    hidden, labels = _inputs()
    with pytest.raises(ModelError, match="shape"):
        chunked_loss(hidden, HEADS["frozen"](), labels[:, :-1])
    with pytest.raises(ModelError, match="a label is 50, the head knows 50 tokens"):
        chunked_loss(hidden, HEADS["frozen"](), torch.full_like(labels, VOCABULARY))
    with pytest.raises(ValueError, match="at least 1"):
        chunked_loss(hidden, HEADS["frozen"](), labels, chunk_tokens=0)


def test_auto_chunks_keep_logits_under_32_mib() -> None:
    assert auto_chunk_tokens(49152) == 170
    assert auto_chunk_tokens(49152) * 49152 * 4 <= 32 * 2**20
    assert auto_chunk_tokens(10**7) == 16


@pytest.mark.parametrize("able", [True, False], ids=["16-bit products", "widened products"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_under_autocast_gives_the_loss_and_gradient_of_its_rounded_weight(
    weight_dtype: torch.dtype, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_in_16_bits", lambda: able)
    torch.manual_seed(1)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=True).requires_grad_(False).to(weight_dtype)
    rounded = nn.Linear(HIDDEN, VOCABULARY, bias=True).requires_grad_(False)
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in head.state_dict().items()})
    hidden, labels = _inputs()
    ours, plain = (hidden.bfloat16().float().requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(ours, head, labels, chunk_tokens=3)
    loss.backward()
    reference = _plain(plain, rounded, labels)
    reference.backward()
    assert ours.grad is not None
    assert plain.grad is not None
    # 16-bit logits are rounded once, and so is their gradient: 2**-9 of numbers below 4, over sums of 16 and 50 terms
    tolerance = 0.03 if able else 2e-4
    if weight_dtype == torch.float32 and not able:
        tolerance = 0.03  # the bias is not rounded
    torch.testing.assert_close(loss, reference, atol=tolerance * 10, rtol=tolerance)
    torch.testing.assert_close(ours.grad, plain.grad, atol=tolerance, rtol=tolerance)


def test_a_frozen_head_is_multiplied_without_a_copy_of_its_logits() -> None:
    head = nn.Linear(HIDDEN, 5_000, bias=False).requires_grad_(False)
    hidden = torch.randn(1, 64, HIDDEN, requires_grad=True)
    labels = torch.randint(0, 5_000, (1, 64))
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not func._schema.is_mutable and out.numel() == 64 * 5_000:
                sizes.append(out.untyped_storage().data_ptr())
            return out

    with Watch():
        chunked_loss(hidden, head, labels, chunk_tokens=64)
    assert len(set(sizes)) == 1  # the gradient takes the logits' place


def test_what_stands_around_a_frozen_head_is_not_passed_by() -> None:
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    hidden, labels = _inputs()
    before = chunked_loss(hidden, head, labels)
    head.register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.allclose(chunked_loss(hidden, head, labels), before)
