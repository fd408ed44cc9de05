"""`lowmem-ft check` and `lowmem-ft resume`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_ft import cli
from tests.flow.recipes import write_run


def test_check_audits_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path / "work")
    (tmp_path / "work" / "model" / "model.safetensors").write_bytes(b"no weights")
    assert cli.main(["check", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "data.train: 12 records read, 12 kept, 0 left out" in out
    assert "[[there 0<|im_end|>]]" in out
