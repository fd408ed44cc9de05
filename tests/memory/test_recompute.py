"""Recompute changes no bit of a gradient, whatever the policy and the model; and each policy keeps what it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import lowmem_ft
from lowmem_ft.errors import ModelError
from lowmem_ft.memory.attention import apply_packed_attention, packed_examples
from lowmem_ft.memory.blocks import WrappedForward
from lowmem_ft.memory.recompute import Policy, apply_recompute, plan_recompute, remove_recompute
from lowmem_ft.recipe.train_section import RECOMPUTE, MemorySection
from tests.memory.test_blocks import IDS, Stack, TwoTowers, saved_bytes
from tests.tiny import add_lora, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_moe, tiny_qwen3

LAYERS = 5
POLICIES: list[Any] = ["block", "every-2", "first-3", [1, 4]]

Make = Callable[[float], PreTrainedModel]
FAMILIES: dict[str, Make] = {
    "llama": lambda p: tiny_llama(num_hidden_layers=LAYERS, attention_dropout=p),
    "gemma3": lambda p: tiny_gemma3(num_hidden_layers=LAYERS, attention_dropout=p),
    "qwen3": lambda p: tiny_qwen3(num_hidden_layers=LAYERS, attention_dropout=p),
    "gpt2": lambda p: tiny_gpt2(n_layer=LAYERS, resid_pdrop=p, attn_pdrop=p),
    "moe": lambda p: tiny_moe(num_hidden_layers=LAYERS, attention_dropout=p),
}
LENGTHS = (11, 3, 9)


def gradients(model: nn.Module, packed: bool = False) -> dict[str, Tensor]:
    """Of all parameters, after one pass over a fixed batch; and the next random number."""
    model.train().zero_grad()
    torch.manual_seed(5)
    if packed:
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        with packed_examples(LENGTHS):
            ids = torch.arange(3, 3 + sum(LENGTHS))[None]
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    else:
        logits = model(input_ids=torch.arange(3, 27).view(2, 12), use_cache=False).logits
    logits.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "next random number": torch.rand(1)}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert len(a) > 10
    different = [name for name, tensor in a.items() if not torch.equal(tensor, b[name])]
    assert not different, different


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_bit_equal_with_every_policy(family: str, dropout: float, packed: bool) -> None:
    model = FAMILIES[family](dropout)
    if packed:
        apply_packed_attention(model)
    wanted = gradients(model, packed)
    for policy in POLICIES:
        apply_recompute(model, policy)
        assert_equal(wanted, gradients(model, packed))
    remove_recompute(model)
    assert_equal(wanted, gradients(model, packed))


def test_gradients_of_adapters_with_dropout_are_bit_equal_inside_autocast() -> None:
    model, _ = add_lora(tiny_llama(num_hidden_layers=LAYERS), rank=4, alpha=8, dropout=0.3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    found = []
    for policy in ["none", *POLICIES]:
        apply_recompute(model, policy)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(model))
    for other in found[1:]:
        assert_equal(found[0], other)


@pytest.mark.parametrize("kind", ["list", "dict", "sequential"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_of_a_plain_stack_keeps_less_and_gives_the_same_gradients(kind: str, use_reentrant: bool) -> None:
    grads, saved = [], []
    for policy in ("none", "block"):
        model = Stack(kind).train()
        apply_recompute(model, policy, use_reentrant=use_reentrant)
        torch.manual_seed(1)  # dropout is drawn again from the same state
        kept, output = saved_bytes(model, lambda model=model: model(IDS))
        output.square().sum().backward()
        saved.append(kept)
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert saved[1] < 0.4 * saved[0]
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_the_chosen_blocks_and_no_others_recompute() -> None:
    calls: list[int] = []
    model = Stack(blocks=7)
    for number, block in enumerate(model.h):
        block.norm.register_forward_hook(lambda *_, number=number: calls.append(number))
    for policy, again in [
        ("none", []),
        ("block", [0, 1, 2, 3, 4, 5, 6]),
        ("every-3", [0, 3, 6]),
        ("first-2", [0, 1]),
        ([6, 1, 1], [1, 6]),
    ]:
        calls.clear()
        plan = apply_recompute(model, policy)
        assert plan == plan_recompute(model, policy)
        assert list(plan.chosen) == again
        model.train()(IDS).sum().backward()
        assert calls == [*range(7), *reversed(again)]
    calls.clear()
    model.eval()(IDS).sum().backward()
    assert calls == [*range(7)]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_the_last_product_of_a_block_is_not_computed_again() -> None:
    counts = {}
    for policy in ("none", "block"):
        model = tiny_llama()
        apply_recompute(model, policy)
        with Products() as products:
            gradients(model)
        counts[policy] = products.count
    assert counts["block"] - counts["none"] == 2 * 6  # of seven in each of two blocks


def test_random_state_is_kept_only_by_blocks_that_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem_ft.memory import recompute

    made = []

    class Watched(recompute.Replay):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(recompute, "Replay", Watched)
    for dropout in (0.0, 0.1):
        made.clear()
        model = FAMILIES["llama"](dropout).train()
        apply_recompute(model)
        gradients(model)
        assert [replay.kept_random_state for replay in made] == [dropout > 0] * LAYERS


def test_running_statistics_inside_a_block_are_updated_once() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())  # noqa: E731
        return nn.Sequential(*[block() for _ in range(3)]).train()

    model, plain = make(), make()
    apply_recompute(model)
    for turn in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(turn))
        for each in (model, plain):
            each(x).square().sum().backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    statistics = [dict(each.named_buffers()) for each in (model, plain)]
    assert statistics[0]["0.1.num_batches_tracked"] == 3
    assert all(torch.equal(tensor, statistics[1][name]) for name, tensor in statistics[0].items())


def test_hidden_states_by_name_and_a_second_tensor_with_gradients() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, *, memory: Tensor, hidden: Tensor) -> Tensor:
            return hidden + torch.tanh(self.a(hidden) * self.b(memory))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.start, self.blocks = nn.Linear(4, 4), nn.ModuleList(Cross() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            hidden, memory = x, self.start(x)
            for block in self.blocks:
                hidden = block(memory=memory, hidden=hidden)
            return hidden

    found = []
    for settings in ({"policy": "none"}, {"policy": "block"}, {"policy": "block", "use_reentrant": True}):
        model = Model().train()
        apply_recompute(model, **settings)  # type: ignore[arg-type]
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for other in found[1:]:
        assert_equal(found[0], other)


def test_a_graph_that_is_kept_can_be_gone_through_twice() -> None:
    model = FAMILIES["llama"](0.1).train()
    apply_recompute(model)
    loss = model(input_ids=IDS + 3, use_cache=False).logits.square().mean()
    first = torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, model.lm_head.weight)[0])


def test_nothing_but_the_named_blocks_is_wrapped_and_all_of_it_can_be_taken_away() -> None:
    model = Stack()
    before = [type(m).forward for m in model.modules()]
    apply_recompute(model, blocks="h.1")
    apply_recompute(model, blocks="h.1")
    wrapped = [name for name, m in model.named_modules() if "forward" in m.__dict__]
    assert wrapped == ["h.1"]
    assert model.h[1].forward.inner is None  # not wrapped twice
    assert [type(m).forward for m in model.modules()] == before
    remove_recompute(model)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_copy_of_a_model_recomputes_by_itself() -> None:
    for model in (Stack(), tiny_llama()):
        apply_recompute(model)
        twin = copy.deepcopy(model).train()
        output = twin(IDS)
        (output if isinstance(output, Tensor) else output.logits).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        assert all(p.grad is not None for p in twin.parameters())
    plain = Stack()
    apply_recompute(plain)
    twin_block = copy.deepcopy(plain).h[0]
    assert isinstance(twin_block.forward, WrappedForward)
    assert twin_block.forward.around.keywords["recompute"].buffers.module is twin_block


def test_two_towers_recompute_by_the_switch_of_each_block() -> None:
    model = TwoTowers().train()
    before, _ = saved_bytes(model, lambda: model(IDS))
    assert apply_recompute(model).of == 4
    after, _ = saved_bytes(model, lambda: model(IDS))
    assert not any("forward" in m.__dict__ for m in model.modules())
    layers = [*model.text.model.layers, *model.other.transformer.h]
    assert all(layer.gradient_checkpointing for layer in layers)
    assert after < before
    remove_recompute(model)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def test_layers_of_transformers_beside_a_plain_stack_recompute_each_in_its_way() -> None:
    model = nn.ModuleDict({"a": tiny_llama(), "b": Stack()})
    assert apply_recompute(model).of == 2 + 3
    assert all(layer.gradient_checkpointing for layer in model["a"].model.layers)
    assert all("forward" in block.__dict__ for block in model["b"].h)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_cache_is_filled_where_blocks_recompute(family: str) -> None:
    """A cache that is filled in forward would be filled a second time in recompute."""
    model = FAMILIES[family](0.0).train()
    wanted = gradients(model)
    apply_recompute(model, "first-2")
    assert model.is_activation_checkpointing
    output = model(input_ids=torch.arange(3, 27).view(2, 12), use_cache=True)
    model.zero_grad()
    output.logits.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal({name: tensor for name, tensor in wanted.items() if "random" not in name}, found)


def test_a_getter_that_raises_does_not_stop_the_switch_of_transformers() -> None:
    model = tiny_llama()
    model.model.get_input_embeddings = lambda: {}["missing"]  # type: ignore[method-assign]
    model.get_input_embeddings = model.model.get_input_embeddings  # type: ignore[method-assign]
    apply_recompute(model)
    assert model.is_activation_checkpointing


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("blok", r'recompute: "blok" is no way to recompute. Write recompute="block". There are: .*every-K.*numbers'),
        ("every-0", r'"every-0" is no way'),
        ("first-3", r'first-3: there are 2 blocks. Write recompute="first-2"'),
        ("every-9", r'every-9: there are 2 blocks. Write recompute="every-2"'),
        ([0, 2], r"there is no block 2: they are numbered from 0 to 1"),
        ([-1], r"-1 is no block number"),
        ([True], r"True is no block number"),
        ([], r"the list of blocks is empty"),
    ],
)
def test_a_policy_that_cannot_be_honoured_is_refused_and_nothing_is_changed(policy: Policy, message: str) -> None:
    model = tiny_llama()
    apply_recompute(model, "first-1")
    with pytest.raises(ModelError, match=message):
        apply_recompute(model, policy)
    assert model.model.layers[0].gradient_checkpointing


def test_models_without_blocks_are_refused_unless_nothing_recomputes() -> None:
    with pytest.raises(ModelError, match="no blocks that can recompute"):
        apply_recompute(nn.Linear(2, 2))
    assert apply_recompute(nn.Linear(2, 2), "none").line() == "no recompute"
    with pytest.raises(ModelError, match='blocks are named, and recompute is "none"'):
        apply_recompute(Stack(), "none", blocks="h")


def test_what_is_said_of_it_counts_the_blocks() -> None:
    model = tiny_llama(num_hidden_layers=4)
    assert plan_recompute(model, "block").line() == "gradient checkpointing on every block"
    assert plan_recompute(model, "first-3").line() == "gradient checkpointing on 3 of 4 blocks"


def test_the_recipe_takes_the_names_that_are_honoured_here() -> None:
    assert lowmem_ft.apply_recompute is apply_recompute
    model = tiny_llama(num_hidden_layers=12)
    for name in RECOMPUTE:
        assert MemorySection(recompute=name).recompute == name
        if name != "auto":
            plan_recompute(model, name)
