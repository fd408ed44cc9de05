"""Keys that the recipe does not have: what was probably meant, and where it belongs."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.errors import nearest
from lowmem_ft.recipe.allowed import Setting, sections, settings_of
from lowmem_ft.recipe.emit import text_as_yaml
from lowmem_ft.recipe.section import Section
from lowmem_ft.recipe.yaml12 import Node, Scalar

# What other tools call it: the dotted setting here, and the value that says the same (None: the value can be kept;
# "": it cannot, an example is shown).
OTHER_NAMES: dict[str, tuple[str, str | None]] = {
    "base_model": ("model.path", None),
    "model_name_or_path": ("model.path", None),
    "model_id": ("model.path", None),
    "load_in_4bit": ("model.quantization", "nf4"),
    "load_in_8bit": ("model.quantization", "int8"),
    "bnb_4bit_quant_type": ("model.quantization", None),
    "bnb_4bit_use_double_quant": ("model.double_quant", None),
    "torch_dtype": ("model.dtype", None),
    "dataset": ("data.train", None),
    "val": ("data.eval", None),
    "max_length": ("data.max_tokens", None),
    "max_seq_length": ("data.max_tokens", None),
    "max_seq_len": ("data.max_tokens", None),
    "cutoff_len": ("data.max_tokens", None),
    "sequence_len": ("data.max_tokens", None),
    "chat_template": ("data.template", None),
    "sample_packing": ("data.packing", None),
    "lora": ("adapter.kind", "lora"),
    "r": ("adapter.rank", None),
    "lora_r": ("adapter.rank", None),
    "lora_rank": ("adapter.rank", None),
    "lora_alpha": ("adapter.alpha", None),
    "lora_dropout": ("adapter.dropout", None),
    "target_modules": ("adapter.targets", None),
    "lora_target": ("adapter.targets", None),
    "learning_rate": ("train.lr", None),
    "num_epochs": ("train.epochs", None),
    "num_train_epochs": ("train.epochs", None),
    "max_steps": ("train.steps", None),
    "per_device_train_batch_size": ("train.batch_size", ""),
    "gradient_accumulation_steps": ("train.micro_batch_tokens", ""),
    "micro_batch_size": ("train.micro_batch_tokens", ""),
    "lr_scheduler": ("train.schedule", None),
    "lr_scheduler_type": ("train.schedule", None),
    "optim": ("train.optimizer", ""),
    "fp16": ("train.precision", "fp16"),
    "bf16": ("train.precision", "bf16"),
    "fp32": ("train.precision", "fp32"),
    "gradient_checkpointing": ("memory.recompute", "block"),
    "activation_checkpointing": ("memory.recompute", "block"),
    "output_dir": ("output", None),
    "save_steps": ("checkpoint.every_steps", None),
    "save_total_limit": ("checkpoint.keep", None),
    "eval_steps": ("eval.every_steps", None),
}


@dataclass(frozen=True)
class UnknownName:
    """What to say about a key that is not there.

    Attributes:
        what: that it is not there, and why it may have been written.
        instead: what to write.
        meant: the setting of this same section that was probably meant, else None.
    """

    what: str
    instead: str
    meant: str | None


def unknown_name(section: type[Section], path: str, name: str, node: Node) -> UnknownName:
    """What to say about a key that its section does not have.

    Args:
        section: the section in which it stands.
        path: the section's dotted name as written; empty at the top level.
        name: the key.
        node: its value, to be shown at the place where it belongs.
    """
    own = settings_of(section)
    tidy = name.lower().replace("-", "_").strip()
    holder = path or "the top level"
    missing = f"{holder} has no setting {name}"
    close = tidy if tidy in own else nearest(tidy, list(own))
    elsewhere = [place for place, held in sections().items() if tidy in settings_of(held) and held is not section]
    if elsewhere and tidy not in own:
        where = " or ".join(place or "the top level" for place in elsewhere)
        near = f", or did you mean {close}?" if close else ""
        what = f"{name} belongs to {where}, not to {holder}"
        return UnknownName(what, f"Write {_line(node, elsewhere[0], tidy)}{near}", None)
    if tidy in OTHER_NAMES and tidy not in own:
        key, value = OTHER_NAMES[tidy]
        place, _, setting = key.rpartition(".")
        line = _line(node, place, setting, path, value)
        what = f"there is no setting {name}; it is {key} here"
        return UnknownName(what, f"Write {line}", setting if place == path else None)
    if ":" in name:
        return UnknownName(missing, "Put a space after the colon", None)
    if close and node.place.override and own[close].is_section:
        better = node.place.override.replace(name, close, 1)
        return UnknownName(missing, f"Did you mean {close}? Write {better}", close)
    if close:
        line = _line(node, path, close, path, _written(node) or _example(own[close]))
        return UnknownName(missing, f"Did you mean {close}? Write {line}", close)
    other = _nearest_elsewhere(tidy)
    if other:
        meant = ".".join(filter(None, other))
        return UnknownName(missing, f"Did you mean {meant}? Write {_line(node, *other)}", None)
    return UnknownName(missing, f"It has {', '.join(own)}", None)


def _nearest_elsewhere(name: str) -> tuple[str, str] | None:
    owners: dict[str, str] = {}
    for place, section in sections().items():
        for setting in settings_of(section):
            owners.setdefault(setting, place)
    close = nearest(name, list(owners))
    return (owners[close], close) if close else None


def _line(node: Node, section: str, name: str, path: str = "", value: str | None = None) -> str:
    """A line to paste: `lr: 2e-4` in its own section `path`, else `train: {lr: 2e-4}`; for an override `train.lr=2e-4`.

    The value is the one that was written, unless another is given (empty: the setting's example).
    """
    settings = settings_of(sections().get(section, Section))
    text = _written(node) if value is None else value
    text = text or (_example(settings[name]) if name in settings else "...")
    if node.place.override:
        return f"{section}.{name}={text}" if section else f"{name}={text}"
    text = f"{name}: {text}"
    for outer in reversed(section.split(".") if section and section != path else []):
        text = f"{outer}: {{{text}}}"
    return text


def _example(setting: Setting) -> str:
    return setting.paste.removeprefix(f"{setting.name}: ")


def _written(node: Node) -> str:
    """A short value as it was written, else empty."""
    if not isinstance(node, Scalar):
        return "..."
    if node.is_null or len(node.text) > 60:
        return ""
    return node.text if node.plain else text_as_yaml(node.text)
