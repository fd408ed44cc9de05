"""Adapters by peft: which kind, which layers get one, and how many weights that trains."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, VeraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.errors import ModelError, Problem
from lowmem_ft.model.packed import is_packed
from lowmem_ft.model.targets import TargetMatch, Targets, find_targets, match_names, tied_names, values_by_module

Kind = Literal["lora", "dora", "rslora", "vera", "ia3"]


@dataclass(frozen=True)
class AdapterSettings:
    """What is to be trained; the fields are those of the recipe's `adapter` section.

    Attributes:
        kind: `lora`; `rslora`, scaled by alpha / sqrt(R); `dora`, with a trained length for each output; `vera`, two
            random matrices that all layers share, and trained scales; `ia3`, a trained scale for each output.
        rank: R; not for ia3.
        alpha: the adapter's output is multiplied by alpha / R; not for vera and ia3.
        dropout: on the adapter's input while training; not for ia3.
        targets: see `find_targets`.
        layers: see `find_targets`.
        rank_pattern: other ranks, by name or /regular expression/; lora, dora, rslora.
        alpha_pattern: other alphas, likewise.
        modules_to_save: modules that train whole, by name, each as a copy in fp32 that is saved with the adapter.
        trainable_tokens: ids whose rows of the embedding train; lora, dora, rslora.
    """

    kind: Kind = "lora"
    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: str | Sequence[str] = "all-linear"
    layers: Sequence[int] | None = None
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    modules_to_save: Sequence[str] | None = None
    trainable_tokens: Sequence[int] | None = None


@dataclass(frozen=True)
class AdapterReport:
    """What was given an adapter.

    Attributes:
        layers: layers with an adapter, by the last part of their name.
        trainable_parameters: weights that train.
        trainable_bytes: their bytes.
        table: what each name of the targets matched, and in which blocks.
        warnings: what the user should know.
        others: what trains beside adapters, in words.
    """

    layers: dict[str, int]
    trainable_parameters: int
    trainable_bytes: int
    table: tuple[TargetMatch, ...] = ()
    warnings: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def add_adapters(
    model: PreTrainedModel, settings: AdapterSettings, *, autocast: bool = True
) -> tuple[PeftModel, AdapterReport]:
    """Give `model` adapters in fp32 that start without effect, so the model answers as before.

    Exactness: lora and rslora start bit for bit at the base. The others multiply its outputs by numbers that are one,
    or hand them on in another type, so they start at it up to one rounding of the compute type.
    Memory: LoRA `R * (in + out) * 4` bytes a layer, DoRA `out * 4` more, VeRA `(R + out) * 4` and once
    `R * (widest in + widest out) * 4` for what is shared, IA3 `out * 4`; three times more of what trains for its
    gradient and the optimizer's two averages.

    Args:
        model: prepared, on its device.
        settings: what, where.
        autocast: the model will always run under autocast.

    Returns:
        The wrapped model and what was done.

    Raises:
        ModelError: a name matches nothing, or this base cannot have what is asked for.

    Source: by peft. LoRA: Hu et al. 2021, arXiv:2106.09685. rsLoRA: Kalajdzievski 2023, arXiv:2312.03732. DoRA: Liu et
    al. 2024, arXiv:2402.09353. VeRA: Kopiczko et al. 2023, arXiv:2310.11454. IA3: Liu et al. 2022, arXiv:2205.05638.
    """
    _refuse_unused(settings)
    targets = find_targets(model, settings.targets, settings.layers)
    _refuse_base(model, settings.kind, targets)
    saved = _check_whole_modules(model, settings, targets)
    _check_tokens(model, settings.trainable_tokens or ())
    config = _make_config(model, settings, targets)
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.24 by a name that goes in v6
        warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)  # one adapter kind, never a mixed model
    layers = _adapted_layers(adapted, targets, cast_inputs=not autocast or settings.kind == "dora")
    trained = [p for p in adapted.parameters() if p.requires_grad]
    for parameter in trained:
        if autocast and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    size = sum(p.numel() * p.element_size() for p in trained)
    others = [f"{name} whole" for name in saved]
    if settings.trainable_tokens:
        others.append(f"{len(settings.trainable_tokens):,} rows of the embedding")
    count = sum(p.numel() for p in trained)
    return adapted, AdapterReport(layers, count, size, targets.table, targets.warnings, tuple(others))


def _adapted_layers(adapted: PeftModel, targets: Targets, cast_inputs: bool) -> dict[str, int]:
    """Layers with an adapter by the last part of their name. They are those that were meant, or it is our mistake."""
    layers: Counter[str] = Counter()
    names = set()
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer) and hasattr(module, "base_layer") and name in set(targets.modules):
            # peft casts the input to the adapter's fp32 unless CUDA autocast is on (it does not see CPU autocast):
            # a copy of the whole input that autocast turns back at once. dora measures the base's weights in that type
            module.cast_input_dtype_enabled = cast_inputs  # type: ignore[attr-defined]
            layers[name.rsplit(".", 1)[-1]] += 1
            names.add(name)
    left_out = [name for name in targets.modules if name not in names]
    if left_out:
        what = f"peft gave no adapter to {', '.join(left_out[:6])}"
        raise ModelError(Problem("adapter.targets", what, "Take them out of the targets"))
    return dict(layers)


def _make_config(model: nn.Module, settings: AdapterSettings, targets: Targets) -> PeftConfig:
    """The settings in peft's words. What peft would read otherwise than we do is given as full names."""
    plain = isinstance(settings.targets, str) or not any(name.startswith("/") for name in settings.targets)
    as_written = settings.layers is None and plain
    written = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    common: dict[str, Any] = {
        "target_modules": written if as_written else list(targets.modules),
        "modules_to_save": list(settings.modules_to_save or ()) or None,
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": any(type(module).__name__ == "Conv1D" for module in model.modules()),
    }
    if settings.kind == "ia3":
        return IA3Config(**common, feedforward_modules=[])
    if settings.kind == "vera":
        return VeraConfig(**common, r=settings.rank, vera_dropout=settings.dropout)
    ranks = values_by_module("adapter.rank_pattern", settings.rank_pattern or {}, targets.modules)
    alphas = values_by_module("adapter.alpha_pattern", settings.alpha_pattern or {}, targets.modules)
    return LoraConfig(
        **common,
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number works, peft divides by it
        lora_dropout=settings.dropout,
        use_dora=settings.kind == "dora",
        use_rslora=settings.kind == "rslora",
        rank_pattern={re.escape(name): int(rank) for name, rank in ranks.items()},
        alpha_pattern={re.escape(name): alpha for name, alpha in alphas.items()},
        trainable_token_indices=list(settings.trainable_tokens or ()) or None,
    )


