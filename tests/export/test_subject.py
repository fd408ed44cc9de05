"""What a folder holds is found out, and a base that is another is told from the right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowmem_ft.errors import ExportError, ModelError
from lowmem_ft.export.subject import find_subject
from lowmem_ft.export.trained_base import Quantization
from lowmem_ft.model.base_record import FILE, record_base
from lowmem_ft.model.find import FoundModel
from tests.export.adapters import save, with_adapter
from tests.tiny import save_tiny_model, tiny_llama


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    base = save_tiny_model(tmp_path / "base")
    folder = save(with_adapter(tiny_llama(), rank=4), tmp_path / "adapter")
    record = record_base(
        FoundModel(str(base), None, ""),
        model=str(base),
        quantization="nf4",
        double_quant=False,
        dtype="bfloat16",
        precision="bf16",
    )
    (folder / FILE).write_text(record.text())
    return folder


def test_an_adapter_knows_its_base_by_its_record(adapter: Path) -> None:
    subject = find_subject(adapter)
    assert (subject.kind, subject.adapter) == ("adapter", adapter)
    assert subject.quantization == Quantization("nf4", False, "bfloat16")
    assert subject.precision == "bf16"
    found = subject.find_base()
    assert found.path == str(adapter.parent / "base")
    subject.check_base(found)


def test_without_a_record_the_base_is_that_of_peft_and_its_training_unknown(adapter: Path) -> None:
    (adapter / FILE).unlink()
    with pytest.raises(ModelError, match=r"names no base model\. Name it by --model"):
        find_subject(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(adapter.parent / "base")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    subject = find_subject(adapter)
    assert (subject.model, subject.quantization) == (str(adapter.parent / "base"), None)
    subject.check_base(subject.find_base())


def test_a_changed_base_is_refused_and_what_changed_is_listed(adapter: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    save_tiny_model(adapter.parent / "other", model)
    subject = find_subject(adapter, str(adapter.parent / "other"))
    with pytest.raises(ExportError, match=r"is not the base that .* in 1 points") as caught:
        subject.check_base(subject.find_base())
    assert "model.layers.0.mlp.up_proj.weight has other values" in str(caught.value)


def test_a_training_that_is_recorded_is_not_contradicted(adapter: Path) -> None:
    assert find_subject(adapter, quantization="nf4").quantization == Quantization("nf4", False, "bfloat16")
    with pytest.raises(ExportError, match="was trained in nf4, and --quantization says fp4"):
        find_subject(adapter, quantization="fp4")


def test_a_base_that_is_gone_says_how_to_name_its_place(adapter: Path) -> None:
    (adapter.parent / "base").rename(adapter.parent / "moved")
    with pytest.raises(ModelError, match="Name its place by --model"):
        find_subject(adapter).find_base()
    moved = find_subject(adapter, str(adapter.parent / "moved"))
    moved.check_base(moved.find_base())


def test_a_model_is_itself(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    subject = find_subject(folder)
    assert (subject.kind, subject.adapter, subject.find_base().path) == ("model", None, str(folder))


def test_a_folder_with_neither_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(ModelError, match="holds no run, adapter or model, only: notes"):
        find_subject(tmp_path)
