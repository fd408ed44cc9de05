"""Blocks and embeddings are found by structure in models that do not name them; stand-ins for a forward nest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_ft.errors import ModelError
from lowmem_ft.memory.blocks import (
    WrappedForward,
    apply_around,
    find_blocks,
    find_embeddings,
    find_stacks,
    part_of,
    remove_around,
)
from tests.tiny import FAMILIES, tiny_gpt2, tiny_llama

H, V = 16, 32


class Block(nn.Module):
    """Norm, two linear layers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.mlp = nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H), nn.Dropout(0.1))

    def forward(self, hidden: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        """hidden is (B, S, H)."""
        return hidden + scale * self.mlp(self.norm(hidden))


class Stack(nn.Module):
    """A plain language model: nothing of transformers."""

    def __init__(self, kind: str = "list", blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions, self.head = nn.Embedding(V, H), nn.Embedding(8, H), nn.Linear(H, V)
        made = [Block() for _ in range(blocks)]
        self.h = {
            "list": lambda: nn.ModuleList(made),
            "dict": lambda: nn.ModuleDict({str(i): block for i, block in enumerate(made)}),
            "sequential": lambda: nn.Sequential(*made),
        }[kind]()

    def forward(self, ids: Tensor) -> Tensor:
        """ids is (B, S)."""
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.h.values() if isinstance(self.h, nn.ModuleDict) else self.h:
            hidden = block(hidden, scale=torch.tensor(0.5))
        return self.head(hidden)


class TwoTowers(nn.Module):
    """Two transformers models in a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.other = tiny_llama(), tiny_gpt2()

    def forward(self, ids: Tensor) -> Tensor:
        """Sum of both towers' logits."""
        return self.text(input_ids=ids).logits + self.other(input_ids=ids).logits


def saved_bytes(model: nn.Module, run: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes kept for backward beside the weights, and the output."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for key, size in sizes.items() if key not in weights), output


IDS = torch.arange(8)[None]


def _plain(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def test_a_copy_of_a_wrapped_module_calls_itself() -> None:
    model = Stack()
    apply_around(model.h[0], _plain)
    twin = copy.deepcopy(model).train()
    twin(IDS).sum().backward()
    assert isinstance(twin.h[0].forward, WrappedForward)
    assert twin.h[0].forward.module is twin.h[0]
    assert all(p.grad is None for p in model.parameters())


def test_stand_ins_nest_and_keep_what_another_library_has_put_there() -> None:
    block = Block()
    block.forward = lambda hidden: hidden + 1  # type: ignore[method-assign]
    theirs = block.forward

    def twice(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) * 2

    apply_around(block, twice)
    assert block(torch.zeros(1)).item() == 2
    remove_around(block, twice)
    assert block.forward is theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_transformers_models_are_found_by_structure(family: str) -> None:
    model = FAMILIES[family]()
    stacks = find_stacks(model)
    assert list(stacks) == ["transformer.h" if family == "gpt2" else "model.layers"]
    assert len(find_blocks(model)) == 2


def test_lists_of_plain_layers_and_of_experts_are_no_stacks() -> None:
    model = Stack()
    model.heads = nn.ModuleList(nn.Linear(H, V) for _ in range(2))
    model.mlp = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H), nn.ReLU())
    model.h[0].experts = nn.ModuleList(Block() for _ in range(2))
    assert list(find_stacks(model)) == ["h"]


def test_a_sequential_that_is_the_model_itself_has_its_run_of_blocks_found() -> None:
    model = nn.Sequential(nn.Embedding(V, H), Block(), Block(), nn.Linear(H, V))
    assert find_blocks(model) == [model[1], model[2]]
    assert find_embeddings(model) == [model[0]]


def test_names_choose_stacks_or_blocks_and_a_wrong_one_lists_what_there_is() -> None:
    model = tiny_llama()
    assert find_blocks(model, "layers") == list(model.model.layers)
    assert find_blocks(model, ["model.layers.1"]) == [model.model.layers[1]]
    with pytest.raises(ModelError, match=r"blocks: layrs matches no module. Write blocks=.*There are: model.layers"):
        find_blocks(model, "layrs")
    with pytest.raises(ModelError, match=r"There are: model.embed_tokens"):
        find_embeddings(model, "wte")
    with pytest.raises(ModelError, match=r'no blocks that can recompute.*blocks="model.layers"'):
        find_blocks(nn.Linear(2, 2))


def test_embeddings_are_found_where_getters_are_missing_or_raise() -> None:
    plain = Stack()
    assert find_embeddings(plain) == [plain.tokens, plain.positions]
    assert find_embeddings(plain, "tokens") == [plain.tokens]
    llama = tiny_llama()

    def wrong() -> nn.Module:
        raise AttributeError("no embed_tokens here")

    llama.get_input_embeddings = llama.model.get_input_embeddings = wrong  # type: ignore[method-assign]
    assert part_of(llama, "get_input_embeddings") is None
    assert find_embeddings(llama) == [llama.model.embed_tokens]
    towers = TwoTowers()
    assert find_embeddings(towers) == [towers.text.model.embed_tokens, towers.other.transformer.wte]
    assert find_embeddings(nn.Linear(2, 2)) == []
