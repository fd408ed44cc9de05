"""A model's blocks and input embeddings: found where the model names them, else by structure.

And a stand-in for the `forward` of one module, on the object: no class is changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.errors import ModelError, Problem, nearest

MOST_NAMES = 6
Names = str | Sequence[str]


class WrappedForward:
    """Stands in for the `forward` of one module. A deep copy of the module gets a stand-in of its own.

    Args:
        module: whose forward it is.
        around: called with the module, its own forward, and the call's arguments.
    """

    def __init__(self, module: nn.Module, around: Callable[..., Any]) -> None:
        self.module = module
        self.around = around
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward inside `around`."""
        forward = self.inner or partial(type(self.module).forward, self.module)
        return self.around(self.module, forward, args, kwargs)


def apply_around(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let `around(module, forward, args, kwargs)` answer for the forward of `module`."""
    module.forward = WrappedForward(module, around)


def remove_around(module: nn.Module, kind: Callable[..., Any]) -> None:
    """Take away a stand-in whose `around` is the function `kind`, or a partial of it."""
    wrapped = module.__dict__.get("forward")
    if isinstance(wrapped, WrappedForward) and getattr(wrapped.around, "func", wrapped.around) is kind:
        del module.forward
        if wrapped.inner is not None:
            module.forward = wrapped.inner


def base_of(model: nn.Module) -> nn.Module:
    """The model inside peft's wrapper; the model itself where there is none."""
    inside = getattr(model, "get_base_model", None) if hasattr(model, "peft_config") else None
    return inside() if callable(inside) else model


def find_stacks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Stacks of blocks by the name of what holds them: the outermost lists whose members have parts of their own.

    A stack is a `ModuleList`, a `ModuleDict` with numbers for keys, or two or more neighbours of one class in a
    `Sequential`. Lists inside a block (experts) are not looked at.
    """
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if any(outer == "" or name.startswith(f"{outer}.") for outer in found):
            continue
        blocks = _members(module)
        if blocks:
            found[name] = blocks
    return found


def find_blocks(model: nn.Module, names: Names | None = None) -> list[nn.Module]:
    """The blocks of a model, by name or by structure.

    Args:
        model: any module.
        names: names of stacks (`model.layers`) or of single blocks, whole or their last parts.

    Raises:
        ModelError: nothing is found; says what there is.
    """
    if names is None:
        stacks = find_stacks(model)
        if not stacks:
            what = "has no blocks that can recompute their activations: no list of modules with parts of their own"
            instead = 'Name them, for example blocks="model.layers", or write recompute="none"'
            raise ModelError(Problem(type(model).__name__, what, instead))
        return [block for stack in stacks.values() for block in stack]
    blocks: list[nn.Module] = []
    for module in find_named(model, names, "blocks", list(find_stacks(model))):
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        blocks.extend(module.children() if is_list else [module])
    return blocks


def find_named(model: nn.Module, names: Names, setting: str, near: list[str]) -> list[nn.Module]:
    """Modules by their whole names or last parts.

    Raises:
        ModelError: a name matches nothing; `near` holds names to suggest, for `setting`.
    """
    found, problems = [], []
    modules = {name: module for name, module in model.named_modules() if name}
    for name in [names] if isinstance(names, str) else names:
        matches = [module for key, module in modules.items() if key == name or key.endswith(f".{name}")]
        found += matches
        if not matches:
            shown = near[:MOST_NAMES] or list(modules)[:MOST_NAMES]
            guess = nearest(name, list(modules))
            instead = f'Write {setting}="{guess or (shown or [""])[0]}". There are: {", ".join(shown)}'
            problems.append(Problem(setting, f"{name} matches no module", instead))
    if problems:
        raise ModelError(problems)
    return found


def find_embeddings(model: nn.Module, names: Names | None = None) -> list[nn.Module]:
    """Modules whose output is the input of the first block; several where a model has several towers.

    By name; else what each transformers model in it answers; else every `nn.Embedding` outside the blocks; else none.

    Raises:
        ModelError: a name matches nothing.
    """
    embeddings = {id(m): m for m in model.modules() if isinstance(m, nn.Embedding)}
    if names is not None:
        near = [name for name, module in model.named_modules() if id(module) in embeddings]
        return find_named(model, names, "embedding", near)
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        answer = part_of(module, "get_input_embeddings") if isinstance(module, PreTrainedModel) else None
        if answer is not None:
            found[id(answer)] = answer
    if found:
        return list(found.values())
    inside = {id(m) for stack in find_stacks(model).values() for block in stack for m in block.modules()}
    return [module for key, module in embeddings.items() if key not in inside]


def part_of(model: nn.Module, getter: str) -> nn.Module | None:
    """What `get_input_embeddings` or `get_output_embeddings` answers; None where it is missing, or raises."""
    try:
        answer = getattr(model, getter)()
    except Exception:  # a model's own code: NotImplementedError, AttributeError, KeyError have been seen
        return None
    return answer if isinstance(answer, nn.Module) else None


def _members(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module)
    ):
        children = list(module.children())
        return children if children and all(_is_block(child) for child in children) else []
    if isinstance(module, nn.Sequential):
        runs = (list(run) for _, run in itertools.groupby(module, type))
        return [block for run in runs if len(run) > 1 and _is_block(run[0]) for block in run]
    return []


def _is_block(module: nn.Module) -> bool:
    """Has parts of its own and a weight, and is no mere list."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return any(True for _ in module.children()) and any(
        True for _ in itertools.chain(module.parameters(), module.buffers())
    )
