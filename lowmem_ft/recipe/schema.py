"""The recipe: every setting with its type, range, default and meaning. The large sections have a module each.

The text under a field is its documentation: the JSON Schema and the reference page are made from it, and so are the
ranges and examples that an error shows. A field without a default value to show has an example instead.
Nothing here reads a file or imports torch. A field that exists is honoured by the run; what is not, is not a field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lowmem_ft.errors import nearest
from lowmem_ft.recipe.adapter_section import AdapterSection
from lowmem_ft.recipe.data_section import DataSection
from lowmem_ft.recipe.eval_section import LOSS, EvalSection, metric_name
from lowmem_ft.recipe.section import Positive, Section, SettingError, Text
from lowmem_ft.recipe.train_section import MemorySection, TrainSection

EXCLUSIVE = (("train.epochs", "train.steps"),)
"""Settings of which one at most may be given. On the command line one replaces the other."""


class ModelSection(Section):
    """Which model, and how its frozen weights are stored."""

    path: Annotated[Text, Field(examples=["HuggingFaceTB/SmolLM2-135M-Instruct"])]
    """A local folder, a hub id (`owner/name`), a `.gguf` file, or the demo model `smollm2-135m-instruct`.

    What exists beside the recipe is a path; so is what begins with `./`, `../`, `/` or `~`. The rest is an id."""

    revision: Annotated[Text | None, Field(examples=["main"])] = None
    """Branch, tag or commit on the hub. Only for a hub id."""

    quantization: Literal["none", "nf4", "fp4", "int8"] = "nf4"
    """How the linear layers of the base are stored. Norms, embeddings and the output head are never quantized."""

    double_quant: bool = True
    """Quantize the scales of `nf4` and `fp4` too (0.13 bits a weight instead of 0.5)."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type in which unquantized weights are loaded and quantized weights are multiplied."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors you trust."""


class PrepareSection(Section):
    """What `prepare_for_kbit_training` does before adapters are added."""

    cast: Literal["all", "norms", "none"] = "all"
    """Which non-quantized parameters of the base go to fp32: `all`, only the `norms`, or `none`."""

    head: bool = True
    """Under `all`, cast the output head too."""

    embeddings: bool = True
    """Under `all`, cast the input embeddings too; a tied head goes with them."""

    @model_validator(mode="after")
    def _switches_are_for_all(self) -> PrepareSection:
        off = [name for name in ("head", "embeddings") if not getattr(self, name)]
        if off and self.cast != "all":
            raise SettingError(
                (f"prepare.{off[0]}", "prepare.cast"),
                f"cast: {self.cast} casts no {off[0]} anyway",
                f"Remove {off[0]}, or write cast: all",
            )
        return self


class CheckpointSection(Section):
    """Saved state of the run."""

    folder: Annotated[Text | None, Field(examples=["runs/mine/checkpoints"])] = None
    """Where checkpoints are kept; left out, `checkpoints` in the output folder. Relative to the recipe file."""

    every_steps: Annotated[Positive | None, Field(examples=[100])] = None
    """A checkpoint each so many steps; left out, only on a signal, at `train.max_seconds`, and the end result."""

    keep: Positive = 2
    """How many of the newest checkpoints stay, the best one of `save_best` beside them."""

    save_best: Annotated[Text | None, Field(examples=["loss"])] = None
    """Also save a checkpoint, and keep it, whenever an evaluation is the best so far: by the held-out `loss` of
    `eval.every_steps`, the lowest; or by a metric of `eval.metrics` at `eval.generate_every_steps`, the highest."""

    resume: Annotated[Text | None, Field(examples=["auto"])] = None
    """Go on from a checkpoint: `auto` from the newest whole one in the output folder, and from the start where there is
    none; or the folder of one. Left out: a new run, in a folder of its own."""


class Recipe(Section):
    """A run: what, from what, how, and where to."""

    name: Annotated[Text | None, Field(examples=["my-run"])] = None
    """Name of the run; left out, the recipe file's name. Names a folder, so it has no slash."""

    seed: Annotated[int, Field(ge=0)] = 17
    """Seed of the data order, of dropout and of the adapter's start."""

    output: Annotated[Text | None, Field(examples=["runs/mine"])] = None
    """The run folder, relative to the recipe file; left out, `runs/NAME` in the current folder."""

    model: ModelSection
    data: DataSection
    prepare: PrepareSection = PrepareSection()
    adapter: AdapterSection = AdapterSection()
    train: TrainSection = TrainSection()
    memory: MemorySection = MemorySection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _name_is_a_folder_name(self) -> Recipe:
        if self.name is not None and ("/" in self.name or "\\" in self.name or self.name in (".", "..")):
            raise SettingError(
                ("name",),
                f'"{self.name}" cannot name a folder',
                "Write a name without slashes, for example name: my-run, and put the folder in output",
            )
        return self

    @model_validator(mode="after")
    def _adapter_fits_the_base(self) -> Recipe:
        if self.adapter.kind == "dora" and self.model.quantization == "int8":
            raise SettingError(
                ("adapter.kind", "model.quantization"),
                "dora needs the lengths of the base's weights, and peft cannot read int8 ones",
                "Write kind: rslora, or quantization: nf4",
            )
        return self

    @model_validator(mode="after")
    def _best_is_looked_for(self) -> Recipe:
        by, key = self.checkpoint.save_best, "checkpoint.save_best"
        if by is None and self.eval.patience:
            by, key = LOSS, "eval.patience"
        if by is None:
            return self
        names = [metric_name(text) for text in self.eval.metrics]
        every = "eval.every_steps" if by == LOSS else "eval.generate_every_steps"
        if by != LOSS and by not in names:
            close = nearest(by, [LOSS, *names])
            instead = f"Write save_best: {close}" if close else f"There are {', '.join([LOSS, *names])}"
            raise SettingError((key, "eval.metrics"), f'"{by}" is not measured by eval.metrics', instead)
        if not (self.eval.every_steps if by == LOSS else self.eval.generate_every_steps):
            section = "{every_steps: 100}" if by == LOSS else "{generate: 100, generate_every_steps: 100}"
            raise SettingError(
                (key, every),
                f"the best {by} is known by evaluations on the way, and {every} is not given",
                f"Write eval: {section}, or remove {key.rpartition('.')[2]}",
            )
        return self

    @model_validator(mode="after")
    def _eval_has_data(self) -> Recipe:
        key = "eval.generate" if self.eval.generate else "eval.every_steps" if self.eval.every_steps else None
        if key and self.data.eval is None:
            raise SettingError(
                (key, "data.eval"),
                "this needs held-out data, and data.eval is not given",
                "Write data: {eval: data/eval.jsonl}, or remove the eval section",
            )
        return self
