"""Adapters by peft: which layers get one, and how many weights that trains."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.errors import ModelError, Problem, nearest

MOST_NAMES = 6


@dataclass(frozen=True)
class AdapterReport:
    """What was given an adapter.

    Attributes:
        layers: layers with an adapter, by the last part of their name.
        trainable_parameters: weights that train.
        trainable_bytes: their bytes.
    """

    layers: dict[str, int]
    trainable_parameters: int
    trainable_bytes: int


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: str | list[str] = "all-linear",
    autocast: bool = True,
) -> tuple[PeftModel, AdapterReport]:
    """Give `model` LoRA adapters in fp32. The second factor starts at zero, so the model answers as before.

    Memory: `R * (in + out) * 4` bytes a layer, three times more for its gradient and the optimizer's two averages.

    Args:
        model: prepared, on its device.
        rank: R.
        alpha: the adapter's output is multiplied by alpha / rank.
        dropout: on the adapter's input while training.
        targets: `all-linear` (all but the head), or names: the last parts of module names, e.g. `q_proj`.
        autocast: the model will always run under autocast.

    Returns:
        The wrapped model and what was done.

    Raises:
        ModelError: a name matches no layer; near names are listed.

    Source: Hu et al. 2021, arXiv:2106.09685, by peft.
    """
    if isinstance(targets, list):
        _check_targets(model, targets)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # any number works, peft divides by it
        lora_dropout=dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.24 by a name that goes in v6
        warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)  # one adapter kind, never a mixed model
    layers: Counter[str] = Counter()
    for name, module in adapted.named_modules():
        if isinstance(module, BaseTunerLayer):
            # peft casts the input to the adapter's fp32 unless CUDA autocast is on (it does not see CPU autocast):
            # a copy of the whole input that autocast turns back at once
            module.cast_input_dtype_enabled = not autocast  # type: ignore[attr-defined]
            layers[name.rsplit(".", 1)[-1]] += 1
    trained = [p for p in adapted.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in trained)
    return adapted, AdapterReport(dict(layers), sum(p.numel() for p in trained), size)


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    linears = [name for name, module in model.named_modules() if _is_linear(module)]
    last_parts = sorted({name.rsplit(".", 1)[-1] for name in linears})
    problems = []
    for target in targets:
        if any(name == target or name.endswith(f".{target}") for name in linears):
            continue
        near = nearest(target, last_parts)
        instead = f"Write {near}. " if near else ""
        names = ", ".join(last_parts[:MOST_NAMES])
        problems.append(Problem("adapter.targets", f"{target} matches no linear layer", f"{instead}There are: {names}"))
    if problems:
        raise ModelError(problems)


def _is_linear(module: nn.Module) -> bool:
    """Linear layers of torch, of bitsandbytes (which inherit from it), and GPT-2's Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
