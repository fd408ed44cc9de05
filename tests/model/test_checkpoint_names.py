"""Names in a checkpoint are those that transformers itself finds parameters by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from lowmem_ft.model.checkpoint_names import parameter_names
from lowmem_ft.model.facts import make_empty_model
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.tensor_files import TensorFiles
from tests.tiny import FAMILIES, tiny_gpt2


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_stored_tensor_is_the_parameter_of_its_name(tmp_path: Path, family: str) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    files = TensorFiles(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = parameter_names(make_empty_model(FoundModel(str(tmp_path), None, ""), "float32"), files)
    state = model.state_dict()
    assert len(names) == len(files) > 10
    assert all(found.whole and torch.equal(state[found.name], files.read(key)) for key, found in names.items())


def test_a_checkpoint_without_the_prefix_of_the_model_is_matched(tmp_path: Path) -> None:
    model = tiny_gpt2()
    names = parameter_names(model, ["h.0.attn.c_attn.weight", "wte.weight", "lm_head.weight"])
    assert [found.name for found in names.values()] == [
        "transformer.h.0.attn.c_attn.weight",
        "transformer.wte.weight",
        "lm_head.weight",
    ]


def test_experts_that_are_fused_on_arrival_are_not_whole() -> None:
    with torch.device("meta"):
        model = MixtralForCausalLM(
            MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                          num_key_value_heads=1, num_local_experts=2, vocab_size=16)
        )  # fmt: skip
    names = parameter_names(
        model,
        [
            "model.layers.0.block_sparse_moe.experts.0.w1.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.block_sparse_moe.gate.weight",
        ],
    )
    assert [found.whole for found in names.values()] == [False, True, True]
    state = model.state_dict()
    assert all(found.name in state for found in names.values())
