"""What does not fit between adapter and base is listed before a weight is read; what peft saved fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lowmem_ft.errors import ExportError
from lowmem_ft.export.adapter_weights import WEIGHTS
from lowmem_ft.export.fit import check_fits
from tests.export.adapters import save, with_adapter, with_peft
from tests.tiny import tiny_gemma3, tiny_gpt2, tiny_llama, tiny_qwen3


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        made: PreTrainedModel = type(model)(model.config)
    return made


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (tiny_llama(), {"rank": 4, "rank_pattern": {"down_proj": 2}}),
        (tiny_gemma3(), {"kind": "rslora", "rank": 4}),
        (tiny_qwen3(), {"kind": "dora", "rank": 4, "modules_to_save": ["lm_head"]}),
        (tiny_llama(), {"kind": "vera", "rank": 4}),
        (tiny_llama(), {"kind": "ia3"}),
        (tiny_gpt2(), {"rank": 4, "targets": ["c_attn"]}),
        (tiny_llama(), {"rank": 4, "trainable_tokens": [3]}),
    ],
)
def test_what_was_saved_fits_its_base(tmp_path: Path, model: PreTrainedModel, settings: dict[str, Any]) -> None:
    check_fits(save(with_adapter(model, **settings), tmp_path), on_meta(model), "the base")


def test_a_vocabulary_that_grew_fits(tmp_path: Path) -> None:
    larger = tiny_qwen3()
    larger.resize_token_embeddings(460, mean_resizing=False)
    adapted = with_peft(larger, r=4, target_modules=["q_proj"])
    check_fits(save(adapted, tmp_path / "a", save_embedding_layers=True), on_meta(tiny_qwen3()), "the base")
    whole = with_peft(larger, r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    check_fits(save(whole, tmp_path / "b"), on_meta(tiny_qwen3()), "the base")


def test_missing_and_unmatched_tensors_are_all_listed(tmp_path: Path) -> None:
    folder = save(with_adapter(tiny_llama(), rank=4), tmp_path)
    tensors = load_file(folder / WEIGHTS)
    taken = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = tensors.pop(taken)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ExportError) as caught:
        check_fits(folder, on_meta(tiny_llama()), "the base")
    text = str(caught.value)
    assert f"lacks {taken}, which the base needs" in text
    assert "has base_model.model.model.layers.9.mlp.up_proj.lora_A.weight, for which the base has no place" in text
    assert "--model" in text


def test_other_shapes_and_other_families_are_refused(tmp_path: Path) -> None:
    folder = save(with_adapter(tiny_llama(), rank=4, targets=["down_proj"]), tmp_path)
    with pytest.raises(ExportError, match=r"lora_A\.weight as \[4, 128\], and the base needs \[4, 96\]"):
        check_fits(folder, on_meta(tiny_llama(intermediate_size=96)), "the base")
    with pytest.raises(ExportError, match=r"does not fit the base: .*down_proj"):
        check_fits(folder, on_meta(tiny_gpt2()), "the base")


def test_many_are_counted(tmp_path: Path) -> None:
    folder = save(with_adapter(tiny_llama(), rank=4), tmp_path)
    with pytest.raises(ExportError, match="and 6 more of its tensors"):
        check_fits(folder, on_meta(tiny_llama(num_hidden_layers=1)), "the base")
