"""What a setting may be, read once from its annotation: the errors, the conversion and the reference page share it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from lowmem_ft.recipe.emit import yaml_of
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.recipe.section import Section


@dataclass(frozen=True)
class Number:
    """A range of numbers; None where it is open."""

    whole: bool
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, number: float) -> bool:
        """Whether the number is in the range."""
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        name = "a whole number" if self.whole else "a number"
        if self.above is not None:
            name += f" above {self.above:g}"
        elif self.at_least is not None:
            upper = self.at_most is not None or self.below is not None
            name += f" from {self.at_least:g}" if upper else f" of at least {self.at_least:g}"
        if self.at_most is not None:
            name += f" to {self.at_most:g}"
        if self.below is not None:
            name += f" and below {self.below:g}" if self.at_least is None else f" to below {self.below:g}"
        return name


@dataclass(frozen=True)
class Allowed:
    """The forms a value may have. Several may be open at once; `str()` says them all.

    Attributes:
        null: empty or null.
        flag: true or false.
        words: fixed words.
        number: a number in a range.
        text: any text.
        section: a mapping with these settings.
        items: a list of such.
        values: a mapping from free names to such.
        shortest: fewest items of the list or mapping.
    """

    null: bool = False
    flag: bool = False
    words: tuple[str, ...] = ()
    number: Number | None = None
    text: bool = False
    section: type[Section] | None = None
    items: Allowed | None = None
    values: Allowed | None = None
    shortest: int = 0

    def __str__(self) -> str:
        forms = list(self.words)
        if self.flag:
            forms += ["true", "false"]
        if self.number:
            forms.append(str(self.number))
        if self.text:
            forms.append("a text")
        if self.section:
            forms.append("a mapping {" + ", ".join(settings_of(self.section)) + "}")
        if self.items:
            single = replace(self, items=None, values=None, null=False, shortest=0)
            forms.append("a list of those" if self.items == single else f"a list of {plural(self.items)}")
        if self.values:
            forms.append(f"a mapping {{name: {self.values}, ...}}")
        if self.null:
            forms.append("null")
        return forms[0] if len(forms) == 1 else ", ".join(forms[:-1]) + " or " + forms[-1]


@dataclass(frozen=True)
class Setting:
    """One setting of a section, as errors and the reference page need it.

    Attributes:
        name: its key.
        allowed: what it may be.
        required: whether it has no default.
        default: the default; None also where it is required.
        example: a value to paste: the default, or an example where that is None.
        meaning: its documentation.
    """

    name: str
    allowed: Allowed
    required: bool
    default: Any
    example: Any
    meaning: str

    @property
    def is_section(self) -> bool:
        """Whether it is a section and nothing else."""
        return self.allowed.section is not None and self.allowed == Allowed(section=self.allowed.section)

    @property
    def paste(self) -> str:
        """A line that is right: `rank: 16`."""
        return f"{self.name}: {yaml_of(self.example)}"


def plural(allowed: Allowed) -> str:
    """What the items of a list are."""
    return "texts" if allowed == Allowed(text=True) else str(allowed)


@cache
def settings_of(section: type[Section]) -> Mapping[str, Setting]:
    """The settings of a section by name, in the order of the schema."""
    return {name: _setting(name, field) for name, field in section.model_fields.items()}


@cache
def sections() -> Mapping[str, type[Section]]:
    """All sections by dotted name: "" is the top level, `data.train` a source of examples."""
    found: dict[str, type[Section]] = {"": Recipe}

    def walk(prefix: str, section: type[Section]) -> None:
        for setting in settings_of(section).values():
            inner = setting.allowed.section
            if inner and inner not in found.values():
                found[prefix + setting.name] = inner
                walk(f"{prefix}{setting.name}.", inner)

    walk("", Recipe)
    return found


def _setting(name: str, field: FieldInfo) -> Setting:
    allowed = _allowed(field.annotation, field.metadata)
    required = field.is_required()
    default = None if required else field.default
    example = default
    if allowed.section and not required:
        example = {inner.name: inner.default for inner in settings_of(allowed.section).values() if inner.default}
        example = dict(list(example.items())[:1])
    if field.examples and default is None:
        example = field.examples[0]
    elif required and allowed.section:
        example = {first.name: first.example for first in settings_of(allowed.section).values() if first.required}
    return Setting(name, allowed, required, default, example, field.description or section_meaning(allowed.section))


def section_meaning(section: type[Section] | None) -> str:
    """The first line of a section's documentation."""
    return (section.__doc__ or "").strip().split("\n")[0] if section else ""


def _allowed(annotation: Any, metadata: list[Any]) -> Allowed:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [item for extra in parts[1:] for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _allowed(parts[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        return _joined([_allowed(part, []) for part in parts])
    if origin is Literal:
        return Allowed(words=parts)
    shortest = next((item.min_length for item in metadata if isinstance(item, MinLen)), 0)
    if origin is list:
        return Allowed(items=_allowed(parts[0], []), shortest=shortest)
    if origin is dict:
        return Allowed(values=_allowed(parts[1], []), shortest=shortest)
    if annotation is type(None):
        return Allowed(null=True)
    if annotation is bool:
        return Allowed(flag=True)
    if annotation is str:
        return Allowed(text=True)
    if annotation in (int, float):
        return Allowed(number=_number(annotation is int, metadata))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Allowed(section=annotation)
    raise TypeError(f"the recipe cannot hold {annotation}")


def _number(whole: bool, metadata: list[Any]) -> Number:
    limits: dict[str, Any] = {}
    for item in metadata:
        match item:
            case Ge():
                limits["at_least"] = item.ge
            case Gt():
                limits["above"] = item.gt
            case Le():
                limits["at_most"] = item.le
            case Lt():
                limits["below"] = item.lt
    return Number(whole, **limits)


def _joined(members: list[Allowed]) -> Allowed:
    joined = Allowed()
    for member in members:
        forms = {name: form for name, form in vars(member).items() if form != getattr(Allowed(), name)}
        joined = replace(joined, **forms)
    return joined
