from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from lowmem_ft.recipe.allowed import sections, settings_of
from lowmem_ft.recipe.load import dump_recipe
from lowmem_ft.recipe.reference import recipe_json_schema, reference_page

from .conftest import Load
from .test_load import ACCEPTED, REFUSED

SCHEMA = recipe_json_schema()
NOTES = {"title", "description", "default", "examples", "$schema", "$defs"}
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """A JSON Schema check of the keywords that the recipe's schema uses; any other keyword fails the test."""
    tests: dict[str, Any] = {
        "$ref": lambda to: fits(value, SCHEMA["$defs"][to.removeprefix("#/$defs/")]),
        "anyOf": lambda options: any(fits(value, option) for option in options),
        "type": lambda name: is_a(value, name),
        "enum": lambda words: value in words,
        "const": lambda word: value == word,
        "minimum": lambda limit: not isinstance(value, int | float) or value >= limit,
        "maximum": lambda limit: not isinstance(value, int | float) or value <= limit,
        "exclusiveMinimum": lambda limit: not isinstance(value, int | float) or value > limit,
        "exclusiveMaximum": lambda limit: not isinstance(value, int | float) or value < limit,
        "minLength": lambda limit: not isinstance(value, str) or len(value) >= limit,
        "minItems": lambda limit: not isinstance(value, list) or len(value) >= limit,
        "minProperties": lambda limit: not isinstance(value, dict) or len(value) >= limit,
        "items": lambda item: not isinstance(value, list) or all(fits(part, item) for part in value),
        "required": lambda names: not isinstance(value, dict) or set(names) <= set(value),
        "properties": lambda known: (
            not isinstance(value, dict) or all(fits(part, known[name]) for name, part in value.items() if name in known)
        ),
        "additionalProperties": lambda other: (
            not isinstance(value, dict)
            or all(
                other is not False and fits(part, other)
                for name, part in value.items()
                if name not in schema.get("properties", {})
            )
        ),
    }
    return all(tests[keyword](wanted) for keyword, wanted in schema.items() if keyword not in NOTES)


@pytest.mark.parametrize("case", ACCEPTED)
def test_schema_accepts_every_resolved_recipe(case: str, load: Load) -> None:
    assert fits(yaml.safe_load(dump_recipe(load(ACCEPTED[case][0]).recipe)), SCHEMA)


def test_schema_accepts_a_null_section() -> None:
    assert fits({"model": {"path": "a/b"}, "data": {"train": ["a/b"]}, "train": None}, SCHEMA)


@pytest.mark.parametrize(
    "case", ["misspelt key", "out of range, all at once", "keep none", "missing key", "text for a list"]
)
def test_schema_refuses_what_an_editor_can_see(case: str) -> None:
    text = REFUSED[case][0]
    assert not fits(yaml.safe_load(text), SCHEMA)


def test_schema_is_json_of_draft_2020_12_with_every_meaning() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    seen = 0
    for section in sections().values():
        properties = (
            SCHEMA["properties"] if section.__name__ == "Recipe" else SCHEMA["$defs"][section.__name__]["properties"]
        )
        for name, setting in settings_of(section).items():
            if not setting.is_section:
                seen += 1
                assert properties[name]["description"] == setting.meaning
    assert seen >= 45


def test_page_has_a_row_for_every_setting() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.+) \| (.+) \| (.+) \|$", reference_page(), re.MULTILINE)
    expected = [
        f"{path}.{name}" if path else name
        for path, section in sections().items()
        for name, setting in settings_of(section).items()
        if not setting.is_section
    ]
    assert [row[0] for row in rows] == expected
    assert ("train.lr", "a number above 0", "`0.0002`", "Peak learning rate.") in rows
