"""Every tensor of an adapter has a meaning, or the adapter is refused with the tensor's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowmem_ft.errors import ExportError, ModelError
from lowmem_ft.export.adapter_weights import CONFIG, WEIGHTS, read_adapter
from lowmem_ft.export.changes import LowRank, RowsReplaced
from tests.export.adapters import save, with_adapter, with_peft
from tests.tiny import tiny_llama, tiny_qwen3

Q0 = "model.layers.0.self_attn.q_proj.weight"


def scale_of(folder: Path, parameter: str = Q0) -> float:
    (change,) = read_adapter(folder).changes[parameter]
    assert isinstance(change, LowRank)
    return change.scale


def changed_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **values}))


def test_scales_follow_rank_alpha_and_their_patterns(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"/layers.1.*up_proj/": 3.0}}
    folder = save(with_adapter(tiny_llama(), rank=4, alpha=6, **patterns), tmp_path / "a")
    assert scale_of(folder) == 6 / 4
    assert scale_of(folder, "model.layers.0.mlp.down_proj.weight") == 6 / 2
    assert scale_of(folder, "model.layers.1.mlp.up_proj.weight") == 3 / 4
    assert scale_of(folder, "model.layers.0.mlp.up_proj.weight") == 6 / 4
    rs = save(with_adapter(tiny_llama(), kind="rslora", rank=4, alpha=6), tmp_path / "rs")
    assert scale_of(rs) == 6 / 2


def test_whole_modules_and_rows_are_told_from_products(tmp_path: Path) -> None:
    settings = {"modules_to_save": ["lm_head"], "trainable_tokens": [7, 2]}
    adapter = read_adapter(save(with_adapter(tiny_qwen3(), rank=4, targets=["q_proj"], **settings), tmp_path))
    assert dict(adapter.replaced) == {"lm_head.weight": "base_model.model.lm_head.weight"}
    (rows,) = adapter.changes["model.embed_tokens.weight"]
    assert isinstance(rows, RowsReplaced)
    assert rows.tokens == (7, 2)
    assert len(adapter.changes) == 3


def test_a_tensor_without_a_meaning_is_named_and_nothing_is_merged(tmp_path: Path) -> None:
    folder = save(with_adapter(tiny_llama(), rank=4, targets=["q_proj"]), tmp_path)
    tensors = load_file(folder / WEIGHTS)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_C.weight"] = torch.zeros(2)
    tensors["elsewhere"] = torch.zeros(2)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ExportError) as caught:
        read_adapter(folder)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert all(name in text for name in ("0.self_attn.q_proj.lora_A.weight", "lora_C.weight", "elsewhere"))


def test_vera_without_its_shared_matrices_is_refused(tmp_path: Path) -> None:
    folder = save(with_adapter(tiny_llama(), kind="vera", rank=4), tmp_path)
    tensors = load_file(folder / WEIGHTS)
    save_file({k: v for k, v in tensors.items() if not k.startswith("base_model.vera")}, folder / WEIGHTS)
    with pytest.raises(ExportError, match="save_projection=True"):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING cannot be merged"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which altered the base"),
        ({"target_parameters": ["experts"]}, "target_parameters is set"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
    ],
)
def test_what_no_sum_of_weights_can_do_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = save(with_peft(tiny_llama(), r=4, target_modules=["q_proj"]), tmp_path)
    assert len(read_adapter(folder).changes) == 2
    changed_config(folder, **values)
    with pytest.raises(ExportError, match=message):
        read_adapter(folder)


def test_a_folder_that_is_no_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"holds no {CONFIG}"):
        read_adapter(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelError, match=f"has no {WEIGHTS}"):
        read_adapter(tmp_path)