def _refuse_unused(settings: AdapterSettings) -> None:
    unused = unused_settings(settings.kind)
    defaults = AdapterSettings()
    given = [name for name in unused if getattr(settings, name) != getattr(defaults, name)]
    if given:
        instead = "Remove it, or write kind: lora"
        raise ModelError([Problem(f"adapter.{name}", f"{settings.kind} has no {name}", instead) for name in given])


def unused_settings(kind: str) -> tuple[str, ...]:
    """Settings that a kind of adapter does not have."""
    lora_only = ("alpha", "rank_pattern", "alpha_pattern", "trainable_tokens")
    return {"vera": lora_only, "ia3": ("rank", "dropout", *lora_only)}.get(kind, ())


def _refuse_base(model: nn.Module, kind: str, targets: Targets) -> None:
    """What peft 0.21.2 cannot do on a base."""
    if not targets.modules:
        raise ModelError(Problem("adapter.targets", "there is no linear layer", "Name a model that has some"))
    int8 = [name for name in targets.modules if type(model.get_submodule(name)).__name__ == "Linear8bitLt"]
    if kind == "dora" and int8:
        what = f"dora needs the lengths of the base's weights, and peft cannot read int8 ones ({int8[0]})"
        raise ModelError(Problem("adapter.kind", what, "Write model.quantization: nf4, or kind: rslora"))


def _check_whole_modules(model: nn.Module, settings: AdapterSettings, targets: Targets) -> list[str]:
    """Full names of the modules that train whole."""
    where, names = "adapter.modules_to_save", [name for name, _ in model.named_modules() if name]
    expressions = [name for name in settings.modules_to_save or () if name.startswith("/")]
    if expressions:
        raise ModelError(Problem(where, f"{expressions[0]} is a regular expression", "Write names of modules"))
    found = match_names(where, settings.modules_to_save or (), names, "module")
    tied = tied_names(model)
    for written, modules in found.items():
        for module in modules:
            part = model.get_submodule(module)
            if module in tied:
                what = f"{module} shares its weight with {next(n for n in tied if n != module)}, and would leave it"
                raise ModelError(Problem(where, what, "Write adapter.trainable_tokens, with the ids that should train"))
            if any(is_packed(p) for p in part.parameters()):
                what = f"{module} is quantized, and cannot train whole"
                raise ModelError(Problem(where, what, f"Write targets: [{written}], or model.quantization: none"))
            if any(name == module or name.startswith(f"{module}.") for name in targets.modules):
                what = f"{module} is among the targets too"
                raise ModelError(Problem(where, what, "Take it out of one of them"))
    return [module for modules in found.values() for module in modules]


def _check_tokens(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    rows = model.get_input_embeddings().weight.shape[0] if tokens else 0  # type: ignore[index]
    wrong = [token for token in tokens if not 0 <= token < rows]
    if wrong:
        what = f"there is no token {wrong[0]}"
        raise ModelError(Problem("adapter.trainable_tokens", what, f"The embedding has rows 0 to {rows - 1}"))
