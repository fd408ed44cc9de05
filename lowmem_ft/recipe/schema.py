"""The recipe: every setting with its type, range, default and meaning.

The text under a field is its documentation: the JSON Schema and the reference page are made from it, and so are the
ranges and examples that an error shows. A field without a default value to show has an example instead.
Nothing here reads a file or imports torch. A field that exists is honoured by the run; what is not, is not a field.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]
Weight = Annotated[float, Field(ge=0)]
Format = Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text", "preference"]

TEMPLATES = ("chatml", "llama-3", "gemma", "mistral", "plain")
"""Names of the built-in chat templates; any other `data.template` is a path."""

EXCLUSIVE = (("train.epochs", "train.steps"),)
"""Settings of which one at most may be given. On the command line one replaces the other."""


class SettingError(ValueError):
    """Settings that are valid one by one, but not together or not for this run.

    Attributes:
        keys: the dotted settings involved; the one to mend comes first.
        what: what is wrong.
        instead: what to write or do.
    """

    def __init__(self, keys: tuple[str, ...], what: str, instead: str) -> None:
        super().__init__(f"{what}. {instead}")
        self.keys, self.what, self.instead = keys, what, instead


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not converted silently, nothing changes later."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


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


class AdapterSection(Section):
    """What is trained."""

    kind: Literal["lora", "dora", "rslora", "vera", "ia3"] = "lora"
    """`lora`: two factors a layer. `rslora`: scaled by alpha / sqrt(rank). `dora`: with a trained length an output.

    `vera`: factors that all layers share, and trained scales. `ia3`: a trained scale an output, nothing else."""

    rank: Positive = 16
    """Rank of the two factors, R. Not for `ia3`."""

    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale: the adapter's output is multiplied by alpha / rank. Not for `vera` and `ia3`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input while training. Not for `ia3`."""

    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """Which linear layers get an adapter: `all-linear` (all but the head), or a list.

    `q_proj` is the last part of module names, or the last parts: `mlp.up_proj`. `"/q_proj|v_proj/"`, between slashes,
    is a regular expression that is searched in full names like `model.layers.0.self_attn.q_proj`."""

    layers: Annotated[Annotated[list[int], Field(min_length=1)] | None, Field(examples=[[0, 1, -1]])] = None
    """Only these blocks get adapters, by index from 0; -1 is the last. Left out: all."""

    rank_pattern: Annotated[
        Annotated[dict[str, Positive], Field(min_length=1)] | None, Field(examples=[{"down_proj": 32}])
    ] = None
    """Other ranks by name or /regular expression/, as in `targets`. For `lora`, `dora`, `rslora`."""

    alpha_pattern: Annotated[
        Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)] | None,
        Field(examples=[{"down_proj": 64.0}]),
    ] = None
    """Other alphas by name or /regular expression/, as in `targets`. For `lora`, `dora`, `rslora`."""

    modules_to_save: Annotated[Annotated[list[Text], Field(min_length=1)] | None, Field(examples=[["lm_head"]])] = None
    """Modules that train whole, by name, as fp32 copies that are saved with the adapter. No quantized or tied one."""

    trainable_tokens: Annotated[
        Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None, Field(examples=[[128256]])
    ] = None
    """Ids of tokens whose rows of the embedding train. For `lora`, `dora`, `rslora`."""

    @model_validator(mode="after")
    def _kind_has_the_settings(self) -> AdapterSection:
        lora_only = ("alpha", "rank_pattern", "alpha_pattern", "trainable_tokens")
        missing = {"vera": lora_only, "ia3": ("rank", "dropout", *lora_only)}.get(self.kind, ())
        defaults = type(self).model_fields
        given = [name for name in missing if getattr(self, name) != defaults[name].default]
        if given:
            keys = tuple(f"adapter.{name}" for name in given)
            raise SettingError(keys, f"{self.kind} has no {given[0]}", f"Remove {given[0]}, or write kind: lora")
        return self

    @model_validator(mode="after")
    def _expressions_are_some(self) -> AdapterSection:
        for name in ("targets", "rank_pattern", "alpha_pattern"):
            value = getattr(self, name)
            for text in () if value is None or value == "all-linear" else value:
                if len(text) > 2 and text.startswith("/") and text.endswith("/"):
                    try:
                        re.compile(text[1:-1])
                    except re.error as error:
                        what = f"{text} is no regular expression: {error}"
                        raise SettingError((f"adapter.{name}",), what, "Mend it, or write a name") from error
        return self


class Source(Section):
    """One source of examples."""

    path: Annotated[Text, Field(examples=["data/train.jsonl"])]
    """A file, a folder or glob of shards, or a hub data set id (`owner/name`, or a bare name with `split`).

    Relative to the recipe file."""

    format: Annotated[Format | None, Field(examples=["messages"])] = None
    """Overrides `data.format` for this source."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often examples of this source are drawn, relative to its size: 2 is every example twice an epoch."""

    config: Annotated[Text | None, Field(examples=["main"])] = None
    """Configuration of a hub data set that has several."""

    split: Annotated[Text | None, Field(examples=["train"])] = None
    """Split of a hub data set. Only for a hub id."""

    map: Annotated[dict[str, Text] | None, Field(examples=[{"prompt": "question"}])] = None
    """Renames columns of this source: {name the format wants: column in the file}. A dot goes into nested values."""


Sources = Text | Source | Annotated[list[Text | Source], Field(min_length=1)]


