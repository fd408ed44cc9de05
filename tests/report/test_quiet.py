"""A run prints what it means to print, and nothing of its libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.recipes import write_run


@pytest.mark.slow
def test_a_fresh_process_prints_nothing_to_standard_error(tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "work")
    done = subprocess.run(
        [sys.executable, "-m", "lowmem_ft.train", str(recipe)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "done" in lines
    generate = ["generate", str(tmp_path / "work" / "runs" / "tiny"), "hello", "--max-new-tokens", "3"]
    tried = subprocess.run(
        [sys.executable, "-m", "lowmem_ft.cli", *generate], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert (tried.returncode, tried.stderr) == (0, "")
    assert tried.stdout.startswith("trained: ")
    assert not [line for line in lines if "Warning" in line or "WARNING" in line or "Failed" in line or "it/s" in line]
