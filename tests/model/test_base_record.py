"""A base that is not what it was is told from the one that an adapter was trained on, and what differs is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lowmem_ft.errors import ModelError
from lowmem_ft.model.base_record import FILE, BaseRecord, differences, read_record, record_base
from lowmem_ft.model.find import FoundModel
from tests.tiny import tiny_llama


def saved(folder: Path, model: PreTrainedModel, **options: str) -> FoundModel:
    model.save_pretrained(folder, **options)
    return FoundModel(str(folder), None, "")


def record(found: FoundModel) -> BaseRecord:
    return record_base(found, model="m", quantization="nf4", double_quant=True, dtype="bfloat16", precision="bf16")


def test_a_copy_in_other_shards_and_with_other_remarks_is_the_same(tmp_path: Path) -> None:
    model = tiny_llama()
    taken = record(saved(tmp_path / "a", model))
    assert len(taken.weights) == 20
    model.config.use_cache = False
    copy = saved(tmp_path / "b", model, max_shard_size="100KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert differences(taken, copy) == []


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    taken = record(saved(tmp_path / "a", tiny_llama()))
    assert read_record(tmp_path) is None
    (tmp_path / FILE).write_text(taken.text())
    assert read_record(tmp_path / "none", tmp_path) == taken
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(ModelError, match="no record of a base"):
        read_record(tmp_path)


def test_one_changed_weight_is_named(tmp_path: Path) -> None:
    taken = record(saved(tmp_path / "a", tiny_llama()))
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[-1, -1] += 0.1
    (problem,) = differences(taken, saved(tmp_path / "b", model))
    assert problem.what == "model.layers.1.self_attn.q_proj.weight has other values"


def test_settings_and_weights_of_another_model_are_listed(tmp_path: Path) -> None:
    taken = record(saved(tmp_path / "a", tiny_llama()))
    other = saved(
        tmp_path / "b", tiny_llama(num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    )
    found = [str(problem) for problem in differences(taken, other)]
    assert any("num_hidden_layers is 1, and in training it was 2" in line for line in found)
    assert any("rope_parameters" in line for line in found)
    assert sum("is not there any more" in line for line in found) == 9
    assert (
        len(
            [
                line
                for line in differences(record(other), saved(tmp_path / "c", tiny_llama()))
                if "was not there" in line.what
            ]
        )
        == 9
    )


def test_a_config_that_is_none_is_named(tmp_path: Path) -> None:
    found = saved(tmp_path / "a", tiny_llama())
    (tmp_path / "a" / "config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        record(found)
