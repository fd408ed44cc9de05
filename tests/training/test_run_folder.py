"""The run folder: nothing is overwritten, nothing is half written, nothing is pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from lowmem_ft.data.batches import StepOrder
from lowmem_ft.errors import ExportError
from lowmem_ft.memory.measure import MemoryMeter, PhasePeak
from lowmem_ft.model.generate import Answer
from lowmem_ft.recipe.data_section import DataSection
from lowmem_ft.recipe.schema import CheckpointSection, ModelSection, Recipe
from lowmem_ft.training.loop import StepResult
from lowmem_ft.training.run_folder import RunFolder
from tests.data.tiny_tokenizers import with_template
from tests.tiny import add_lora, tiny_llama


def _recipe(output: Path, **checkpoint: Any) -> Recipe:
    return Recipe(
        output=str(output),
        model=ModelSection(path="m"),
        data=DataSection(train="t"),
        checkpoint=CheckpointSection(**checkpoint),
    )


def _create(output: Path, **checkpoint: Any) -> RunFolder:
    return RunFolder.create(_recipe(output, **checkpoint), "name: x\n", "cpu", ["train", "x.yaml"])


def test_a_second_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = [_create(tmp_path / "a") for _ in range(3)]
    assert [run.path.name for run in runs] == ["a", "a-2", "a-3"]
    elsewhere = [_create(tmp_path / "b", folder=str(tmp_path / "kept")) for _ in range(2)]
    assert [run.checkpoints.name for run in elsewhere] == ["kept", "kept-2"]


def test_environment_and_recipe_are_there_from_the_start(tmp_path: Path) -> None:
    run = _create(tmp_path / "a")
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["command"] == ["train", "x.yaml"]
    assert environment["versions"]["torch"] == torch.__version__
    assert (run.path / "recipe.yaml").read_text() == "name: x\n"


def test_a_step_becomes_a_line_of_metrics_and_of_the_live_view(tmp_path: Path) -> None:
    run = _create(tmp_path / "a")
    result = StepResult(3, 0.5, 1.25, 1e-4, 900, 400, 2, 1.5, False)
    line = run.record_step(result, StepOrder(10, 2, 5, 17), MemoryMeter(torch.device("cpu")))
    (written,) = [json.loads(text) for text in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert (written["step"], written["loss"], written["epoch"], written["skipped"]) == (3, 0.5, 0.6, False)
    assert (line.step, line.steps, line.trained_tokens) == (3, 5, 400)
    assert 0 < line.memory_now == written["memory_bytes"]


def test_memory_and_answers_are_written(tmp_path: Path) -> None:
    run = _create(tmp_path / "a")
    run.record_memory([PhasePeak("load", 5, 0)])
    assert json.loads((run.path / "memory.jsonl").read_text()) == {"phase": "load", "rss_bytes": 5, "device_bytes": 0}
    run.record_answers(12, [Answer("p", "r", "r", True)])
    assert json.loads((run.path / "answers-000012.jsonl").read_text())["exact"] is True


def test_the_adapter_loads_in_peft_with_tokenizer_and_template(tmp_path: Path) -> None:
    run = _create(tmp_path / "a")
    model, _ = add_lora(tiny_llama(), rank=4, alpha=8)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05)
    ids = torch.arange(3, 12)[None]
    run.save_adapter(model, with_template("regex", "chatml"), "{{ messages[0].content }}")
    loaded = PeftModel.from_pretrained(tiny_llama(), run.adapter)
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert (run.adapter / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert (run.adapter / "tokenizer.json").exists()
    assert not [path for path in run.path.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", ".pth")]


def test_checkpoints_keep_the_newest_by_number(tmp_path: Path) -> None:
    run = _create(tmp_path / "a", keep=2)
    model, _ = add_lora(tiny_llama(), rank=2, alpha=4)
    for step in (5, 90, 100, 1_000_000):
        run.save_checkpoint(model, with_template("regex", "chatml"), None, step)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000100", "step-1000000"]


def test_a_failed_save_leaves_the_former_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _create(tmp_path / "a")
    model, _ = add_lora(tiny_llama(), rank=2, alpha=4)
    tokenizer = with_template("regex", "chatml")
    run.save_adapter(model, tokenizer, None)
    before = (run.adapter / "adapter_model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with pytest.raises(ExportError, match="No space left on device"):
        run.save_adapter(model, tokenizer, None)
    assert (run.adapter / "adapter_model.safetensors").read_bytes() == before
    assert sorted(path.name for path in run.path.iterdir()) == ["adapter", "environment.json", "recipe.yaml"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        _create(tmp_path / "file" / "below")
