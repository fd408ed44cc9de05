"""An export is held against the trained model, and against the adapter on the base that it was merged into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowmem_ft.errors import ExportError
from lowmem_ft.export.merged_folder import MergeRequest, merge
from lowmem_ft.export.proof import AS_STORED, AS_TRAINED, Proof, base_of_export
from lowmem_ft.export.subject import find_subject
from tests.export.trained import trained_in


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return trained_in(tmp_path)


def proven(adapter: Path, out: Path, base: Any, said: list[str], **options: Any) -> dict[str, Any]:
    subject = find_subject(adapter)
    kept: dict[str, Any] = {}

    def prove(folder: Path) -> dict[str, Any]:
        kept.update(Proof(subject, base, say=said.append, **options)(folder))
        return kept

    merge(MergeRequest(subject, out, base), prove)
    return kept


def test_into_the_stored_base_it_is_the_adapter_on_it_and_near_the_trained_one(adapter: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = proven(adapter, tmp_path / "out", "full", said)
    assert list(found) == [AS_STORED, AS_TRAINED]
    assert found[AS_STORED]["lost"] < 1e-5
    assert 1e-3 < found[AS_TRAINED]["lost"] < 0.5
    assert "general questions" in said[0]
    assert base_of_export(tmp_path / "out") == "full"


def test_into_the_trained_base_it_is_the_trained_model(adapter: Path, tmp_path: Path) -> None:
    found = proven(adapter, tmp_path / "out", "trained", [])
    assert list(found) == [AS_TRAINED]
    assert found[AS_TRAINED]["lost"] < 1e-5
    assert base_of_export(tmp_path / "out") == "trained"
    assert base_of_export(tmp_path / "base") is None


def test_an_export_with_one_wrong_weight_is_refused(adapter: Path, tmp_path: Path) -> None:
    proven(adapter, tmp_path / "out", "full", [])
    weights = tmp_path / "out" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"] = load_file(tmp_path / "base" / "model.safetensors")[
        "model.layers.1.mlp.down_proj.weight"
    ]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ExportError, match=r"base as stored, with the adapter -> the export: .* is lost"):
        Proof(find_subject(adapter), "full", say=lambda _: None)(tmp_path / "out")


def test_prompts_of_a_file_are_asked(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    said: list[str] = []
    found = proven(adapter, tmp_path / "out", "trained", said, prompts=tmp_path / "p.txt")
    assert found[AS_TRAINED]["texts"] == 2
    assert not any("general" in line for line in said)


def test_a_training_that_is_not_known_is_held_against_the_stored_base(adapter: Path, tmp_path: Path) -> None:
    (adapter / "base.json").unlink()
    file = adapter / "adapter_config.json"
    named = {"base_model_name_or_path": str(tmp_path / "base")}
    file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
    found = Proof(find_subject(adapter), "full", say=lambda _: None)(adapter)
    assert list(found) == [AS_STORED]
    assert found[AS_STORED]["kl"] == 0


def test_the_measure_sees_one_changed_number_of_the_head(adapter: Path, tmp_path: Path) -> None:
    """Not only whole layers: a comparison that nothing can fail would prove nothing."""
    proven(adapter, tmp_path / "out", "trained", [])
    weights = tmp_path / "out" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["model.norm.weight"][0] += torch.tensor(30.0)
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ExportError, match="is lost"):
        Proof(find_subject(adapter), "trained", say=lambda _: None)(tmp_path / "out")
