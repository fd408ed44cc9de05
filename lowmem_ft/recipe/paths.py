"""Which settings are paths, and what they mean on this machine. The rule, once, for all of them:

A path in a recipe is relative to the recipe file's folder (as the file was named; a link to the file is not followed),
a path in an override is relative to the current folder. `~` and `~user` are home folders. Everything becomes absolute.

`output` and `checkpoint.folder` need not exist; `checkpoint.resume` is `auto` or a folder. `data.template` is a
built-in name or a file. What stands before the colon in `eval.metrics` is a path where it ends in `.py`. `model.path`
and the data paths are local where something of that name exists; what is clearly meant as a path and is not there is an
error, so it is never looked up on a hub; the rest is left alone as an id.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.errors import nearest
from lowmem_ft.recipe.data_section import TEMPLATES
from lowmem_ft.recipe.emit import text_as_yaml
from lowmem_ft.recipe.eval_section import function_of
from lowmem_ft.recipe.places import Place, Problems

DATA_ENDINGS = (
    *(".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".yaml", ".yml"),
    *(".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"),
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_HUB_ID = re.compile(f"{_HUB_NAME.pattern}/{_HUB_NAME.pattern}")


@dataclass(frozen=True)
class Paths:
    """Resolves the paths of one recipe.

    Attributes:
        recipe_folder: what paths of the file are relative to; absolute.
        current_folder: what paths of the command line are relative to; absolute.
        places: where each setting was written.
        problems: receives all that is wrong.
    """

    recipe_folder: Path
    current_folder: Path
    places: Mapping[str, Place]
    problems: Problems

    def resolve(self, values: dict[str, Any]) -> None:
        """Makes the paths absolute, in place. `values` is what `Converter.recipe` gives."""
        for section, name in ((values, "output"), (values.get("checkpoint"), "folder")):
            if isinstance(section, dict) and isinstance(section.get(name), str):
                section[name] = self._folder(section[name], "output" if name == "output" else "checkpoint.folder")
        checkpoint = values.get("checkpoint")
        if (
            isinstance(checkpoint, dict)
            and isinstance(checkpoint.get("resume"), str)
            and checkpoint["resume"] != "auto"
        ):
            checkpoint["resume"] = self._checkpoint(checkpoint["resume"])
        looking = values.get("eval")
        if isinstance(looking, dict) and isinstance(looking.get("metrics"), list):
            looking["metrics"] = [self._metric(text, index) for index, text in enumerate(looking["metrics"])]
        model, data = values.get("model"), values.get("data")
        if isinstance(model, dict) and isinstance(model.get("path"), str):
            self._model(model)
        if isinstance(data, dict):
            if isinstance(data.get("template"), str):
                data["template"] = self._template(data["template"])
            for name in ("train", "eval"):
                if name in data:
                    data[name] = self._sources(data[name], f"data.{name}")

    def _folder(self, text: str, key: str) -> str:
        path = self._absolute(text, key)
        if os.path.isfile(path):
            self._add(key, f"{text} is a file ({path}), and a folder is needed", "Write the name of a folder")
        return path

    def _checkpoint(self, text: str) -> str:
        path = self._absolute(text, "checkpoint.resume")
        if not os.path.isdir(path):
            self._not_there(text, path, "checkpoint.resume", "", "Name the folder of a checkpoint, or write auto")
        return path

    def _metric(self, text: Any, index: int) -> Any:
        function = function_of(text) if isinstance(text, str) else None
        if function is None or not function[0].endswith(".py"):
            return text
        key = f"eval.metrics[{index}]"
        path = self._absolute(function[0], key)
        if not os.path.isfile(path):
            self._not_there(function[0], path, key)
        return f"{path}:{function[1]}"

    def _model(self, model: dict[str, Any]) -> None:
        text: str = model["path"]
        path = self._absolute(text, "model.path")
        if os.path.exists(path):
            model["path"] = path
            if isinstance(model.get("revision"), str):
                what = f"revision is for a model on the hub, and model.path is here ({path})"
                self._add("model.revision", what, "Remove revision")
        elif is_path(text) or text.lower().endswith(".gguf"):
            self._not_there(text, path, "model.path")
        elif not _HUB_NAME.fullmatch(text) and not _HUB_ID.fullmatch(text):
            self._not_there(text, path, "model.path", ", and it is no hub id (owner/name)")

    def _template(self, text: str) -> str:
        if text in TEMPLATES:
            return text
        path = self._absolute(text, "data.template")
        if not os.path.isfile(path):
            close = nearest(text.lower(), TEMPLATES)
            names = f"the built-in templates are {', '.join(TEMPLATES)}"
            self._not_there(text, path, "data.template", f"; {names}", f"Did you mean {close}?" if close else "")
        return path

    def _sources(self, value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [self._sources(item, f"{key}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, str):
            return self._data(value, key, {})
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            hub = {name: f"{key}.{name}" for name in ("config", "split") if value.get(name) is not None}
            return value | {"path": self._data(value["path"], f"{key}.path", hub)}
        return value

    def _data(self, text: str, key: str, hub: Mapping[str, str]) -> str:
        """The path of a source. `hub`: the settings of a hub data set that are given, and their keys."""
        path = self._absolute(text, key)
        pattern = path if os.path.isabs(os.path.expanduser(text)) else os.path.join(glob.escape(self._base(key)), text)
        here = path if os.path.exists(path) else os.path.normpath(pattern) if _matches(pattern) else None
        if here:
            for name, setting in hub.items():
                what = f"{name} is for a data set on the hub, and {text} is here ({here})"
                self._add(setting, what, f"Remove {name}")
            return here
        local = is_path(text) or text.lower().endswith(DATA_ENDINGS) or glob.has_magic(text)
        if not local and (_HUB_ID.fullmatch(text) or ("split" in hub and _HUB_NAME.fullmatch(text))):
            return text
        bare = not local and _HUB_NAME.fullmatch(text)
        note = f". A hub data set without owner needs its split: {{path: {text}, split: train}}" if bare else ""
        self._not_there(text, path, key, note)
        return text

    def _from_command_line(self, key: str) -> bool:
        return bool(self.places[key].override)

    def _base(self, key: str) -> str:
        return str(self.current_folder if self._from_command_line(key) else self.recipe_folder)

    def _absolute(self, text: str, key: str) -> str:
        path = os.path.expanduser(text)
        if text.startswith("~") and path.startswith("~"):
            self._add(key, f"{text} names no home folder on this machine", "Write the whole path, or ./ before the ~")
        return os.path.abspath(os.path.join(self._base(key), path))

    def _not_there(self, text: str, path: str, key: str, note: str = "", instead: str = "") -> None:
        if self.problems.touch(key):
            return
        if "://" in text:
            self._add(key, f"{text} is an address, and nothing is fetched from one", "Fetch it, and write its path")
            return
        what = f'"{text}" is not there: looked for {path}{note}'
        self._add(key, what, instead or self._suggestion(text, path, key))

    def _suggestion(self, text: str, path: str, key: str) -> str:
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            return f"There is no folder {parent}"
        by_stem = {os.path.splitext(name)[0]: name for name in sorted(_names_in(parent), reverse=True)}
        close = nearest(os.path.splitext(os.path.basename(path))[0], list(by_stem))
        if close:
            return f"Did you mean {self._line(key, os.path.join(os.path.dirname(text), by_stem[close]))}"
        other = os.path.abspath(os.path.join(self.current_folder, text))
        if not self._from_command_line(key) and os.path.exists(other):
            better = self._line(key, os.path.relpath(other, self.recipe_folder))
            return f"The current folder has it, but paths are relative to the recipe's folder. Write {better}"
        alike = [file for file in sorted(_names_in(parent)) if file.endswith(os.path.splitext(path)[1] or " ")]
        if alike:
            return f"That folder has {', '.join(alike[:6])}" + (" and more" if len(alike) > 6 else "")
        base = "current" if self._from_command_line(key) else "recipe's"
        return f"Put it there, or write its path relative to the {base} folder"

    def _line(self, key: str, path: str) -> str:
        if self._from_command_line(key):
            return f"{key}={text_as_yaml(path)}"
        name = key.rsplit(".", 1)[-1]
        return text_as_yaml(path) if name.endswith("]") else f"{name}: {text_as_yaml(path)}"

    def _add(self, key: str, what: str, instead: str) -> None:
        self.problems.add(self.places[key], key, what, instead)


def is_path(text: str) -> bool:
    """Whether a text is meant as a path whether or not anything is there."""
    return text.startswith(("./", "../", "/", "~", ".\\", "..\\", "\\")) or text in (".", "..")


def _matches(pattern: str) -> bool:
    if not glob.has_magic(pattern):
        return False
    try:
        return next(glob.iglob(pattern, recursive=True), None) is not None
    except (OSError, ValueError, re.error):
        return False


def _names_in(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
