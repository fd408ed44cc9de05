"""The checkpoints of a run: which are there, which is whole, which stay."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.errors import CheckpointError, Problem
from lowmem_ft.training.state import Live
from lowmem_ft.training.whole_folder import mend, why_not_whole, write_text_whole, write_whole

BEST = "best.json"


@dataclass(frozen=True)
class Checkpoints:
    """The folder of a run's checkpoints.

    Attributes:
        folder: need not exist yet.
        keep: how many of the newest stay.
    """

    folder: Path
    keep: int

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` is."""
        return self.folder / f"step-{step:06d}"

    def saved(self) -> list[tuple[int, Path]]:
        """Step and folder of each checkpoint, whole or not, in the order of steps."""
        if not self.folder.is_dir():
            return []
        found = ((re.fullmatch(r"step-(\d{6,})", entry.name), entry) for entry in self.folder.iterdir())
        return sorted((int(match[1]), entry) for match, entry in found if match and entry.is_dir())

    def newest_whole(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole, and a line for each newer one that is not, with the reason."""
        skipped: list[str] = []
        for _, path in reversed(self.saved()):
            reason = why_not_whole(path)
            if reason is None:
                return path, skipped
            skipped.append(f"{path} is not used: {reason}")
        return None, skipped

    def save(self, step: int, live: Live, position: Mapping[str, Any]) -> Path:
        """Write a checkpoint, and only when it is whole delete the old ones: all but the newest and the best.

        Args:
            step: that was done.
            live: what is saved.
            position: what else belongs into its state.json; see `Live.write`.

        Raises:
            CheckpointError: it cannot be written; the earlier ones are untouched.
        """
        path = self.path(step)
        write_whole(path, lambda part: live.write(part, position), live.needed_bytes())
        self._delete_old()
        return path

    def best(self) -> dict[str, Any] | None:
        """`step` of the best checkpoint so far, and `value` of what it is the best `by`; or None."""
        try:
            found = json.loads((self.folder / BEST).read_text(encoding="utf-8"))
            return {"step": int(found["step"]), "by": str(found["by"]), "value": float(found["value"])}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def mark_best(self, best: Mapping[str, Any] | None) -> None:
        """Remember which checkpoint is the best one: see `best`."""
        if best is None:
            (self.folder / BEST).unlink(missing_ok=True)
        else:
            write_text_whole(self.folder / BEST, json.dumps(dict(best)) + "\n")
        self._delete_old()

    def _delete_old(self) -> None:
        best = self.best()
        for number, old in self.saved()[: -self.keep]:
            if best is None or number != best["step"]:
                shutil.rmtree(old, ignore_errors=True)

    def mend(self) -> None:
        """Clear away what a killed run left half written. Only for who holds the run's lock."""
        mend(self.folder)

    def set_aside_after(self, step: int) -> list[str]:
        """Rename checkpoints of later steps: what goes on from `step` makes others. A line for each."""
        lines = []
        for number, path in self.saved():
            if number > step:
                name = _free_name(path)
                os.rename(path, name)
                lines.append(f"{path.name} is of a later step, and was set aside as {name.name}")
        return lines


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    return name


def checked(path: Path) -> Path:
    """A checkpoint named by the user.

    Raises:
        CheckpointError: it is not whole.
    """
    reason = why_not_whole(path)
    if reason is not None:
        others = Checkpoints(path.parent, 1).newest_whole()[0]
        instead = f"The newest whole one is {others}" if others else "Write checkpoint.resume=auto to start anew"
        raise CheckpointError(Problem(str(path), reason, instead))
    return path
