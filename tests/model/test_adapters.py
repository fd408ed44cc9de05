"""LoRA: where it goes, how many weights it trains, and names that match nothing."""

from __future__ import annotations

import pytest
import torch

from lowmem_ft.errors import ModelError
from lowmem_ft.model.adapters import add_lora
from tests.tiny import tiny_gpt2, tiny_llama


def test_all_linear_is_every_linear_but_the_head() -> None:
    model, report = add_lora(tiny_llama(), rank=4, alpha=8)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert report.layers == dict.fromkeys(names, 2)
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    assert report.trainable_parameters == 2 * sum(4 * (i + o) for i, o in sizes)
    assert report.trainable_bytes == report.trainable_parameters * 4
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_the_start_answers_as_the_base() -> None:
    ids = torch.arange(3, 20)[None]
    expected = tiny_llama()(input_ids=ids).logits
    model, _ = add_lora(tiny_llama(), rank=4, alpha=8)
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_named_targets_match_whole_last_parts() -> None:
    _, report = add_lora(tiny_llama(), rank=4, alpha=8, targets=["q_proj", "down_proj"])
    assert report.layers == {"q_proj": 2, "down_proj": 2}
    _, report = add_lora(tiny_gpt2(), rank=4, alpha=8, targets=["c_attn"])
    assert report.layers == {"c_attn": 2}


def test_alpha_may_be_any_number() -> None:
    model, _ = add_lora(tiny_llama(), rank=4, alpha=2.5)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 2.5 / 4


def test_names_that_match_nothing_are_all_reported_with_near_ones() -> None:
    with pytest.raises(ModelError) as error:
        add_lora(tiny_llama(), rank=4, alpha=8, targets=["q_porj", "v_proj", "wqkv"])
    assert len(error.value.problems) == 2
    text = str(error.value)
    assert "adapter.targets: q_porj matches no linear layer. Write q_proj. There are: down_proj" in text
    assert "wqkv matches no linear layer. There are:" in text
