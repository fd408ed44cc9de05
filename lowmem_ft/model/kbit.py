"""Makes a quantized model ready for training: what is not quantized goes to fp32, the base is frozen, and blocks
recompute their activations (gradient checkpointing).

    from lowmem_ft import prepare_for_kbit_training
    model = prepare_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(...))
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.model.load import is_packed
from lowmem_ft.units import format_bytes, format_count

logger = logging.getLogger(__name__)

Cast = Literal["all", "norms", "none"]
Recompute = Literal["block", "none"]


@dataclass(frozen=True)
class CastGroup:
    """Parameters of one part of the model that were cast alike.

    Attributes:
        part: `embeddings`, `head`, `norms` or `other`.
        parameters: how many weights.
        before: type before.
        bytes_before: their bytes before.
        bytes_after: their bytes in fp32.
    """

    part: str
    parameters: int
    before: torch.dtype
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class PreparationReport:
    """What `prepare_for_kbit_training` did.

    Attributes:
        cast: what was asked for.
        groups: what was cast to fp32, by part and former type.
        frozen_parameters: base parameters that do not train, in weights; packed ones by their stored elements.
        recompute: `block` or `none`.
        input_gradients: whether the embedding's output asks for gradients.
    """

    cast: Cast
    groups: tuple[CastGroup, ...]
    frozen_parameters: int
    recompute: Recompute
    input_gradients: bool

    @property
    def added_bytes(self) -> int:
        """What the casts cost."""
        return sum(group.bytes_after - group.bytes_before for group in self.groups)

    def lines(self) -> list[str]:
        """The report, for people."""
        lines = []
        for group in self.groups:
            dtype = str(group.before).removeprefix("torch.")
            sizes = f"{format_bytes(group.bytes_before)} -> {format_bytes(group.bytes_after)}"
            lines.append(f"cast {group.part}: {format_count(group.parameters)} weights, {dtype} -> float32, {sizes}")
        cost = format_bytes(self.added_bytes)
        checkpointing = "gradient checkpointing on every block" if self.recompute == "block" else "no recompute"
        gradients = "on" if self.input_gradients else "off"
        lines.append(f"casts add {cost}; base frozen; {checkpointing}; input gradients {gradients}")
        return lines


def prepare_for_kbit_training(
    model: PreTrainedModel,
    *,
    cast: Cast = "all",
    recompute: Recompute = "block",
    input_gradients: bool = True,
) -> PreTrainedModel:
    """Prepare a model, quantized or not, for training adapters on it. In place; calling it twice changes nothing more.

    1. Base parameters are frozen. Parameters of adapters that are already there keep training.
    2. Floating parameters that are not quantized go to fp32, one at a time, so the extra peak is the largest of them.
       Packed weights, scales and buffers stay. Tied weights stay tied.
    3. The output of the input embedding asks for gradients.
    4. Every transformer block keeps only its input and computes the rest again in backward, non-reentrant.

    Exactness: freezing and recompute change no result. Casts to fp32 are exact; what follows them is computed with
    more digits.
    Memory: `cast="all"` adds 2 bytes for each 16-bit weight that is not quantized, embeddings and head included;
    `norms` adds them for norm weights only, and casts each norm's output back, so the residual stream stays 16-bit.

    Args:
        model: a transformers model on any device.
        cast: `all`, `norms`, or `none`.
        recompute: `block`, or `none` to keep all activations.
        input_gradients: needed with reentrant recompute of other tools, harmless here; the first block's input
            gradient is computed for it.

    Returns:
        The same model. Its `preparation_report` says what was done, in bytes; `lowmem_ft` logs it at level INFO.

    Raises:
        ModelError: the model has no blocks that can recompute.

    Source: the protocol is QLoRA's (Dettmers et al. 2023, arXiv:2305.14314), as in peft.
    """
    trained = _adapter_parameters(model)
    frozen = 0
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)
            frozen += parameter.numel()
    groups = _cast_parameters(model, cast, trained)
    model.disable_input_require_grads()  # a hook that is added before the last one is removed stays for ever
    if recompute == "block":
        _recompute_blocks(model)
    else:
        model.activation_checkpointing_disable()
    model.disable_input_require_grads()  # turning recompute on has added a hook
    if input_gradients:
        model.enable_input_require_grads()
    report = PreparationReport(cast, tuple(groups), frozen, recompute, input_gradients)
    model.preparation_report = report  # type: ignore[assignment]  # nn.Module is typed for tensors only
    for line in report.lines():
        logger.info(line)
    return model


def _adapter_parameters(model: nn.Module) -> set[int]:
    """Identities of parameters that peft trains: adapter weights and the copies in `modules_to_save`."""
    if not hasattr(model, "peft_config"):
        return set()
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


def _cast_parameters(model: PreTrainedModel, cast: Cast, trained: set[int]) -> list[CastGroup]:
    groups = []
    for group, parameters in _groups_to_cast(model, cast, trained):
        for parameter in parameters:
            parameter.data = parameter.data.to(torch.float32)  # the old storage goes before the next is made
        groups.append(group)
    if cast == "norms":
        _cast_back_norms(model)
    return groups


def predict_preparation(model: PreTrainedModel, cast: Cast, quantized: bool, recompute: Recompute) -> PreparationReport:
    """What the preparation will do to a model that is not quantized yet, e.g. on the meta device. Nothing is changed.

    Args:
        model: not quantized.
        cast: as in `prepare_for_kbit_training`.
        quantized: whether its linear layers, all but the head, will be packed and so not cast.
        recompute: as in `prepare_for_kbit_training`.
    """
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    packed = {id(module.weight) for module in linears} if quantized else set()
    groups = [group for group, _ in _groups_to_cast(model, cast, packed)]
    return PreparationReport(cast, tuple(groups), sum(p.numel() for p in model.parameters()), recompute, True)


def _groups_to_cast(
    model: PreTrainedModel, cast: Cast, excluded: set[int]
) -> list[tuple[CastGroup, list[nn.Parameter]]]:
    """Parameters that go to fp32, by part and type."""
    parts = _parts_of_parameters(model)
    found: dict[tuple[str, torch.dtype], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        part = parts.get(id(parameter), "other")
        wanted = cast == "all" or (cast == "norms" and part == "norms")
        if wanted and id(parameter) not in excluded and not is_packed(parameter) and parameter.dtype != torch.float32:
            found.setdefault((part, parameter.dtype), []).append(parameter)
    groups = []
    for (part, dtype), parameters in found.items():
        count = sum(p.numel() for p in parameters)
        groups.append((CastGroup(part, count, dtype, count * dtype.itemsize, count * 4), parameters))
    return groups


def _parts_of_parameters(model: PreTrainedModel) -> dict[int, str]:
    parts: dict[int, str] = {}
    for module in model.modules():
        if is_norm(module):
            parts.update((id(p), "norms") for p in module.parameters(recurse=False))
    for name, module in (("head", model.get_output_embeddings()), ("embeddings", model.get_input_embeddings())):
        if module is not None:
            parts.update((id(p), name) for p in module.parameters())
    return parts


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization: by torch's classes, or by the name of its class with a 1-D weight."""
    if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
        return True
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, Tensor) and weight.ndim == 1


def _cast_back_norms(model: nn.Module) -> None:
    for module in model.modules():
        if is_norm(module) and not hasattr(module, "_lowmem_cast_back"):
            module._lowmem_cast_back = module.register_forward_hook(_to_input_dtype)  # type: ignore[assignment]


def _to_input_dtype(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(args[0].dtype) if args else output


def _recompute_blocks(model: PreTrainedModel) -> None:
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})
    except (ValueError, AttributeError) as error:
        what = f"has no blocks that can recompute their activations: {error}"
        raise ModelError(Problem(type(model).__name__, what, 'Write recompute="none"')) from error
