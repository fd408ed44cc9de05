"""A recipe file to a checked, resolved `Recipe`, or one error that names everything wrong, each with its line.

The passes, each in a module of its own: text to a tree with lines (`yaml12`), overrides into the tree (`overrides`),
tree to typed values (`convert`), paths (`paths`), and the checks between settings (`schema`). Their docstrings hold the
rules: numbers, truth values and `${NAME}` in `convert`, paths in `paths`, the command line in `overrides`.

Filled in here: `name` is the file's name without ending; `output` is `runs/NAME` in the current folder;
`train.epochs` is 1 where `train.steps` is not given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lowmem_ft.errors import Problem, RecipeError, nearest
from lowmem_ft.recipe.allowed import settings_of
from lowmem_ft.recipe.convert import INVALID, Converter
from lowmem_ft.recipe.emit import yaml_block
from lowmem_ft.recipe.overrides import apply_overrides, read_overrides
from lowmem_ft.recipe.paths import Paths
from lowmem_ft.recipe.places import Place, Problems
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.recipe.section import Section, SettingError
from lowmem_ft.recipe.yaml12 import Scalar, Table, read_tree
from lowmem_ft.units import format_bytes

LARGEST_FILE_BYTES = 256 * 1024


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that can be honoured as far as its text and the file system say.

    Attributes:
        recipe: all settings; paths absolute, variables replaced, defaults filled in.
        file: the recipe file as it was named.
        lines: the line of each setting that the file gives, by dotted key (`train.lr`, `data.train[0].path`).
        overrides: the settings given on the command line, by dotted key, as they were typed.
    """

    recipe: Recipe
    file: Path
    lines: Mapping[str, int]
    overrides: Mapping[str, str]

    def where(self, key: str) -> str:
        """Where a setting comes from, for errors found later.

        Args:
            key: dotted, for example `train.lr`.

        Returns:
            `recipes/mine.yaml line 14: train.lr`, or `command line: train.lr=1`. For a setting that was not written the
            place of what encloses it, else the file.
        """
        enclosing = key
        while enclosing:
            if enclosing in self.overrides:
                return Place(str(self.file), 0, self.overrides[enclosing], 1).of(key)
            if enclosing in self.lines:
                return Place(str(self.file), self.lines[enclosing]).of(key)
            enclosing = re.sub(r"(^|\.)[^.\[]*$|\[[^\[]*$", "", enclosing)
        return Place(str(self.file)).of(key)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Reads, checks and resolves a recipe. No model, data set or network is touched.

    Args:
        path: the YAML file.
        overrides: `section.key=value` texts from the command line.

    Raises:
        RecipeError: with every problem found, in the order of the file.
    """
    file = str(path)
    problems = Problems()
    tree = read_tree(_read_text(Path(path)), lambda line: Place(file, line), problems)
    changes = read_overrides(overrides, file, problems)
    if isinstance(tree, Scalar) and tree.is_null:
        problems.add(Place(file), "", "the recipe is empty", "It needs a model and data, see recipes/")
    elif tree is not None and not isinstance(tree, Table):
        what = "a recipe is a mapping of sections, and this is " + ("text" if isinstance(tree, Scalar) else "a list")
        problems.add(tree.place, "", what, "Write sections: model: {path: ...} and data: {train: ...}")
    if not isinstance(tree, Table):
        raise RecipeError(problems.in_order())
    converter = Converter(os.environ, problems)
    values = converter.recipe(apply_overrides(tree, changes, problems))
    current = Path.cwd()
    Paths(Path(os.path.abspath(path)).parent, current, converter.places, problems).resolve(values)
    recipe = _checked(values, converter.places, Place(file), problems)
    if recipe is None or len(problems):
        raise RecipeError(problems.in_order())
    return LoadedRecipe(
        _filled(recipe, Path(path), current),
        Path(path),
        {key: place.line for key, place in converter.places.items() if not place.override},
        {key: place.override for key, place in converter.places.items() if place.override},
    )


def dump_recipe(recipe: Recipe) -> str:
    """A recipe as YAML. Loading the text gives the same recipe again."""
    return yaml_block(_escaped(recipe.model_dump()))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise RecipeError(Problem(str(path), "there is no such file", _near_file(path))) from None
    except IsADirectoryError:
        raise RecipeError(Problem(str(path), "this is a folder", "Name a YAML file in it")) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecipeError(Problem(str(path), f"cannot be read ({reason})", "Name a YAML file")) from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RecipeError(Problem(f"{path} line 1", "the file is UTF-16", "Save it as UTF-8"))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"the byte 0x{data[error.start]:02x} is not UTF-8 text"
        raise RecipeError(Problem(f"{path} line {line}", what, "Save the file as UTF-8")) from None
    if len(data) > LARGEST_FILE_BYTES:
        what = f"the file is larger than {format_bytes(LARGEST_FILE_BYTES)}, and so no recipe"
        raise RecipeError(Problem(str(path), what, "Name a YAML file of settings"))
    return text


def _near_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"There is no folder {os.path.abspath(folder)}"
    names = [name for name in os.listdir(folder) if name.endswith((".yaml", ".yml"))]
    close = nearest(path.name, names)
    return f"Did you mean {folder / close}?" if close else f"Looked in {os.path.abspath(folder)}"


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not INVALID}
    return [_pruned(item) for item in value if item is not INVALID] if isinstance(value, list) else value


def _checked(values: dict[str, Any], places: Mapping[str, Place], file: Place, problems: Problems) -> Recipe | None:
    """The recipe, after the checks between settings; refused values are left out, so that all checks run."""
    pruned = _pruned(values)
    for name, setting in settings_of(Recipe).items():
        if setting.is_section and setting.allowed.section:
            section = _made(setting.allowed.section, pruned.pop(name, {}), places, file, problems)
            if section is not None:
                pruned[name] = section
    recipe = _made(Recipe, pruned, places, file, problems)
    return recipe if isinstance(recipe, Recipe) else None


def _made(
    section: type[Section], values: Any, places: Mapping[str, Place], file: Place, problems: Problems
) -> Section | None:
    try:
        return section.model_validate(values)
    except ValidationError as error:
        for found in error.errors():
            cause = found.get("ctx", {}).get("error")
            if isinstance(cause, SettingError):
                _add_clash(cause, places, file, problems)
            elif not len(problems):
                key = ".".join(str(part) for part in found["loc"])
                problems.add(
                    places.get(key, file), key, f"{found['input']!r} is not accepted here", "See the reference"
                )
    return None


def _add_clash(clash: SettingError, places: Mapping[str, Place], file: Place, problems: Problems) -> None:
    """A problem between settings, at the one that comes last; silent if one of them is refused already."""
    if any(problems.touch(key) for key in clash.keys):
        return
    written = sorted(
        (key for key in clash.keys if key in places), key=lambda key: (places[key].number, places[key].line)
    )
    if not written:
        problems.add(file, clash.keys[0], clash.what, clash.instead)
        return
    others = [f"{key} on line {places[key].line}" for key in written[:-1] if places[key].line]
    note = f" ({', '.join(others)})" if others else ""
    problems.add(places[written[-1]], written[-1], clash.what + note, clash.instead)


def _filled(recipe: Recipe, path: Path, current: Path) -> Recipe:
    train = recipe.train
    if train.epochs is None and train.steps is None:
        train = train.model_copy(update={"epochs": 1.0})
    name = recipe.name or path.stem
    output = recipe.output or str(current / "runs" / name)
    return recipe.model_copy(update={"name": name, "output": output, "train": train})
