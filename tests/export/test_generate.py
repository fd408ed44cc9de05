"""Trying a run answers with the adapter and with the base alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from lowmem_ft.errors import ModelError
from lowmem_ft.export.generate import generate
from lowmem_ft.train import main
from tests.flow.recipes import write_run


def test_the_trained_model_answers_as_at_the_end_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    recipe = write_run(tmp_path / "work")
    assert main([str(recipe), "train.lr=0.05", "train.steps=8"]) == 0
    run = tmp_path / "work" / "runs" / "tiny"
    trained, base = generate(run, "hello eval 0", max_new_tokens=4)
    first = {
        step: json.loads((run / f"answers-{step:06d}.jsonl").read_text().splitlines()[0])["text"] for step in (0, 8)
    }
    assert (trained, base) == (first[8], first[0])
    assert trained != base


def test_a_folder_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(ModelError, match=r"holds no finished run .* only: notes"):
        generate(tmp_path, "hello")
    with pytest.raises(ModelError, match="only: nothing"):
        generate(tmp_path / "none", "hello")
