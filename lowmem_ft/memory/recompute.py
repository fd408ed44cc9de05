"""Recompute (gradient checkpointing): blocks keep less in the forward pass and compute the rest again in backward.

    from lowmem_ft import apply_recompute
    apply_recompute(model, "first-12")

Layers of transformers are set through their own extension point, each for itself. Any other block gets a stand-in for
its `forward`, on the object. `docs/recompute.md` has the policies side by side, and their names elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lowmem_ft.errors import ModelError, Problem, nearest
from lowmem_ft.memory.blocks import MOST_NAMES, Names, apply_around, find_blocks, find_stacks, remove_around
from lowmem_ft.memory.replay import MovingBuffers, Replay, bind

Policy = str | Sequence[int]

POLICIES = ("none", "block", "every-2", "first-1")
"""One example of each form. Beside these, a list of block numbers."""

_COUNTED = re.compile(r"(every|first)-([1-9][0-9]*)")


@dataclass(frozen=True)
class Recomputed:
    """Which blocks recompute.

    Attributes:
        policy: as it was asked for.
        chosen: numbers of the blocks, in the model's order.
        of: how many blocks there are.
    """

    policy: Policy
    chosen: tuple[int, ...]
    of: int

    def line(self) -> str:
        """For people."""
        if not self.chosen:
            return "no recompute"
        if len(self.chosen) == self.of:
            return "gradient checkpointing on every block"
        return f"gradient checkpointing on {len(self.chosen)} of {self.of} blocks"


def apply_recompute(
    model: nn.Module, policy: Policy = "block", *, blocks: Names | None = None, use_reentrant: bool = False
) -> Recomputed:
    """Let blocks keep only their input, and compute the rest again in backward. In place; a former choice is forgotten.

    With n blocks, I bytes of a block's input and A bytes of all that a block keeps (its input among them), kept after
    the forward pass:

    - `none`: n A
    - `block`: n I, every block recomputes
    - `every-K`: blocks 0, K, 2K, ... recompute, the rest keep all
    - `first-K`: the first K recompute: K I + (n - K) A. They are the last that backward comes to, so they recompute
      when the others' activations are gone
    - a list of block numbers from 0: these recompute

    Exactness: bit for bit. Random numbers are drawn again from the same state, which is kept only where any were drawn;
    buffers that a forward changes are changed once.
    Time: one more forward pass of each block that recomputes, up to the last tensor that its backward needs.

    Args:
        model: any module; in training mode its blocks recompute, in evaluation mode and without gradients they do not.
        policy: see above.
        blocks: names of stacks of blocks (`model.layers`) or of single blocks, where they cannot be found.
        use_reentrant: torch's older way, which needs an input that asks for gradients, and stops at no last tensor.

    Returns:
        Which blocks recompute.

    Raises:
        ModelError: as `plan_recompute`.

    Source: Chen et al. 2016, arXiv:1604.06174, for the idea; `torch.utils.checkpoint` does the work.
    """
    plan = plan_recompute(model, policy, blocks=blocks)
    remove_recompute(model)
    found = _recomputable(model, blocks) if plan.chosen else []
    chosen = [found[number] for number in plan.chosen]
    for block in chosen:
        recompute = _Recompute(block, use_reentrant)
        if isinstance(block, GradientCheckpointingLayer):
            block._gradient_checkpointing_func = recompute  # type: ignore[assignment]
            block.gradient_checkpointing = True
        else:
            apply_around(block, partial(_around, recompute=recompute))
    _tell_owners(model, chosen)
    return plan


def plan_recompute(model: nn.Module, policy: Policy, *, blocks: Names | None = None) -> Recomputed:
    """What `apply_recompute` would do. Nothing is changed.

    Raises:
        ModelError: there is no such policy; there are no blocks, none by these names, or fewer than the policy counts
            on; or a transformers model says that its own must not be recomputed.
    """
    if policy == "none":
        if blocks is not None:
            what = 'blocks are named, and recompute is "none"'
            raise ModelError(Problem(type(model).__name__, what, 'Write recompute="block"'))
        return Recomputed("none", (), 0)
    _refuse_unknown(policy)
    of = len(_recomputable(model, blocks))
    return Recomputed(policy, _chosen(policy, of), of)


def remove_recompute(model: nn.Module) -> None:
    """Let every block keep all its activations."""
    for module in model.modules():
        remove_around(module, _around)
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
            module.__dict__.pop("_gradient_checkpointing_func", None)


class _Recompute:
    """Runs one block so that it keeps its input only. What transformers calls, and the stand-in of other blocks."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        self.buffers = MovingBuffers(block)
        self.use_reentrant = use_reentrant

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function` is a layer's own forward, the arguments by name bound to it."""
        kwargs: dict[str, Any] = {}
        if isinstance(function, partial):  # so that tensors by name are seen, which may carry the gradient
            function, kwargs = partial(function.func, *function.args), function.keywords
        return self.run(function, args, kwargs)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, call = bind(forward, args, kwargs)
        replay = Replay(call, self.buffers)
        return checkpoint(replay, *tensors, use_reentrant=self.use_reentrant, preserve_rng_state=False)


def _around(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recompute: _Recompute,
) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return recompute.run(forward, args, kwargs)


def _refuse_unknown(policy: Policy) -> None:
    if isinstance(policy, str):
        if policy in POLICIES or _COUNTED.fullmatch(policy):
            return
        guess = nearest(policy, POLICIES) or "block"
        names = ", ".join(sorted({re.sub(r"[0-9]+$", "K", name) for name in POLICIES}))
        instead = f'Write recompute="{guess}". There are: {names}, or a list of block numbers'
        raise ModelError(Problem("recompute", f'"{policy}" is no way to recompute', instead))
    wrong = [number for number in policy if isinstance(number, bool) or not isinstance(number, int) or number < 0]
    if wrong or not policy:
        what = f"{wrong[0]!r} is no block number" if wrong else "the list of blocks is empty"
        raise ModelError(Problem("recompute", what, 'Write recompute=[0, 1, 2], or recompute="none"'))


def _chosen(policy: Policy, of: int) -> tuple[int, ...]:
    """Numbers of the blocks that recompute, of so many."""
    counted = _COUNTED.fullmatch(policy) if isinstance(policy, str) else None
    if counted:
        kind, count = counted[1], int(counted[2])
        if count > of:
            raise ModelError(Problem("recompute", f"{policy}: there are {of} blocks", f'Write recompute="{kind}-{of}"'))
        return tuple(range(count)) if kind == "first" else tuple(range(0, of, count))
    if isinstance(policy, str):
        return tuple(range(of))
    if max(policy) >= of:
        what = f"there is no block {max(policy)}: they are numbered from 0 to {of - 1}"
        raise ModelError(Problem("recompute", what, f"Write numbers up to {of - 1}"))
    return tuple(sorted(set(policy)))


def _recomputable(model: nn.Module, names: Names | None) -> list[nn.Module]:
    """By name; else transformers' layers, and the blocks of stacks that have none inside; in the model's order."""
    if names is not None:
        return find_blocks(model, names)
    if isinstance(model, PreTrainedModel) and not model.supports_gradient_checkpointing:
        stacks = ", ".join(f'blocks="{name}"' for name in list(find_stacks(model))[:MOST_NAMES])
        what = "has no blocks that can recompute their activations: the class says so (supports_gradient_checkpointing)"
        instead = 'Write recompute="none"' + (f", or name the blocks all the same: {stacks}" if stacks else "")
        raise ModelError(Problem(type(model).__name__, what, instead))
    members = {id(block) for stack in find_stacks(model).values() for block in stack}
    found = {id(block): block for block in _outermost(model, members)}
    return list(found.values()) or find_blocks(model)  # which says what there is, and what to write


def _outermost(module: nn.Module, members: set[int]) -> Iterator[nn.Module]:
    has_layers = any(isinstance(inner, GradientCheckpointingLayer) for inner in module.modules())
    if isinstance(module, GradientCheckpointingLayer) or (id(module) in members and not has_layers):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, members)


def _tell_owners(model: nn.Module, chosen: list[nn.Module]) -> None:
    """Set the switch of the models around the layers: it keeps them from filling a cache while training."""
    layers = {id(block) for block in chosen if isinstance(block, GradientCheckpointingLayer)}
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) or not hasattr(module, "gradient_checkpointing"):
            continue
        if any(id(inner) in layers for inner in module.modules()):
            module.gradient_checkpointing = True  # type: ignore[assignment]
