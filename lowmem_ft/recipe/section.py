"""What every section of a recipe is made of: its base, its error, and types that several sections use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]


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
