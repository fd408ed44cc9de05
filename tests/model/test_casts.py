"""What goes to fp32: by part, one parameter at a time, tied weights once; and that what stays works beside it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_ft.model.casts import (
    apply_casts,
    apply_matching,
    holds_experts,
    is_norm,
    plan_casts,
    remove_matching,
)
from tests.tiny import FAMILIES, tiny_gpt2, tiny_llama, tiny_moe, tiny_qwen3

IDS = torch.arange(3, 19)[None]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive, and their peak."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, {}
        for parameter in model.parameters():
            self.track(parameter.data)

    def track(self, tensor: torch.Tensor) -> None:
        """Count a storage once, and take it off when it goes."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone(_: Any) -> None:
            self.live -= size
            del self.seen[key]

        self.seen[key] = weakref.ref(storage, gone)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it made."""
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.track(output)
        return output


@pytest.mark.parametrize("model", [*FAMILIES.values(), tiny_moe])
def test_casting_needs_at_most_the_largest_parameter_beside_what_stays(model: Any) -> None:
    made = model().bfloat16()
    largest = max(p.numel() * 2 for p in made.parameters())
    plan = plan_casts(made, "all", set())
    with LiveBytes(made) as bytes_:
        before = bytes_.live
        apply_casts(plan)
    after = sum(p.numel() * p.element_size() for p in made.parameters())
    assert before == sum(p.numel() * 2 for p in made.parameters())
    assert bytes_.live == after > before
    assert after < bytes_.peak <= after + largest


def test_parts_of_a_model_with_everything() -> None:
    plan = plan_casts(tiny_moe().bfloat16(), "all", set())
    assert {group.part: group.parameters for group in plan.cast} == {
        "embeddings": 448 * 64,
        "other": 2 * ((64 + 2 * 32 + 64) * 64 + 4 * 64),  # attention and router
        "norms": 5 * 64 + 2 * 2 * 16,
        "head": 448 * 64,
    }
    assert [(g.part, g.parameters, g.before, g.after) for g in plan.kept] == [
        ("experts", 2 * 4 * 3 * 64 * 32, torch.bfloat16, torch.bfloat16)
    ]
    assert all(group.after == torch.float32 for group in plan.cast)


@pytest.mark.parametrize(("head", "embeddings"), [(True, False), (False, True), (False, False)])
def test_head_and_embeddings_can_be_left(head: bool, embeddings: bool) -> None:
    plan = plan_casts(tiny_qwen3().bfloat16(), "all", set(), head=head, embeddings=embeddings)
    parts = {group.part for group in plan.cast}
    assert ("head" in parts, "embeddings" in parts) == (head, embeddings)
    tied = plan_casts(tiny_llama().bfloat16(), "all", set(), head=head, embeddings=embeddings)
    assert {group.part for group in tied.cast} == {"norms", "other"}


def test_positions_count_as_embeddings() -> None:
    plan = plan_casts(tiny_gpt2().bfloat16(), "all", set())
    assert next(g.parameters for g in plan.cast if g.part == "embeddings") == (448 + 256) * 64


def test_fp32_and_fp64_stay() -> None:
    model = tiny_llama()
    model.model.norm.double()
    plan = plan_casts(model, "all", set())
    assert plan.cast == ()
    assert sum(group.parameters for group in plan.kept) == sum(p.numel() for p in model.parameters())


def test_two_parameters_on_one_storage_still_share_it() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)}).bfloat16()
    model["b"].weight.data = model["a"].weight.data
    plan = plan_casts(model, "all", set())
    assert plan.cast[0].parameters == 16
    apply_casts(plan)
    assert model["a"].weight.dtype == torch.float32
    assert model["a"].weight.data_ptr() == model["b"].weight.data_ptr()


def test_experts_are_3d_parameters_and_convolutions_are_not() -> None:
    assert [name for name, m in tiny_moe().named_modules() if holds_experts(m)] == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    assert not holds_experts(nn.Conv1d(4, 4, 3))


SWITCHES = [{}, {"head": False}, {"embeddings": False}, {"head": False, "embeddings": False}]


@pytest.mark.parametrize("family", [*FAMILIES, "moe"])
@pytest.mark.parametrize(("cast", "switches"), [*(("all", switches) for switches in SWITCHES), ("norms", {})])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_cast_model_runs_inside_and_outside_autocast(family: str, cast: Any, switches: Any, autocast: bool) -> None:
    model = {**FAMILIES, "moe": tiny_moe}[family]().bfloat16()
    with torch.no_grad():
        wanted = {**FAMILIES, "moe": tiny_moe}[family]().bfloat16().float()(input_ids=IDS).logits
    apply_casts(plan_casts(model, cast, set(), **switches))
    apply_matching(model, cast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=IDS).logits
    logits.float().sum().backward()
    assert (logits - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_norms_compute_in_fp32_and_answer_in_16_bits() -> None:
    for norm in (nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8)):
        norm.bfloat16()
        with torch.no_grad():
            norm.weight.fill_(1.25)
        apply_casts(plan_casts(norm, "norms", set()))
        apply_matching(norm, "norms")
        x = torch.randn(4, 8).bfloat16()
        assert torch.equal(norm(x), type(norm).forward(norm, x.float()).bfloat16())
        assert torch.equal(norm(**{"x" if isinstance(norm, nn.RMSNorm) else "input": x}), norm(x))
        remove_matching(norm)
        assert "forward" not in norm.__dict__


def test_norms_of_every_family_are_known() -> None:
    counts = {name: sum(is_norm(m) for m in make().modules()) for name, make in FAMILIES.items()}
    assert counts == {"llama": 5, "gemma3": 13, "qwen3": 9, "gpt2": 5}
