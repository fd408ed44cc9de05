"""What a path holds that can answer or be exported: a run, a checkpoint, an adapter, or a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lowmem_ft.errors import ExportError, ModelError, Problem
from lowmem_ft.export.adapter_weights import CONFIG, read_adapter_config
from lowmem_ft.export.trained_base import Quantization
from lowmem_ft.model.base_record import BaseRecord, differences, read_record
from lowmem_ft.model.find import FoundModel, Progress, find_model
from lowmem_ft.recipe.data_section import DataSection
from lowmem_ft.recipe.load import load_recipe
from lowmem_ft.recipe.schema import Recipe

Kind = Literal["run", "checkpoint", "adapter", "model"]
STATE = "state.json"


@dataclass(frozen=True)
class Subject:
    """Something that answers.

    Attributes:
        path: as it was named.
        kind: what it is.
        adapter: folder with the adapter; None for a model.
        model: its base, as `find_model` takes it; the model itself for a model.
        revision: of a hub id.
        quantization: how the base was loaded in training; None where that is not known.
        precision: of products in training, `bf16`, `fp16` or `fp32`; None where it is not known.
        tokenizer: folder with the tokenizer; None: beside the base.
        template: chat template of training, by name or path; None: the tokenizer's own.
        max_tokens: of a training sequence; None where it is not known.
        data: what was trained and evaluated on; None where it is not known.
        record: what the base was in training, if that was written down.
        trust_remote_code: run the model's own Python code, as the recipe said.
    """

    path: Path
    kind: Kind
    adapter: Path | None
    model: str
    revision: str | None = None
    quantization: Quantization | None = None
    precision: str | None = None
    tokenizer: Path | None = None
    template: str | None = None
    max_tokens: int | None = None
    data: DataSection | None = None
    record: BaseRecord | None = None
    trust_remote_code: bool = False

    def find_base(self, progress: Progress = lambda _: None) -> FoundModel:
        """The base, or the model.

        Raises:
            ModelError: it is not there; for an adapter the message says how to name another place.
        """
        try:
            return find_model(self.model, self.revision, progress)
        except ModelError as error:
            if self.adapter is None:
                raise
            what = f"the base that {self.path} was trained on is not found"
            raise ModelError([Problem(self.model, what, "Name its place by --model"), *error.problems]) from error

    def check_base(self, found: FoundModel) -> None:
        """Refuse a base that is not what it was in training. Without a record nothing is known, and nothing refused.

        Raises:
            ExportError: what differs.
        """
        different = differences(self.record, found) if self.record else []
        if different:
            first = Problem(found.path, f"is not the base that {self.path} was trained on, in {len(different)} points")
            raise ExportError([first, *different, Problem("", "Name the right one by --model, or write --force")])


def find_subject(path: Path, model: str | None = None, quantization: str | None = None) -> Subject:
    """Find out what `path` is.

    Args:
        path: a run folder, a checkpoint, an adapter's folder, a model's folder, a .gguf file or a hub id.
        model: the base's place, if it is not where it was in training.
        quantization: method of the training, where nothing records it.

    Raises:
        ModelError: it is none of these.
        ExportError: something else is recorded than `quantization`.
        RecipeError: the recipe of a run cannot be read.
    """
    subject = _found(path)
    if subject.adapter is None:
        return subject
    if quantization is not None:
        known = subject.quantization
        if known is not None and known.method != quantization:
            what = f"was trained in {known.method}, and --quantization says {quantization}"
            raise ExportError(Problem(str(path), what, "Remove --quantization"))
        subject = replace(subject, quantization=known or Quantization(quantization, True, "bfloat16"))
    return subject if model is None else replace(subject, model=model, revision=None)


def _found(path: Path) -> Subject:
    if (path / "recipe.yaml").is_file():
        return _of_run(path)
    if (path / CONFIG).is_file():
        return _of_checkpoint(path) if (path / STATE).is_file() else _of_adapter(path)
    if not path.is_dir() or (path / "config.json").is_file():
        return Subject(path, "model", None, str(path))
    names = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
    instead = "Name a run folder, a checkpoint, or a folder with an adapter or a model"
    raise ModelError(Problem(str(path), f"holds no run, adapter or model, only: {names}", instead))


def _of_run(path: Path) -> Subject:
    adapter = path / "adapter"
    if not (adapter / CONFIG).is_file():
        saved = sorted(entry.name for entry in (path / "checkpoints").glob("step-*"))
        instead = f"Name a checkpoint: {path / 'checkpoints' / saved[-1]}" if saved else "Let the run end first"
        raise ModelError(Problem(str(path), "the run has no adapter yet: it holds no finished run", instead))
    recipe = load_recipe(path / "recipe.yaml").recipe
    return replace(_by_recipe(path, "run", adapter, recipe), tokenizer=adapter, record=read_record(adapter, path))


def _of_checkpoint(path: Path) -> Subject:
    try:
        recipe = Recipe.model_validate(json.loads((path / STATE).read_text(encoding="utf-8"))["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot be read ({type(error).__name__})"
        raise ModelError(Problem(str(path / STATE), what, "Name another checkpoint")) from error
    subject = _by_recipe(path, "checkpoint", path, recipe)
    return replace(subject, template=recipe.data.template, record=read_record(path, path.parent.parent))


def _by_recipe(path: Path, kind: Kind, adapter: Path, recipe: Recipe) -> Subject:
    model = recipe.model
    return Subject(
        path,
        kind,
        adapter,
        model.path,
        model.revision,
        Quantization(model.quantization, model.double_quant, model.dtype),
        recipe.train.precision,
        max_tokens=recipe.data.max_tokens,
        data=recipe.data,
        trust_remote_code=model.trust_remote_code,
    )


def _of_adapter(path: Path) -> Subject:
    config: dict[str, Any] = read_adapter_config(path)
    tokenizer = path if (path / "tokenizer_config.json").is_file() else None
    record = read_record(path)
    if record is None:
        named = config.get("base_model_name_or_path")
        if not named:
            raise ModelError(Problem(str(path / CONFIG), "names no base model", "Name it by --model"))
        return Subject(path, "adapter", path, str(named), config.get("revision"), tokenizer=tokenizer)
    quantization = Quantization(record.quantization, record.double_quant, record.dtype)
    return Subject(
        path,
        "adapter",
        path,
        record.model,
        record.revision,
        quantization,
        record.precision,
        tokenizer=tokenizer,
        record=record,
    )
