"""The `adapter` section of a recipe: what is trained."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lowmem_ft.recipe.section import Positive, Section, SettingError, Text


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
