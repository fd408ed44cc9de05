"""`lowmem-ft schema` and `lowmem-ft reference`: every setting of a recipe, for editors and for people."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    """Add them to the parser's commands."""
    commands.add_parser("schema", help="JSON Schema of a recipe").set_defaults(run=_schema)
    commands.add_parser("reference", help="every setting of a recipe").set_defaults(run=_reference)


def _schema(options: argparse.Namespace) -> int:
    from lowmem_ft.recipe.reference import recipe_json_schema

    print(json.dumps(recipe_json_schema(), indent=2))
    return 0


def _reference(options: argparse.Namespace) -> int:
    from lowmem_ft.recipe.reference import reference_page

    print(reference_page())
    return 0
