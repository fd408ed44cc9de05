"""The recipe's documentation, made from its schema: a JSON Schema for editors and a page for people."""

from __future__ import annotations

from typing import Any

from lowmem_ft.recipe.allowed import Setting, section_meaning, sections, settings_of
from lowmem_ft.recipe.emit import yaml_of
from lowmem_ft.recipe.schema import Recipe

_HEADER = """# The recipe, setting by setting

A recipe is a YAML file. `model.path` and `data.train` are needed, all else has a default. A key that is not listed here
is an error, and so is a value that cannot be honoured.

- Paths are relative to the recipe file; in an override on the command line, to the current folder. `~` is home.
- `${NAME}` and `${NAME:-default}` are replaced by environment variables; `$${` is a literal `${`.
- Numbers are read as in YAML 1.2 (`2e-4` is a number); `yes`, `no`, `on`, `off` are true and false
  where that is wanted, without quotes.
- An override `train.lr=1e-4` replaces a setting for one run. `train.steps=10` also replaces `train.epochs`, and
  the reverse.
"""


def recipe_json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe, with the meaning of every setting, for editors."""
    schema = Recipe.model_json_schema()
    for setting in settings_of(Recipe).values():
        if setting.is_section and not setting.required:
            inner = schema["properties"][setting.name]
            reference = inner.pop("$ref", None)
            if reference:
                inner["anyOf"] = [{"$ref": reference}, {"type": "null"}]
            inner.setdefault("description", setting.meaning)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "lowmem_ft recipe"}


def reference_page() -> str:
    """Markdown page of every setting: key, what is allowed, default, meaning."""
    parts = [_HEADER]
    for path, section in sections().items():
        rows = [_row(path, setting) for setting in settings_of(section).values() if not setting.is_section]
        title = f"`{path}`" if path else "Top level"
        if path.count("."):
            title += " as a mapping"
        head = f"## {title}\n\n{section_meaning(section)}\n\n| Key | Allowed | Default | Meaning |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(path: str, setting: Setting) -> str:
    key = f"{path}.{setting.name}" if path else setting.name
    default = (
        "needed" if setting.required else "left out" if setting.default is None else f"`{yaml_of(setting.default)}`"
    )
    meaning = " ".join(setting.meaning.split())
    return f"| `{key}` | {_cell(str(setting.allowed))} | {default} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
