"""What is read before any weight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowmem_ft.errors import DataError
from lowmem_ft.recipe.load import load_recipe
from lowmem_ft.report.progress import Display
from lowmem_ft.training import inputs
from tests.flow.recipes import write_run


def _read(folder: Path, *overrides: str) -> inputs.Data:
    recipe = load_recipe(write_run(folder), list(overrides)).recipe
    found = inputs.find(recipe, Display())
    _, encoder = inputs.make_tokenizer_and_encoder(recipe, found)
    return inputs.load_data(recipe, encoder, Display())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))


def test_both_splits_are_read_and_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _read(tmp_path / "work")
    assert (data.audit.train.kept, data.audit.eval and data.audit.eval.kept) == (12, 4)
    assert data.audit.formats[0].startswith("auto decided: messages")
    out = capsys.readouterr().out
    assert "training data: 12 examples from " in out
    assert "held-out data: 4 examples from " in out


def test_without_held_out_data_there_is_one_split(tmp_path: Path) -> None:
    data = _read(tmp_path / "work", "data.eval=null", "eval=null")
    assert data.eval is None
    assert data.audit.eval is None


def test_nothing_to_train_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 of 12 examples left at max_tokens 4"):
        _read(tmp_path / "work", "data.max_tokens=4")


def test_reading_imports_no_library_of_models(tmp_path: Path) -> None:
    """So `lowmem-ft check` starts fast."""
    recipe = write_run(tmp_path / "work")
    program = (
        "import sys; from lowmem_ft.cli import main; "
        f"code = main(['check', {str(recipe)!r}]); print(code, {{'bitsandbytes', 'peft'}} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "0 set()", result.stderr
    assert result.stderr == ""
