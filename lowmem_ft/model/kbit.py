"""Makes a quantized model ready for training: what is not quantized goes to fp32, the base is frozen, and blocks
recompute their activations (gradient checkpointing).

    from lowmem_ft import prepare_for_kbit_training
    model = prepare_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(...))
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.memory.blocks import (
    Names,
    base_of,
    find_embeddings,
    find_stacks,
    part_of,
)
from lowmem_ft.memory.recompute import Policy, Recomputed, apply_recompute, plan_recompute, remove_recompute
from lowmem_ft.model.casts import Cast, CastGroup, apply_casts, apply_matching, plan_casts, remove_matching
from lowmem_ft.model.packed import WeightBytes, count_weight_bytes, keep_trainable_layout, refuse_untrainable
from lowmem_ft.model.targets import is_linear
from lowmem_ft.units import format_bytes, format_count

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class PreparationReport:
    """What `prepare_for_kbit_training` did.

    Attributes:
        cast: what was asked for.
        groups: what was cast to fp32, by part and former type.
        frozen_parameters: base parameters that do not train, in weights; packed ones by their stored elements.
        recompute: which blocks recompute.
        input_gradients: whether the embedding's output asks for gradients.
        kept: what is not quantized and was left as it is, by part and type.
        weights: how many bytes of the base are quantized, before the casts; None in a prediction.
    """

    cast: Cast
    groups: tuple[CastGroup, ...]
    frozen_parameters: int
    recompute: Recomputed
    input_gradients: bool
    kept: tuple[CastGroup, ...] = ()
    weights: WeightBytes | None = None

    @property
    def added_bytes(self) -> int:
        """What the casts cost."""
        return sum(group.bytes_after - group.bytes_before for group in self.groups)

    def lines(self) -> list[str]:
        """The report, for people."""
        lines = [self.weights.line()] if self.weights is not None else []
        for group in self.groups:
            sizes = f"{format_bytes(group.bytes_before)} -> {format_bytes(group.bytes_after)}"
            types = f"{_name(group.before)} -> {_name(group.after)}"
            lines.append(f"cast {group.part}: {format_count(group.parameters)} weights, {types}, {sizes}")
        for group in self.kept:
            size = format_bytes(group.bytes_before)
            lines.append(f"kept {group.part}: {format_count(group.parameters)} weights, {_name(group.before)}, {size}")
        cost = format_bytes(self.added_bytes)
        gradients = "on" if self.input_gradients else "off"
        lines.append(f"casts add {cost}; base frozen; {self.recompute.line()}; input gradients {gradients}")
        if self.cast == "all":
            lines.extend(self._ways_to_save())
        return lines

    def _ways_to_save(self) -> list[str]:
        added = dict.fromkeys(("embeddings", "head"), 0)
        for group in self.groups:
            if group.part in added:
                added[group.part] += group.bytes_after - group.bytes_before
        costly = {part: size for part, size in added.items() if size}
        if not costly:
            return []
        costs = " and ".join(f"{part} {format_bytes(size)}" for part, size in costly.items())
        switches = ", ".join(f"{part}=False" for part in costly)
        keys = ", ".join(f"{part}: false" for part in costly)
        by = f'cast="norms" saves it, or {switches} (in a recipe prepare: {{cast: norms}}, or {{{keys}}})'
        return [f"of that, {costs}: {by}"]


def prepare_for_kbit_training(
    model: Model,
    *,
    cast: Cast = "all",
    recompute: Policy = "block",
    input_gradients: bool = True,
    head: bool = True,
    embeddings: bool = True,
    use_reentrant: bool = False,
    blocks: Names | None = None,
    embedding: Names | None = None,
) -> Model:
    """Prepare a model, quantized by any method or not, for training adapters. In place, before or after
    `get_peft_model`; calling it twice changes nothing more.

    1. Base parameters are frozen. Adapters and copies in `modules_to_save` that are there already keep training.
    2. 16-bit parameters go to fp32. Packed weights, scales, buffers and 3-D expert weights stay; tied stays tied.
    3. The output of the input embedding asks for gradients.
    4. Blocks keep only their input and compute the rest again in backward. No cache is filled while training.

    Exactness: freezing and recompute change no result. Casts are exact; what follows is computed with more digits.
    Memory: `all` adds 2 bytes for each 16-bit weight that is not quantized, embeddings and head included; `norms`
    adds them for norm weights only. While casting, at most the largest parameter more.

    Args:
        model: any module.
        cast: `all`, `norms` (they compute in fp32 and answer in their input's type), or `none`.
        recompute: which blocks do, `block` for all, `none` to keep all activations; see `memory.recompute`.
        input_gradients: needed with `use_reentrant`; otherwise it costs the first block's input gradient.
        head: cast the output head, under `all`.
        embeddings: cast the input embeddings, under `all`; a tied head goes with them.
        use_reentrant: torch's older way of recompute.
        blocks: names of stacks of blocks (`model.layers`), where they cannot be found.
        embedding: names of input embeddings, where they cannot be found.

    Returns:
        The same model. Its `preparation_report` says what was done, in bytes; `lowmem_ft` logs it at level INFO.

    Raises:
        ModelError: its format cannot be trained on; or no blocks or embeddings are found, or none by these names.

    Source: the protocol is QLoRA's (Dettmers et al. 2023, arXiv:2305.14314), as in peft.
    """
    base = base_of(model)
    recomputed = _check(base, recompute, input_gradients, use_reentrant, blocks, embedding)
    adapters = _adapter_parameters(model)
    weights, frozen = count_weight_bytes(base, adapters), _freeze(base, adapters)
    plan = plan_casts(base, cast, adapters, head=head, embeddings=embeddings)
    _forget_former(base)
    apply_casts(plan)
    apply_matching(base, cast)
    if recomputed.chosen:
        apply_recompute(base, recompute, blocks=blocks, use_reentrant=use_reentrant)
    _add_hooks(base, embedding if input_gradients else (), use_reentrant)
    report = PreparationReport(cast, plan.cast, frozen, recomputed, input_gradients, plan.kept, weights)
    model.preparation_report = report  # type: ignore[assignment]  # nn.Module is typed for tensors only
    for line in report.lines():
        logger.info(line)
    return model


def predict_preparation(
    model: PreTrainedModel,
    cast: Cast,
    quantized: bool,
    recompute: Policy,
    *,
    head: bool = True,
    embeddings: bool = True,
) -> PreparationReport:
    """What the preparation will do to a model that is not quantized yet, e.g. on the meta device. Nothing is changed.

    Args:
        model: not quantized.
        cast: as in `prepare_for_kbit_training`, and so are `recompute`, `head` and `embeddings`.
        quantized: whether its linear layers, all but the head, will be packed and so not cast.
        recompute: as there.
        head: cast the output head.
        embeddings: cast the input embeddings.

    Raises:
        ModelError: its blocks cannot recompute so.
    """
    output = part_of(model, "get_output_embeddings")
    packed: set[int] = set()
    for module in model.modules() if quantized else ():
        if is_linear(module) and module is not output:
            packed.add(id(module.weight))
    plan = plan_casts(model, cast, packed, head=head, embeddings=embeddings)
    count = sum(p.numel() for p in model.parameters())
    return PreparationReport(cast, plan.cast, count, plan_recompute(model, recompute), True, plan.kept)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(
    base: nn.Module,
    recompute: Policy,
    input_gradients: bool,
    use_reentrant: bool,
    blocks: Names | None,
    embedding: Names | None,
) -> Recomputed:
    """All that can be refused, before anything is changed. Returns which blocks will recompute."""
    refuse_untrainable(base)
    kind = type(base).__name__
    recomputed = plan_recompute(base, recompute, blocks=blocks)
    if recomputed.chosen and use_reentrant and not input_gradients:
        what = "reentrant recompute passes no gradient on unless a block's input asks for one"
        raise ModelError(Problem(kind, what, "Write input_gradients=True, or use_reentrant=False"))
    if input_gradients and not find_embeddings(base, embedding) and not find_stacks(base):
        what = "has neither an input embedding nor blocks that can be found"
        raise ModelError(Problem(kind, what, 'Write embedding="NAME", or input_gradients=False'))
    return recomputed


def _adapter_parameters(model: nn.Module) -> set[int]:
    """Identities of parameters that peft trains: adapter weights and the copies in `modules_to_save`."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            for name in module.adapter_layer_names:
                part = getattr(module, name, None)
                if isinstance(part, nn.Module):
                    found.update(id(parameter) for parameter in part.parameters())
                elif isinstance(part, nn.Parameter):
                    found.add(id(part))
    return found


def _freeze(base: nn.Module, adapters: set[int]) -> int:
    """Freeze the base, and the layout of its packed weights. Returns how many weights that are."""
    keep_trainable_layout(base)
    frozen = 0
    for parameter in base.parameters():
        if id(parameter) not in adapters:
            parameter.requires_grad_(False)
            frozen += parameter.numel()
    return frozen


def _forget_former(base: nn.Module) -> None:
    """Take away what a call before this one added, and what transformers adds by itself."""
    remove_matching(base)
    remove_recompute(base)
    _switch_off(base, "disable_input_require_grads")  # a hook that is added before the last one is removed stays
    for module in base.modules():
        for handle in module.__dict__.pop("_lowmem_hooks", ()):
            handle.remove()


def _switch_off(base: nn.Module, method: str) -> None:
    if hasattr(base, method):
        getattr(base, method)()


def _add_hooks(base: nn.Module, embedding: Names | None, use_reentrant: bool) -> None:
    """Hooks for input gradients (none with no names at all), and one that keeps the cache empty while training."""
    wanted = embedding is None or len(embedding) > 0
    found = find_embeddings(base, embedding) if wanted else []
    for module in found:
        _remember(module, module.register_forward_hook(_ask_for_gradient))
    if wanted and (use_reentrant or not found):
        for stack in find_stacks(base).values():
            _remember(stack[0], stack[0].register_forward_pre_hook(_ask_for_input_gradient, with_kwargs=True))
    for module in base.modules():
        if isinstance(module, PreTrainedModel) and "use_cache" in inspect.signature(module.forward).parameters:
            _remember(module, module.register_forward_pre_hook(_no_cache_in_training, with_kwargs=True))


def _remember(module: nn.Module, handle: Any) -> None:
    module.__dict__.setdefault("_lowmem_hooks", []).append(handle)


def _ask_for_gradient(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_floating_point():
        output.requires_grad_(True)


def _ask_for_input_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every floating input that has no gradient gets one of its own; the caller's tensor stays as it is."""
    if not torch.is_grad_enabled():
        return None
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()), None)
    if first is None or first.requires_grad:
        return None
    asking = first.detach().requires_grad_(True)
    changed = {key: asking if value is first else value for key, value in kwargs.items()}
    return tuple(asking if value is first else value for value in args), changed


def _no_cache_in_training(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if module.training and torch.is_grad_enabled():
        return args, {**kwargs, "use_cache": False}
    return None
