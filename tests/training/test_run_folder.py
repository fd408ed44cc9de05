"""The run folder: nothing is overwritten, nothing is half written, nothing is pickled."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from lowmem_ft.data.batches import StepOrder
from lowmem_ft.errors import CheckpointError, ExportError
from lowmem_ft.memory.measure import MemoryMeter, PhasePeak
from lowmem_ft.model.base_record import BaseRecord, read_record
from lowmem_ft.model.generate import Answer
from lowmem_ft.recipe.data_section import DataSection
from lowmem_ft.recipe.schema import CheckpointSection, ModelSection, Recipe
from lowmem_ft.training import run_folder
from lowmem_ft.training.loop import StepResult
from lowmem_ft.training.resume import Past
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
    run.record_answers(12, [Answer("p", "r", "r", True)], [{"exact_match": 1.0, "mine": None}])
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


def test_what_the_base_is_lies_in_the_run_and_beside_the_adapter(tmp_path: Path) -> None:
    base = BaseRecord("m", None, "nf4", True, "bfloat16", "bf16", {"model_type": "llama"}, {"w": "1"})
    run = RunFolder.claim(_recipe(tmp_path / "a"))
    run.begin("name: x\n", "cpu", [], base=base)
    model, _ = add_lora(tiny_llama(), rank=4, alpha=8)
    run.save_adapter(model, with_template("regex", "chatml"), None)
    assert read_record(run.path) == read_record(run.adapter) == base


def test_a_number_that_is_not_finite_is_null_in_the_metrics(tmp_path: Path) -> None:
    run = _create(tmp_path / "a")
    run.record(loss=math.nan, grad_norm=math.inf, step=1)
    assert (run.path / "metrics.jsonl").read_text() == '{"loss": null, "grad_norm": null, "step": 1}\n'


def _past(run: RunFolder, length: int) -> Past:
    return Past(run.checkpoints / "step-000001", {"metrics_bytes": length})


def test_lines_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    first = _create(tmp_path / "a")
    first.record(step=1)
    length = first.metrics_bytes()
    first.record(step=2)
    first.release()
    again = RunFolder.claim(_recipe(tmp_path / "a", resume="auto"))
    assert again.goes_on
    again.begin("name: x\n", "cpu", [], _past(again, length))
    again.record(step=2, again=True)
    assert (again.path / "metrics.jsonl").read_text().splitlines() == ['{"step": 1}', '{"step": 2, "again": true}']
    again.release()
    start = RunFolder.claim(_recipe(tmp_path / "a", resume="auto"))
    start.begin("name: x\n", "cpu", [])
    assert start.metrics_bytes() == 0


def test_a_checkpoint_of_another_run_gives_its_lines_to_a_new_folder(tmp_path: Path) -> None:
    first = _create(tmp_path / "a")
    first.record(step=1)
    length = first.metrics_bytes()
    first.record(step=2)
    (first.checkpoints / "step-000001").mkdir()
    other = RunFolder.claim(_recipe(tmp_path / "b", resume=str(first.checkpoints / "step-000001")))
    other.begin("name: x\n", "cpu", [], _past(first, length))
    assert not other.goes_on
    assert (other.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert len((first.path / "metrics.jsonl").read_text().splitlines()) == 2


def test_two_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    first = RunFolder.claim(_recipe(tmp_path / "a"))
    second = RunFolder.claim(_recipe(tmp_path / "a"))
    assert (first.path.name, second.path.name) == ("a", "a-2")
    with pytest.raises(CheckpointError, match="in use by process"):
        RunFolder.claim(_recipe(tmp_path / "a", resume="auto"))
    for run in (first, second):
        run.release()
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_a_new_run_never_gets_the_checkpoints_of_another(tmp_path: Path) -> None:
    first = _create(tmp_path / "a", folder=str(tmp_path / "kept"))
    second = RunFolder.claim(_recipe(tmp_path / "b", folder=str(tmp_path / "kept")))
    assert second.checkpoints.name == "kept-2"
    (first.checkpoints / "step-000001").mkdir()
    for run in (first, second):
        run.release()
    third = RunFolder.claim(_recipe(tmp_path / "c", folder=str(tmp_path / "kept")))
    assert third.checkpoints.name == "kept-2"
    third.release()
    again = RunFolder.claim(_recipe(tmp_path / "a", folder=str(tmp_path / "kept"), resume="auto"))
    assert again.checkpoints.name == "kept"
    again.release()


def test_a_line_that_finds_no_room_waits_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _create(tmp_path / "a")
    run.record(step=1)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_append_whole", _no_room)
        run.record(step=2)
        with pytest.raises(ExportError, match=r"metrics.jsonl, memory.jsonl could not be written"):
            run.record_memory([])
    run.record(step=3)
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1}', '{"step": 2}', '{"step": 3}']


def _no_room(path: Path, text: str) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_deleted_under_the_run_is_made_again(tmp_path: Path) -> None:
    run = _create(tmp_path / "a")
    run.record(step=1)
    shutil.rmtree(run.path)
    run.record(step=2)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 2}\n'
    assert (run.path / "recipe.yaml").read_text() == "name: x\n"
    run.release()
    assert not (run.path / "run.lock").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o500)
    with pytest.raises(ExportError, match="kept: cannot be written: Permission denied"):
        _create(tmp_path / "a", folder=str(tmp_path / "kept"))
    tmp_path.chmod(0o500)
    with pytest.raises(ExportError, match="cannot be written: Permission denied"):
        _create(tmp_path / "b")
    tmp_path.chmod(0o700)


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
    run.release()
    assert sorted(path.name for path in run.path.iterdir()) == ["adapter", "environment.json", "recipe.yaml"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        _create(tmp_path / "file" / "below")
