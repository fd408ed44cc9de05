"""Gradients that do not arrive, each made for real; and a model that is bit for bit what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_ft import check_gradient_flow
from lowmem_ft.errors import ModelError
from lowmem_ft.memory.loss import chunked_loss
from lowmem_ft.model.kbit import prepare_for_kbit_training
from tests.tiny import add_lora, tiny_gpt2, tiny_llama

IDS = torch.arange(3, 20)[None]
BATCH = {"input_ids": IDS, "labels": IDS}


def _adapted(**changes: Any) -> Any:
    return add_lora(tiny_llama(**changes), rank=4, alpha=8)[0]


def test_all_tensors_are_counted_though_the_first_factor_starts_without_gradient() -> None:
    model = _adapted()
    flow = check_gradient_flow(model, BATCH)
    assert (flow.reached, flow.zero, flow.not_routed) == (28, (), ())
    assert flow.line() == "gradients reach all 28 trained tensors"


@pytest.mark.parametrize("autocast", [False, True])
def test_a_prepared_model_passes_by_a_function_inside_autocast_too(autocast: bool) -> None:
    base = prepare_for_kbit_training(tiny_llama().bfloat16())
    model, _ = add_lora(base, rank=4, alpha=8)

    def run() -> Tensor:
        return model(**BATCH).loss

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # around both passes: its cache would be stale
        assert check_gradient_flow(model, run).zero == ()


def test_everything_is_restored_bit_for_bit() -> None:
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear"))
    model.eval()
    model.base_model.model.model.layers[0].train()
    trained = [p for p in model.parameters() if p.requires_grad]
    trained[3].grad = kept = torch.ones_like(trained[3])
    torch.manual_seed(5)
    random = torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    check_gradient_flow(model, BATCH)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert trained[3].grad is kept
    assert bool((kept == 1).all())
    assert all(p.grad is None for p in model.parameters() if p is not trained[3])


def test_a_failure_restores_too() -> None:
    model = _adapted()
    model.eval()
    random = torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def second_time_broken() -> Tensor:
        moved = any(not torch.equal(v, before[n]) for n, v in model.state_dict().items())
        return model(**BATCH).loss * (float("nan") if moved else 1.0)

    with pytest.raises(ModelError, match="not finite"):
        check_gradient_flow(model, second_time_broken)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_lora_on_a_head_that_a_fused_loss_bypasses() -> None:
    base = tiny_llama(tie_word_embeddings=False)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    weight = base.lm_head.weight

    def fused() -> Tensor:
        hidden = base.model(input_ids=IDS).last_hidden_state
        return nn.functional.cross_entropy(nn.functional.linear(hidden, weight)[0, :-1], IDS[0, 1:])

    def ours() -> Tensor:
        hidden = base.model(input_ids=IDS).last_hidden_state
        return chunked_loss(hidden[:, :-1], base.lm_head, IDS[:, 1:], chunk_tokens=8)

    with pytest.raises(ModelError) as error:
        check_gradient_flow(model, fused)
    assert str(error.value).startswith(
        "lm_head: no gradient: the loss reads the head's weight and never calls the head"
    )
    assert check_gradient_flow(model, ours).reached == 6


def test_frozen_inputs_with_reentrant_checkpointing() -> None:
    model = _adapted()
    base = model.get_base_model()
    base.activation_checkpointing_enable({"use_reentrant": True})
    base.disable_input_require_grads()  # turning it on adds the hook, which is what older scripts lack
    with pytest.raises(ModelError) as error, pytest.warns(UserWarning, match="None of the inputs"):
        check_gradient_flow(model, BATCH)
    (problem,) = error.value.problems
    assert "reentrant checkpointing got an input that asks for none" in problem.what
    assert problem.where.count("layers.0.self_attn.") == 4
    assert problem.where.endswith(" and 8 more")
    base.enable_input_require_grads()
    assert check_gradient_flow(model, BATCH).reached == 28


def test_a_target_that_the_model_never_calls() -> None:
    base: Any = tiny_llama()
    base.model.layers[1].self_attn.unused = nn.Linear(64, 64)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "unused"]))
    with pytest.raises(ModelError) as error:
        check_gradient_flow(model, BATCH)
    assert str(error.value).startswith("model.layers.1.self_attn.unused: no gradient: the model never calls it")
    assert "Take it out of the targets" in str(error.value)


def test_a_part_behind_detach_and_one_inside_no_grad() -> None:
    model: Any = _adapted()
    layer = model.get_base_model().model.layers[0]
    layer.register_forward_hook(lambda module, args, output: output.detach().requires_grad_())
    with pytest.raises(ModelError, match="does not reach the loss"):
        check_gradient_flow(model, BATCH)
    model = _adapted()
    attention = model.get_base_model().model.layers[0].self_attn.q_proj
    attention.forward = torch.no_grad()(attention.forward)
    flow_error = "called: what it computes does not reach the loss"
    with pytest.raises(ModelError, match=flow_error):
        check_gradient_flow(model, BATCH)
    model = _adapted()
    with torch.no_grad():
        assert check_gradient_flow(model, BATCH).reached == 28  # no_grad around the check is not the model's

    def without() -> Tensor:
        with torch.no_grad():
            return model(**BATCH).loss

    with pytest.raises(ModelError, match=r"it runs inside torch.no_grad"):
        check_gradient_flow(model, without)


def test_adapters_that_are_switched_off() -> None:
    model = _adapted()
    with model.disable_adapter():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        with pytest.raises(ModelError, match="switched off"):
            check_gradient_flow(model, BATCH)


def test_values_that_are_not_finite_name_the_weight() -> None:
    model = _adapted()
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight[0, 0] = float("inf")
    with pytest.raises(ModelError, match=r"gradient is not finite: model.layers.1.mlp.up_proj.base_layer.weight holds"):
        check_gradient_flow(model, BATCH)
    model = _adapted()
    with pytest.raises(ModelError, match="gradient is not finite, with a loss of inf"):
        check_gradient_flow(model, lambda: model(**BATCH).loss * float("inf"))


def test_nothing_to_train_and_a_batch_that_trains_nothing() -> None:
    with pytest.raises(ModelError, match="no parameter that trains"):
        check_gradient_flow(tiny_gpt2().requires_grad_(False), BATCH)
    model = _adapted()
    with pytest.raises(ModelError, match="all gradients are zero"):
        check_gradient_flow(model, lambda: model(**BATCH).logits.sum() * 0)
    with pytest.raises(ModelError, match="gave no loss"):
        check_gradient_flow(model, {"input_ids": IDS})


def test_a_weight_that_this_batch_teaches_nothing_is_named_not_refused() -> None:
    flow = check_gradient_flow(_adapted(), {"input_ids": IDS[:, :2], "labels": IDS[:, :2]})
    # one trained position sees one key: its softmax is constant, so queries and keys learn nothing
    assert len(flow.zero) == 8
    assert flow.line().endswith("and 2 more")


class _Routed(nn.Module):
    """Two experts, of which the first is always chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 4)}) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0]["up"](x).square().sum()  # type: ignore[index]


def test_experts_that_the_batch_is_not_routed_to_are_counted() -> None:
    torch.manual_seed(0)
    model = _Routed()
    flow = check_gradient_flow(model, lambda: model(torch.ones(1, 4)))
    assert (flow.reached, flow.not_routed) == (2, ("experts.1.up.weight", "experts.1.up.bias"))
    assert flow.line() == ("gradients reach 2 trained tensors; 2 more are in experts that this batch was not routed to")
