"""A folder with a model, data and a recipe in it, and a loader for recipe texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lowmem_ft.errors import RecipeError
from lowmem_ft.recipe.load import LoadedRecipe, load_recipe

Load = Callable[..., LoadedRecipe]
Refuse = Callable[..., list[str]]

SMALLEST = "model:\n  path: ./model\ndata:\n  train: train.jsonl\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the test: has `model/`, `train.jsonl`, `eval.jsonl` and `shards/*.jsonl`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "shards").mkdir()
    for name in ("train.jsonl", "eval.jsonl", "shards/a.jsonl", "shards/b.jsonl", "chat.jinja"):
        (tmp_path / name).write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Load:
    """Loads a text as `mine.yaml` of the folder."""

    def load_text(text: str | bytes, *overrides: str) -> LoadedRecipe:
        Path("mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_recipe(Path("mine.yaml"), overrides)

    return load_text


@pytest.fixture
def refuse(load: Load) -> Refuse:
    """Loads a text that must be refused; the problems as printed, one a line."""

    def refuse_text(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(RecipeError) as caught:
            load(text, *overrides)
        assert caught.value.exit_code == 2
        return [str(problem) for problem in caught.value.problems]

    return refuse_text
