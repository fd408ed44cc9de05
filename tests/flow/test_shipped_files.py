"""What is shipped beside the package is what the code makes, and every shipped recipe can be honoured."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lowmem_ft.recipe.load import load_recipe
from lowmem_ft.recipe.reference import recipe_json_schema, reference_page

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_recipes_are_seen() -> None:
    assert [path.name for path in RECIPES] == ["llama-lora.yaml"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_shipped_recipe_loads_and_says_how_to_run_it(path: Path) -> None:
    assert load_recipe(path).recipe.name == path.stem
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    header = text[: text.index("\nname:")]
    assert f"python -m lowmem_ft.train recipes/{path.name}" in header
    assert all(word in header for word in ("peak", "tokens/s", "exact"))


def test_schema_and_reference_are_those_of_the_code() -> None:
    """Mend with: lowmem-ft schema > recipes/schema.json; lowmem-ft reference > recipes/REFERENCE.md"""
    assert json.loads((ROOT / "recipes" / "schema.json").read_text()) == recipe_json_schema()
    assert (ROOT / "recipes" / "REFERENCE.md").read_text() == reference_page() + "\n"


def test_the_demo_data_is_what_its_script_makes(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_demo_data.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    shipped = ROOT / "recipes" / "data"
    names = sorted(path.name for path in shipped.iterdir())
    assert names == ["support-eval.jsonl", "support-train.jsonl"]
    assert all((tmp_path / name).read_bytes() == (shipped / name).read_bytes() for name in names)
    assert sum((shipped / name).stat().st_size for name in names) < 500_000


def test_no_held_out_message_is_trained_on_and_no_form_can_be_guessed() -> None:
    make = runpy.run_path(str(ROOT / "scripts" / "make_demo_data.py"))["make_records"]
    train, held_out = make(2026)
    messages = [{record["messages"][1]["content"] for record in split} for split in (train, held_out)]
    assert not messages[0] & messages[1]
    assert (len(train), len(held_out)) == (900, 100)
    assert len({record["messages"][2]["content"] for record in held_out}) == 100
