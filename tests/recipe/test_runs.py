"""A run's own recipe, wherever its folder lies now."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_ft.errors import RecipeError
from lowmem_ft.recipe.load import dump_recipe, load_recipe
from lowmem_ft.recipe.runs import load_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "t.jsonl").write_text("{}\n")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "output: runs/a\nmodel: {path: owner/m}\ndata: {train: t.jsonl}\ncheckpoint: {folder: runs/a/kept}\n"
    )
    folder = tmp_path / "runs" / "a"
    (folder / "kept").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe(file).recipe))
    return folder


def test_it_goes_on_where_it_is(run: Path) -> None:
    recipe = load_run(run, ["train.lr=1e-3"]).recipe
    assert (recipe.output, recipe.checkpoint.resume, recipe.train.lr) == (str(run), "auto", 1e-3)
    assert recipe.checkpoint.folder == str(run / "kept")


def test_a_moved_folder_is_the_output_and_holds_the_checkpoints(run: Path) -> None:
    moved = run.rename(run.parent.parent / "the moved one")
    recipe = load_run(moved).recipe
    assert recipe.output == str(moved)
    assert recipe.checkpoint.folder is None


def test_what_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds no recipe.yaml"):
        load_run(tmp_path)
    with pytest.raises(RecipeError, match="there is no such folder"):
        load_run(tmp_path / "none")
