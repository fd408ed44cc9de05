"""The runner's check: its row, its line, and that it leaves no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lowmem_ft.data.batches import StepOrder
from lowmem_ft.data.formats import TokenizedExample
from lowmem_ft.train import main
from lowmem_ft.training import gradients
from tests.flow.recipes import write_run


def _example(length: int, weight: float) -> Any:
    return TokenizedExample(tuple(range(length)), (weight,) * length, "a.jsonl", length)


def _split(*examples: Any) -> Any:
    class Tokens(list[Any]):
        lengths = np.array([len(example.input_ids) for example in examples])

    return SimpleNamespace(tokens=Tokens(examples))


def test_the_shortest_example_that_trains_anything_is_the_row() -> None:
    order = StepOrder(size=3, batch_size=3, steps=1, seed=0)
    row = gradients.shortest_row(_split(_example(9, 1.0), _example(3, 0.0), _example(6, 1.0)), order)
    assert row is not None
    assert row.lengths == (6,)
    assert gradients.shortest_row(_split(*[_example(4, 0.0)] * 3), order) is None


def test_a_run_is_the_same_with_and_without_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    recipe = write_run(tmp_path / "work")
    assert main([str(recipe), "adapter.dropout=0.3"]) == 0
    assert "gradients reach all 28 trained tensors" in capsys.readouterr().out
    monkeypatch.setattr(gradients, "check_gradients", lambda *arguments: None)
    assert main([str(recipe), "adapter.dropout=0.3"]) == 0
    assert "gradients reach" not in capsys.readouterr().out
    runs = [tmp_path / "work" / "runs" / name / "adapter" / "adapter_model.safetensors" for name in ("tiny", "tiny-2")]
    assert runs[0].read_bytes() == runs[1].read_bytes()
