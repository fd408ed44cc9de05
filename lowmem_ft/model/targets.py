"""Which layers a setting of names means: names, regular expressions, layers by index. Nothing is matched in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lowmem_ft.errors import ModelError, Problem, nearest

MOST_NAMES = 6


@dataclass(frozen=True)
class TargetMatch:
    """A row of the table of what was matched.

    Attributes:
        name: as it was written, or the last part of module names where `all-linear` was.
        matches: how many modules.
        layers: indices of the blocks they are in, ascending; empty where they are in none.
    """

    name: str
    matches: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Targets:
    """The modules that get an adapter.

    Attributes:
        modules: their full names, in the order of the model.
        table: what each name matched.
        warnings: what the user should know.
    """

    modules: tuple[str, ...]
    table: tuple[TargetMatch, ...]
    warnings: tuple[str, ...]


def find_targets(model: nn.Module, targets: str | Sequence[str], layers: Sequence[int] | None = None) -> Targets:
    """Find the linear layers that are meant.

    Args:
        model: without adapters.
        targets: `all-linear`: all but the head; or a list. `q_proj` is the last part of a module's name, or several
            parts: `mlp.up_proj`. `/q_proj|v_proj/`, between slashes, is a regular expression that is searched in
            full names, such as `model.layers.0.self_attn.q_proj`.
        layers: only in these blocks, by index; -1 is the last one. None for all.

    Raises:
        ModelError: a name or a layer matches nothing, an expression is none, or the head is tied to the embedding.
    """
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    blocks = sorted({index for name, _ in model.named_modules() if (index := layer_of(name)) is not None})
    chosen = _choose_layers(blocks, layers)
    allowed = [name for name in linears if layers is None or layer_of(name) in chosen]
    head = _head_names(model)
    if isinstance(targets, str):
        if targets != "all-linear":
            problem = Problem("adapter.targets", f'"{targets}" is not all-linear', f"Write targets: [{targets}]")
            raise ModelError(problem)
        modules = tuple(name for name in allowed if name not in head)
        table = _table_by_last_part(modules)
        bare = [index for index in chosen if index not in {layer_of(name) for name in modules}]
        warnings = [f"no linear layer in blocks {format_layers(bare)}: they get no adapter"] if bare else []
        return Targets(modules, table, tuple(warnings))
    found = match_names("adapter.targets", targets, allowed, "linear layer")
    modules = tuple(name for name in linears if any(name in names for names in found.values()))
    _refuse_tied_head(model, [name for name in modules if name in head])
    table = tuple(_row(target, names) for target, names in found.items())
    return Targets(modules, table, tuple(_uneven(table, chosen)))


def match_names(where: str, names: Iterable[str], modules: Sequence[str], kind: str) -> dict[str, list[str]]:
    """The full names of modules that each name or /regular expression/ matches.

    Args:
        where: the setting, for errors.
        names: as they were written.
        modules: full names of what may be matched.
        kind: what `modules` are, for errors.

    Raises:
        ModelError: for all names that match nothing, with near ones.
    """
    last_parts = sorted({name.rsplit(".", 1)[-1] for name in modules})
    found, problems = {}, []
    for name in names:
        try:
            matches = _matcher(name)
        except re.error as error:
            problems.append(Problem(where, f"{name} is no regular expression: {error}", "Mend it, or write a name"))
            continue
        found[name] = [module for module in modules if matches(module)]
        if not found[name]:
            near = nearest(name.strip("/"), last_parts)
            instead = f"Write {near}. " if near else ""
            there = ", ".join(last_parts[:MOST_NAMES])
            problems.append(Problem(where, f"{name} matches no {kind}", f"{instead}There are: {there}"))
    if problems:
        raise ModelError(problems)
    return found


def values_by_module(where: str, patterns: Mapping[str, float], modules: Sequence[str]) -> dict[str, float]:
    """The value of each module that a pattern names.

    Args:
        where: the setting, for errors.
        patterns: value by name or /regular expression/.
        modules: full names of the modules with an adapter.

    Raises:
        ModelError: a pattern matches none of them, or two give one module different values.
    """
    values: dict[str, float] = {}
    source: dict[str, str] = {}
    for pattern, names in match_names(where, patterns, modules, "layer with an adapter").items():
        for name in names:
            if values.setdefault(name, patterns[pattern]) != patterns[pattern]:
                what = f"{source[name]} and {pattern} give {name} different values"
                raise ModelError(Problem(where, what, "Write patterns that do not overlap"))
            source[name] = pattern
    return values


def is_linear(module: nn.Module) -> bool:
    """Linear layers of torch, of bitsandbytes (which inherit from it), and GPT-2's Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def layer_of(name: str) -> int | None:
    """Index of the block that a module is in: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def format_layers(layers: Sequence[int]) -> str:
    """Indices for people: `0-3, 6`."""
    runs: list[list[int]] = []
    for index in layers:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def tied_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the head and the embedding where they share one weight, else nothing."""
    head = _module_of(model, "get_output_embeddings")
    embedding = _module_of(model, "get_input_embeddings")
    if head is None or embedding is None or getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        return ()
    return tuple(name for name, module in model.named_modules() if module is head or module is embedding)


def _matcher(name: str) -> Callable[[str], bool]:
    if len(name) > 2 and name.startswith("/") and name.endswith("/"):
        expression = re.compile(name[1:-1])
        return lambda module: expression.search(module) is not None
    return lambda module: module == name or module.endswith(f".{name}")


def _choose_layers(blocks: Sequence[int], layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        return list(blocks)
    count = len(blocks)
    wrong = [index for index in layers if not -count <= index < count]
    if wrong:
        what = f"there is no layer {', '.join(map(str, wrong[:MOST_NAMES]))}"
        raise ModelError(
            Problem("adapter.layers", what, f"The model has {count}: 0 to {count - 1}, or -1 for the last")
        )
    return sorted({blocks[index] for index in layers})


def _head_names(model: nn.Module) -> set[str]:
    head = _module_of(model, "get_output_embeddings")
    return {name for name, module in model.named_modules() if head is not None and module is head}


def _module_of(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _refuse_tied_head(model: nn.Module, heads: Sequence[str]) -> None:
    tied = tied_names(model)
    if heads and tied:
        what = (
            f"{heads[0]} shares its weight with {next(n for n in tied if n not in heads)}, which merging would change"
        )
        instead = "Take it out of the targets; adapter.trainable_tokens trains single tokens"
        raise ModelError(Problem("adapter.targets", what, instead))


def _table_by_last_part(modules: Sequence[str]) -> tuple[TargetMatch, ...]:
    groups: dict[str, list[str]] = {}
    for name in modules:
        groups.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    return tuple(_row(last, names) for last, names in groups.items())


def _row(name: str, modules: Sequence[str]) -> TargetMatch:
    layers = {index for module in modules if (index := layer_of(module)) is not None}
    return TargetMatch(name, len(modules), tuple(sorted(layers)))


def _uneven(table: Sequence[TargetMatch], chosen: Sequence[int]) -> list[str]:
    """A line for each name that is in some of the chosen layers, and not in all."""
    return [
        f"{row.name} is in {len(row.layers)} of {len(chosen)} layers only: {format_layers(row.layers)}"
        for row in table
        if row.layers and len(row.layers) < len(chosen) and not row.name.startswith("/")
    ]
