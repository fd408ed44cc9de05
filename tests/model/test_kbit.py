"""prepare_for_kbit_training: what is cast, what is frozen, what recomputes, and what it says of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import lowmem_ft
from lowmem_ft.errors import ModelError
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.kbit import predict_preparation, prepare_for_kbit_training
from lowmem_ft.model.load import is_packed, load_model
from tests.tiny import FAMILIES, save_tiny_model, tiny_llama

KINDS = ["none", "nf4", "fp4", "int8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def _load(folder: Path, kind: str) -> Any:
    return load_model(FoundModel(str(folder), None, ""), quantization=kind, dtype="bfloat16")


def _train_step(model: Any) -> None:
    ids = torch.arange(3, 19)[None]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()


def test_it_is_importable_from_the_package() -> None:
    assert lowmem_ft.prepare_for_kbit_training is prepare_for_kbit_training


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_not_packed_goes_to_fp32_and_packed_weights_stay_bit_for_bit(folder: Path, kind: str) -> None:
    model = _load(folder, kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert prepare_for_kbit_training(model) is model
    for name, p in model.named_parameters():
        if is_packed(p):
            assert torch.equal(p, before[name])
        else:
            assert p.dtype == torch.float32
            assert torch.equal(p, before[name].float())
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", ["all", "norms", "none"])
def test_lora_on_a_prepared_model_trains_and_the_base_stays_bit_identical(folder: Path, kind: str, cast: Any) -> None:
    model = prepare_for_kbit_training(_load(folder, kind), cast=cast)
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    _train_step(adapted)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 28
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    torch.optim.AdamW(trained, lr=0.1).step()
    now = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): p for name, p in adapted.named_parameters()
    }
    assert all(torch.equal(now[name], p) for name, p in base.items())


def test_tied_weights_stay_tied_and_are_cast_once(folder: Path) -> None:
    model = prepare_for_kbit_training(_load(folder, "nf4"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    groups = {group.part: group for group in model.preparation_report.groups}
    assert set(groups) == {"embeddings", "norms"}
    assert groups["embeddings"].bytes_after == 2 * groups["embeddings"].bytes_before == 448 * 64 * 4


def test_norms_alone_cost_norm_bytes_and_keep_the_stream_in_16_bits(folder: Path) -> None:
    model = prepare_for_kbit_training(_load(folder, "none"), cast="norms")
    norms = 5 * 64  # two a layer and the last
    assert model.preparation_report.added_bytes == norms * 2
    types: set[torch.dtype] = set()
    for module in (model.model.layers[0], model.model.norm, model.model.layers[1].input_layernorm):
        module.register_forward_hook(lambda m, args, out: types.add(out.dtype))
    model(input_ids=torch.arange(3, 9)[None], use_cache=False)  # outside autocast too
    assert types == {torch.bfloat16}


def test_none_casts_nothing(folder: Path) -> None:
    report = prepare_for_kbit_training(_load(folder, "nf4"), cast="none").preparation_report
    assert report.groups == ()
    assert report.added_bytes == 0


def test_twice_is_as_once(folder: Path) -> None:
    model = prepare_for_kbit_training(_load(folder, "nf4"), cast="norms")
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    again = prepare_for_kbit_training(model, cast="norms")
    assert again.preparation_report.added_bytes == 0
    assert sum(len(m._forward_hooks) for m in again.modules()) == hooks


def test_adapters_that_are_there_already_keep_training(folder: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(_load(folder, "nf4"), config)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    prepare_for_kbit_training(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
    assert len(trainable) == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_keep_only_their_input(family: str) -> None:
    """With recompute the bytes saved for backward are a small part of those without."""
    saved = {}
    for recompute in ("none", "block"):
        model = prepare_for_kbit_training(FAMILIES[family](), recompute=recompute)  # type: ignore[arg-type]
        model.train()
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backbone = getattr(model, model.base_model_prefix)
            hidden = backbone(input_ids=torch.arange(3, 131)[None], use_cache=False).last_hidden_state
        assert hidden.requires_grad  # input gradients are on, though every parameter is frozen
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved[recompute] = sum(size for storage, size in sizes.items() if storage not in weights)
    assert saved["block"] < 0.35 * saved["none"]


def test_recompute_and_input_gradients_can_be_off() -> None:
    model = prepare_for_kbit_training(tiny_llama(), recompute="none", input_gradients=False).train()
    assert not model.is_activation_checkpointing
    assert not model.model(
        input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False
    ).last_hidden_state.requires_grad


def test_a_model_without_blocks_is_refused_with_the_way_out() -> None:
    model = tiny_llama()
    type(model).supports_gradient_checkpointing = False
    try:
        with pytest.raises(ModelError, match=r'no blocks that can recompute.*Write recompute="none"'):
            prepare_for_kbit_training(model)
    finally:
        type(model).supports_gradient_checkpointing = True


def test_what_was_done_is_logged_in_bytes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lowmem_ft"):
        prepare_for_kbit_training(_load(folder, "nf4"))
    assert "cast embeddings: 28,672 weights, bfloat16 -> float32, 56.0 KiB -> 112 KiB" in caplog.messages
    assert any("base frozen; gradient checkpointing on every block" in message for message in caplog.messages)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", ["all", "norms", "none"])
def test_the_prediction_without_weights_equals_what_is_done(folder: Path, kind: str, cast: Any) -> None:
    predicted = predict_preparation(tiny_llama().bfloat16(), cast, kind != "none", "block")
    done = prepare_for_kbit_training(_load(folder, kind), cast=cast).preparation_report
    assert predicted.groups == done.groups
    assert predicted.added_bytes == done.added_bytes
