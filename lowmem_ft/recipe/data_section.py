"""The `data` section of a recipe: what is trained on."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lowmem_ft.recipe.section import Section, SettingError, Text

Format = Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text", "preference"]
Weight = Annotated[float, Field(ge=0)]

TEMPLATES = ("chatml", "llama-3", "gemma", "mistral", "plain")
"""Names of the built-in chat templates; any other `data.template` is a path."""


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
