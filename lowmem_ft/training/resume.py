"""Going on: which checkpoint, and whether this recipe may go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lowmem_ft.errors import CheckpointError, Problem
from lowmem_ft.recipe.emit import yaml_of
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.checkpoint import Checkpoints, checked
from lowmem_ft.training.reporter import Reporter
from lowmem_ft.training.state import read_state

HARMLESS = (
    *("name", "output", "checkpoint", "eval", "memory"),
    *("data.eval", "data.packing", "train.micro_batch_tokens", "train.max_seconds", "model.trust_remote_code"),
)
"""Settings and sections that cannot alter what is learned: they may change between a checkpoint and its resumption."""

DECIDING = (
    *("eval.patience", "eval.every_steps", "eval.generate", "eval.generate_every_steps", "eval.max_new_tokens"),
    *("eval.metrics", "data.eval", "checkpoint.save_best"),
)
"""With `eval.patience` these decide when the run ends, and are not harmless."""

PLACES = ("model.path", "model.revision", "data.train", "data.template")
"""Settings that say where something is. What is there is compared, so it may have moved."""

LAYOUT = 1
"""The arrangement of a checkpoint's files that this program writes and reads."""

EXACT_VERSIONS = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


@dataclass(frozen=True)
class Past:
    """What a run goes on from.

    Attributes:
        checkpoint: its folder.
        state: its state.json.
    """

    checkpoint: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return int(self.state["step"])


def find_past(
    recipe: Recipe, checkpoints: Checkpoints, reporter: Reporter, accept_changes: bool = False
) -> Past | None:
    """The checkpoint that `checkpoint.resume` asks for, read and found to belong to this recipe.

    Args:
        recipe: resolved.
        checkpoints: of the run folder, which this process holds.
        reporter: gets a line for each checkpoint that is not used.
        accept_changes: go on though settings changed that alter what is learned.

    Returns:
        None where the run begins at its start: nothing is asked for, or `auto` finds no checkpoint.

    Raises:
        CheckpointError: the one that was named is broken, all that are there are, or it belongs to another recipe.
    """
    asked = recipe.checkpoint.resume
    if asked is None:
        return None
    if asked == "auto":
        checkpoints.mend()
        path, skipped = checkpoints.newest_whole()
        for line in skipped:
            reporter.line(line)
        if path is None and skipped:
            instead = "Restore one, or remove them all to begin anew"
            raise CheckpointError(Problem(str(checkpoints.folder), "none of its checkpoints is whole", instead))
        if path is None:
            return None
    else:
        path = checked(_named(Path(asked), reporter))
    past = Past(path, read_state(path))
    if past.state.get("layout") != LAYOUT:
        what = f"has layout {past.state.get('layout')}, and this version reads layout {LAYOUT}"
        raise CheckpointError(Problem(str(path), what, "Resume with the version of lowmem_ft that wrote it"))
    changes = changed_settings(past.state["recipe"], recipe.model_dump(mode="json"))
    stops_early = recipe.eval.patience or past.state["recipe"]["eval"].get("patience")
    decides = [key for key, _ in changes if stops_early and _within(key, DECIDING)]
    harmful = [line for key, line in changes if key in decides or not _within(key, (*HARMLESS, *PLACES))]
    _refuse(path, harmful, accept_changes, reporter)
    for key, line in changes:
        if key not in decides and _within(key, HARMLESS) and not _within(key, ("name", "output", "checkpoint")):
            reporter.line(f"changed since the checkpoint, without effect on what is learned: {line}")
    return past


def check_same_inputs(past: Past, digests: Mapping[str, str], accept_changes: bool, reporter: Reporter) -> None:
    """Whether model and data are those of the checkpoint, wherever they lie now.

    Args:
        past: the checkpoint.
        digests: of this run, by what they are of.
        accept_changes: go on though they differ.
        reporter: gets a line for what was accepted, and for other versions of libraries.

    Raises:
        CheckpointError: they differ.
    """
    saved = past.state["digests"]
    others = [f"the {what} is not that of the checkpoint" for what in digests if digests[what] != saved.get(what)]
    _refuse(past.checkpoint, others, accept_changes, reporter)
    now = library_versions()
    changed = [
        f"{name} {old}, now {now[name]}"
        for name, old in past.state["versions"].items()
        if now.get(name) not in (None, old)
    ]
    if changed:
        reporter.line(f"saved with {'; '.join(changed)}: steps from here may differ in their last bits")


def library_versions() -> dict[str, str]:
    """The versions on which the bits of a step depend."""
    found = {}
    for name in EXACT_VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Dotted key and a line `key: old -> new` of every setting that differs, in the order of the recipe."""
    old, new = _flat(before), _flat(after)
    keys = [*new, *(key for key in old if key not in new)]
    return [
        (key, f"{key}: {_shown(old, key)} -> {_shown(new, key)}")
        for key in keys
        if key not in old or key not in new or old[key] != new[key]
    ]


def _refuse(path: Path, lines: list[str], accepted: bool, reporter: Reporter) -> None:
    if not lines:
        return
    if not accepted:
        instead = "Take the changes back, start a new run, or accept them with --accept-changes"
        problems = [Problem("", f"changed since {path}: {line}") for line in lines]
        raise CheckpointError([*problems, Problem("", "these alter what is learned", instead)])
    for line in lines:
        reporter.line(f"changed since the checkpoint, and accepted: {line}")


def _named(path: Path, reporter: Reporter) -> Path:
    """A checkpoint, or the newest whole one of a run folder or of a folder of checkpoints."""
    for folder in (path / "checkpoints", path):
        found = Checkpoints(folder, 1)
        if found.saved():
            newest, skipped = found.newest_whole()
            for line in skipped:
                reporter.line(line)
            return newest or found.saved()[-1][1]
    return path


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in names)


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: value}
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat.update(_flat(item, f"{key}.{name}" if key else str(name)))
    return flat


def _shown(values: Mapping[str, Any], key: str) -> str:
    return yaml_of(values[key]) if key in values else "(not there)"
