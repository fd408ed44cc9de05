"""The `eval` section of a recipe: how held-out examples are looked at."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from lowmem_ft.errors import nearest
from lowmem_ft.recipe.section import Auto, Positive, Section, SettingError, Text

METRICS = ("exact_match", "contains", "json_valid", "rouge_l")
"""Names of the built-in metrics; any other one is a function of the user's."""

LOSS = "loss"

_FUNCTION = re.compile(r"(?P<place>[^:]*[^:\s]):(?P<name>[A-Za-z_]\w*)")
_TAKEN = ("step", "prompts", LOSS)  # keys of the same line of metrics.jsonl


class EvalSection(Section):
    """Looking at held-out examples. Needs `data.eval`."""

    every_steps: Annotated[Positive | None, Field(examples=[100])] = None
    """Evaluation loss each so many steps; left out, before and after the run."""

    patience: Annotated[Positive | None, Field(examples=[3])] = None
    """Stop early: after so many evaluations in a row that were not better than the best one before them.

    Better by what `checkpoint.save_best` names, by `loss` where it is left out. The run ends as at its last step."""

    generate: Annotated[int, Field(ge=0)] = 0
    """So many held-out prompts are answered by greedy generation before and after, and compared with the reference."""

    generate_every_steps: Annotated[Positive | None, Field(examples=[100])] = None
    """They are also answered each so many steps."""

    max_new_tokens: Positive = 256
    """Longest generated answer."""

    generate_tokens: Positive | Auto = "auto"
    """Most tokens, of prompts and answers, of one batch of generation. Changes memory and speed only.

    `auto`: as many as 256 MiB of keys and values hold."""

    metrics: Annotated[list[Text], Field(min_length=1)] = ["exact_match"]  # noqa: RUF012 - pydantic copies it
    """What generated answers are measured by, as a mean over the prompts; higher is better.

    `exact_match`, `contains` (the reference is in the answer), `json_valid`, `rouge_l` (needs the package rouge-score),
    or a function of yours, `module:function` or `file.py:function`: called with answer and reference, it returns a
    number."""

    samples: Annotated[int, Field(ge=0)] = 1
    """So many of the generated answers are shown beside their reference; all are in answers-STEP.jsonl."""

    @model_validator(mode="after")
    def _something_is_generated(self) -> EvalSection:
        if self.generate_every_steps and not self.generate:
            raise SettingError(
                ("eval.generate_every_steps", "eval.generate"),
                "nothing is generated: eval.generate is 0",
                "Write generate: 100, or remove generate_every_steps",
            )
        return self

    @model_validator(mode="after")
    def _metrics_have_names(self) -> EvalSection:
        names = [metric_name(text) for text in self.metrics]
        for index, (text, name) in enumerate(zip(self.metrics, names, strict=True)):
            key = f"eval.metrics[{index}]"
            if text not in METRICS and function_of(text) is None:
                close = nearest(text, METRICS)
                instead = f"Did you mean {close}?" if close else "A function of yours is written module:function"
                raise SettingError((key,), f'"{text}" is no metric; there are {", ".join(METRICS)}', instead)
            if name in _TAKEN or name in names[:index]:
                what = f'the name "{name}" is taken' if name in _TAKEN else f'two metrics are called "{name}"'
                raise SettingError((key,), what, "Give the function another name")
        return self


def function_of(text: str) -> tuple[str, str] | None:
    """Module or file, and name, of a metric that is a function; None for any other text."""
    match = _FUNCTION.fullmatch(text)
    return (match["place"], match["name"]) if match else None


def metric_name(text: str) -> str:
    """What a metric is called in metrics.jsonl: a function goes by its own name."""
    function = function_of(text)
    return function[1] if function else text
