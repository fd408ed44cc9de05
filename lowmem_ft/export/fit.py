"""Whether an adapter belongs to a base: every tensor that peft would give it is there, in its shape, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
from transformers import PreTrainedModel

from lowmem_ft.errors import ExportError, Problem
from lowmem_ft.export.adapter_weights import WEIGHTS
from lowmem_ft.model.tensor_files import TensorFiles

Shapes = dict[str, tuple[int, ...]]


def check_fits(folder: Path, empty: PreTrainedModel, where: str) -> None:
    """Compare an adapter's file with what peft makes for this base. No weight is read.

    Args:
        folder: of the adapter.
        empty: the base on the meta device; it gets the adapter's modules.
        where: the base, for messages.

    Raises:
        ExportError: what is missing, unmatched or of another shape, all of it.
    """
    files = TensorFiles(folder / WEIGHTS)
    has = {_key(name): files[name].shape for name in files}
    ends = _end_names(empty)
    try:
        wants = _wanted(folder, empty)
    except ValueError as error:  # peft names the targets that the base does not have
        what = " ".join(str(error).split())
        raise ExportError([Problem(str(folder), f"does not fit {where}: {what}"), _RIGHT_BASE]) from error
    file = str(folder / WEIGHTS)
    problems = [Problem(file, f"lacks {name}, which {where} needs") for name in sorted(wants.keys() - has.keys())]
    unmatched = has.keys() - wants.keys() - ends  # a vocabulary that grew is saved whole beside the adapter
    problems += [Problem(file, f"has {name}, for which {where} has no place") for name in sorted(unmatched)]
    for name in sorted(wants.keys() & has.keys()):
        if wants[name] != has[name] and not (name in ends and wants[name][1:] == has[name][1:]):
            problems.append(Problem(file, f"has {name} as {list(has[name])}, and {where} needs {list(wants[name])}"))
    if problems:
        raise ExportError([*problems[:_MOST], *_rest(problems), _RIGHT_BASE])


_MOST = 8
_RIGHT_BASE = Problem("", "Name the base that the adapter was trained on by --model")


def _rest(problems: list[Problem]) -> list[Problem]:
    return [Problem("", f"... and {len(problems) - _MOST} more of its tensors")] if len(problems) > _MOST else []


def _wanted(folder: Path, empty: PreTrainedModel) -> Shapes:
    adapted = get_peft_model(empty, PeftConfig.from_pretrained(str(folder)))
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {_key(name): tuple(tensor.shape) for name, tensor in state.items()}


def _key(name: str) -> str:
    """A tensor's name since peft 0.12."""
    return re.sub(r"\.lora_magnitude_vector\.weight$", ".lora_magnitude_vector", name)


def _end_names(model: PreTrainedModel) -> set[str]:
    """Names that embedding and head have in an adapter's file."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    return {f"base_model.model.{name}.{part}weight" for name in names for part in ("", "base_layer.")}