class DataSection(Section):
    """What is trained on, and how a record becomes tokens."""

    train: Annotated[Sources, Field(examples=["data/train.jsonl"])]
    """A path, a list of paths, or {path, format, weight, config, split, map}."""

    eval: Annotated[Sources | None, Field(examples=["data/eval.jsonl"])] = None
    """Held-out examples, never trained on. Written as `train` is."""

    format: Format = "auto"
    """The form of a record. `auto` decides from the first records and holds every record to it."""

    map: Annotated[dict[str, Text] | None, Field(examples=[{"prompt": "question"}])] = None
    """Renames columns: {name the format wants: column in the file}. A dot goes into nested values."""

    max_tokens: Annotated[int, Field(ge=2)] = 1024
    """Longest example in tokens."""

    too_long: Literal["error", "drop", "cut_prompt", "cut_answer"] = "drop"
    """What happens to an example over `max_tokens`. Dropped ones are counted and shown."""

    on_bad_record: Literal["error", "skip"] = "error"
    """`skip` leaves unreadable records out, counts and lists them."""

    train_on: Literal["last", "all"] | Annotated[dict[str, Weight], Field(min_length=1)] = "all"
    """Which assistant turns are trained: all, the last, or weights by turn number from 1, as {"1": 0.5, last: 1}."""

    template: Annotated[Text | None, Field(examples=["chatml"])] = None
    """Chat template: a built-in one (chatml, llama-3, gemma, mistral, plain) or a file, relative to the recipe file.

    Left out: the tokenizer's own."""

    packing: bool = True
    """Put the examples of a micro-batch end to end in one row, each attending only to itself: no padding is computed.

    `false` gives each example a forward pass of its own. Changes memory and speed only."""

    length_grouping: bool = False
    """Draw examples of like length into one step. Deterministic from the seed; lowers uneven work between steps."""

    @model_validator(mode="after")
    def _turns_have_numbers(self) -> DataSection:
        if isinstance(self.train_on, dict):
            wrong = [turn for turn in self.train_on if not re.fullmatch("[1-9][0-9]*|last", turn)]
            if wrong:
                raise SettingError(
                    ("data.train_on",),
                    f'"{wrong[0]}" names no turn: turns are numbered from 1, or "last"',
                    'Write for example train_on: {"1": 0.5, last: 1}',
                )
        return self


class TrainSection(Section):
    """The update."""

    epochs: Annotated[Annotated[float, Field(gt=0)] | None, Field(examples=[1])] = None
    """Passes over the training data; 1 if neither this nor `steps` is given."""

    steps: Annotated[Positive | None, Field(examples=[100])] = None
    """Number of optimizer steps, instead of `epochs`. Of the two only one may be given."""

    batch_size: Positive = 16
    """Examples in one optimizer step, over all processes. The loss is divided by their trained tokens, once."""

    micro_batch_tokens: Positive | Auto = "auto"
    """Most tokens of one forward pass; gradient accumulation follows from it. `auto`: `data.max_tokens`.

    One example longer than this is a micro-batch by itself. Changes memory and speed only."""

    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up: to zero along a cosine or a line, or constant."""

    warmup_ratio: Fraction = 0.03
    """Share of the steps over which the learning rate rises from zero."""

    shuffle: bool = True
    """Draw the examples in a new order each epoch, a function of seed and epoch."""

    optimizer: Literal["adamw"] = "adamw"
    """The optimizer."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay on the trained matrices."""

    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Automatic mixed precision: `bf16`, `fp16` with loss scaling (GPU only), or `fp32` (none)."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm, once a step; null turns it off."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if self.epochs is not None and self.steps is not None:
            raise SettingError(
                ("train.steps", "train.epochs"),
                "epochs and steps are both given, and only one can end the run",
                "Remove one of them",
            )
        return self


class MemorySection(Section):
    """Memory knobs. None of them changes what is learned."""

    recompute: Literal["auto", "none", "block"] = "auto"
    """Activations computed twice (gradient checkpointing): per transformer `block`, or `none`. `auto`: block."""

    loss_chunk_tokens: Positive | Auto = "auto"
    """Trained tokens whose logits are held at once. `auto`: as many as keep the logits under 32 MiB."""


class CheckpointSection(Section):
    """Saved state of the run."""

    folder: Annotated[Text | None, Field(examples=["runs/mine/checkpoints"])] = None
    """Where checkpoints are kept; left out, `checkpoints` in the output folder. Relative to the recipe file."""

    every_steps: Annotated[Positive | None, Field(examples=[100])] = None
    """A checkpoint each so many steps; left out, only the end result is saved."""

    keep: Positive = 2
    """How many of the newest checkpoints stay."""


class EvalSection(Section):
    """Looking at held-out examples. Needs `data.eval`."""

    every_steps: Annotated[Positive | None, Field(examples=[100])] = None
    """Evaluation loss each so many steps; left out, before and after the run."""

    generate: Annotated[int, Field(ge=0)] = 0
    """So many held-out prompts are answered by greedy generation before and after, and compared with the reference."""

    max_new_tokens: Positive = 256
    """Longest generated answer."""


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
    def _eval_has_data(self) -> Recipe:
        key = "eval.generate" if self.eval.generate else "eval.every_steps" if self.eval.every_steps else None
        if key and self.data.eval is None:
            raise SettingError(
                (key, "data.eval"),
                "this needs held-out data, and data.eval is not given",
                "Write data: {eval: data/eval.jsonl}, or remove the eval section",
            )
        return self
