"""The recipe of a run that is to go on, wherever its folder lies now."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lowmem_ft.errors import Problem, RecipeError
from lowmem_ft.recipe.emit import text_as_yaml
from lowmem_ft.recipe.load import LoadedRecipe, load_recipe


def load_run(run: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe that a run folder holds, set to go on in that folder.

    Args:
        run: a run folder; it may have been moved.
        overrides: `section.key=value` texts.

    Raises:
        RecipeError: the folder holds no run, or its recipe cannot be honoured here.
    """
    file = run / "recipe.yaml"
    if not file.is_file():
        what = "holds no recipe.yaml, so it is no run folder" if run.is_dir() else "there is no such folder"
        raise RecipeError(Problem(str(run), what, "Name the folder that the run printed, for example runs/llama-lora"))
    here = [f"output={text_as_yaml(os.path.abspath(run))}", "checkpoint.resume=auto"]
    loaded = load_recipe(file, [*here, *overrides])
    kept = loaded.recipe.checkpoint.folder
    if kept is not None and not Path(kept).is_dir() and "checkpoint.folder" not in loaded.overrides:
        return load_recipe(
            file, [*here, "checkpoint.folder=null", *overrides]
        )  # it lay in the folder, and moved with it
    return loaded
