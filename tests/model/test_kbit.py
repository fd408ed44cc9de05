"""prepare_for_kbit_training: what is cast, what is frozen, what recomputes, and what it says of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import BitsAndBytesConfig, CLIPConfig, CLIPModel, T5Config, T5ForConditionalGeneration

import lowmem_ft
from lowmem_ft.errors import ModelError
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.kbit import predict_preparation, prepare_for_kbit_training
from lowmem_ft.model.load import load_model
from lowmem_ft.model.packed import is_packed
from tests.memory.test_blocks import IDS, Stack, TwoTowers
from tests.model.backends import BACKENDS, BITSANDBYTES, LORA_TARGETS, dequantized, tensors_of
from tests.tiny import FAMILIES, save_tiny_model, tiny_llama, tiny_moe

KINDS = ["none", *BITSANDBYTES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def _load(folder: Path, kind: str) -> Any:
    return load_model(FoundModel(str(folder), None, ""), quantization=kind, dtype="bfloat16")


def _train_step(model: Any, autocast: bool = True) -> None:
    ids = torch.arange(3, 19)[None]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
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


def _base_name(name: str) -> str:
    return name.replace(".base_layer", "").replace("base_model.model.", "")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cast", ["all", "norms", "none"])
@pytest.mark.parametrize("recompute", ["block", "none"])
@pytest.mark.parametrize("autocast", [True, False])
def test_lora_trains_and_generates_and_the_base_stays_bit_identical(
    folder: Path, backend: str, cast: Any, recompute: Any, autocast: bool
) -> None:
    model = prepare_for_kbit_training(BACKENDS[backend](folder), cast=cast, recompute=recompute)
    base = tensors_of(model)
    targets = LORA_TARGETS.get(backend, "all-linear")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for _ in range(2):
        _train_step(adapted, autocast)
        assert len(trained) == (8 if backend.startswith("gptq-like") else 28)
        assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
        optimizer.step()
        optimizer.zero_grad()
    now = {_base_name(name): tensor for name, tensor in tensors_of(adapted).items()}
    if (
        backend == "int8"
    ):  # its first forward moves the scales from the weight to the layer's state, buffers do not move
        base = {name: tensor for name, tensor in base.items() if name in now}
    assert len(base) >= 19
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert adapted.eval().generate(input_ids=IDS + 3, max_new_tokens=4, min_new_tokens=4).shape == (1, 12)


def _gradients(model: Any, backend: str, autocast: bool) -> torch.Tensor:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=LORA_TARGETS.get(backend, "all-linear"), init_lora_weights=False)
    adapted = get_peft_model(model, config).train()
    _train_step(adapted, autocast)
    return torch.cat([p.grad.flatten() for p in adapted.parameters() if p.requires_grad])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_the_dequantized_model_in_fp32(folder: Path, backend: str) -> None:
    """Of every cast, with and without recompute, inside and outside autocast; and recompute changes no bit.

    Products in bf16 keep 8 bits of each factor: the whole gradient is 10 % off at most; measured, 6 %. Without a
    quantized weight and with all in fp32 it is the same gradient.
    """
    wanted = _gradients(dequantized(BACKENDS[backend](folder)), backend, False)
    for cast in ("all", "norms", "none"):
        for autocast in (True, False):
            got = []
            for recompute in ("block", "none"):
                model = prepare_for_kbit_training(BACKENDS[backend](folder), cast=cast, recompute=recompute)  # type: ignore[arg-type]
                got.append(_gradients(model, backend, autocast))
            assert torch.equal(*got)
            off = ((got[0] - wanted).norm() / wanted.norm()).item()
            exact = cast == "all" and not autocast and backend in ("none", "dequantized")
            assert off == 0 if exact else off < 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_come_through_a_second_call_in_every_backend(folder: Path, backend: str) -> None:
    model = prepare_for_kbit_training(BACKENDS[backend](folder), cast="norms")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=LORA_TARGETS.get(backend, "all-linear")))
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    before = tensors_of(adapted)
    for prepared in (adapted, adapted.get_base_model()):
        assert prepare_for_kbit_training(prepared, cast="norms").preparation_report.added_bytes == 0
        assert {name for name, p in adapted.named_parameters() if p.requires_grad} == trainable
    after = tensors_of(adapted)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


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
    assert predicted.kept == done.kept


@pytest.mark.parametrize("cast", ["all", "norms", "none"])
@pytest.mark.parametrize("switches", [{}, {"head": False}, {"embeddings": False}])
@pytest.mark.parametrize("kind", ["none", "nf4"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3", "moe"])
def test_the_prediction_holds_for_every_family(
    tmp_path: Path, family: str, kind: str, cast: Any, switches: Any
) -> None:
    tiny = {**FAMILIES, "moe": tiny_moe}[family]().bfloat16()
    predicted = predict_preparation(tiny, cast, kind != "none", "block", **switches)
    done = prepare_for_kbit_training(_load(save_tiny_model(tmp_path, tiny), kind), cast=cast, **switches)
    assert predicted.groups == done.preparation_report.groups
    assert predicted.kept == done.preparation_report.kept


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _wide_llama() -> Any:
    return tiny_llama(vocab_size=128_256, tie_word_embeddings=False)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize(("make", "kind"), [(_wide_llama, "nf4"), (tiny_llama, "none"), (tiny_moe, "nf4")])
def test_norms_add_at_most_norm_bytes_where_peft_adds_embeddings_head_and_experts(
    tmp_path: Path, make: Any, kind: str
) -> None:
    """Bytes of parameters before and after, against peft's own function on the same model."""
    folder = save_tiny_model(tmp_path, make().bfloat16())
    added = {}
    for name, prepare in (
        ("peft", prepare_model_for_kbit_training),
        ("all", prepare_for_kbit_training),
        ("norms", lambda model: prepare_for_kbit_training(model, cast="norms")),
    ):
        model = _load(folder, kind)
        before = _bytes(model)
        norms = sum(p.numel() * 2 for key, p in model.named_parameters() if "norm" in key)
        prepare(model)
        added[name] = _bytes(model) - before
        if name != "peft":
            assert model.preparation_report.added_bytes == added[name]
    experts = sum(p.numel() * 2 for p in make().parameters() if p.ndim == 3)
    assert added["norms"] == norms
    assert added["all"] == added["peft"] - experts
    print(f"{make.__name__} {kind}: {added}")


def test_what_is_not_quantized_is_named_and_what_saves_it_is_said(folder: Path) -> None:
    lines = prepare_for_kbit_training(_load(folder, "nf4")).preparation_report.lines()
    assert lines[0].startswith("56.6 KiB of ")
    assert "weight bytes are not quantized: model.embed_tokens.weight 56.0 KiB, " in lines[0]
    assert lines[-1] == (
        'of that, embeddings 56.0 KiB: cast="norms" saves it, or embeddings=False '
        "(in a recipe prepare: {cast: norms}, or {embeddings: false})"
    )
    assert lines[-2].startswith("casts add 56.6 KiB; base frozen")
    moe = prepare_for_kbit_training(tiny_moe().bfloat16()).preparation_report.lines()
    assert "model.layers.*.mlp.experts.gate_up_proj 64.0 KiB" in moe[0]
    assert "kept experts: 49,152 weights, bfloat16, 96.0 KiB" in moe
    assert 'cast="norms" saves it, or embeddings=False, head=False (' in moe[-1]
    assert moe[-1].endswith("{cast: norms}, or {embeddings: false, head: false})")


@pytest.mark.parametrize("model", [Stack, TwoTowers])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_models_outside_transformers_are_prepared(model: Any, use_reentrant: bool) -> None:
    prepared = prepare_for_kbit_training(model().bfloat16(), use_reentrant=use_reentrant).train()
    last = [m for m in prepared.modules() if isinstance(m, nn.LayerNorm) or "RMSNorm" in type(m).__name__]
    for norm in last:
        norm.weight.requires_grad_(True)
    prepared(IDS).float().square().sum().backward()
    assert all(norm.weight.grad is not None for norm in last)


def test_reentrant_recompute_gives_the_same_gradients_on_a_frozen_base(folder: Path) -> None:
    grads = []
    for use_reentrant in (False, True):
        torch.manual_seed(0)
        model = prepare_for_kbit_training(_load(folder, "nf4"), use_reentrant=use_reentrant)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
        _train_step(adapted)
        grads.append([p.grad for p in adapted.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with pytest.raises(ModelError, match="Write input_gradients=True, or use_reentrant=False"):
        prepare_for_kbit_training(tiny_llama(), use_reentrant=True, input_gradients=False)


def test_a_model_without_any_embedding_asks_at_its_first_block() -> None:
    model = Stack()
    model.tokens, model.positions = model.tokens.requires_grad_(False), None  # type: ignore[assignment]
    blocks = nn.Sequential(*model.h)
    prepare_for_kbit_training(blocks, use_reentrant=True).train()
    blocks[0].norm.weight.requires_grad_(True)
    given = torch.randn(1, 4, 16)
    blocks(given).sum().backward()
    assert blocks[0].norm.weight.grad is not None
    assert not given.requires_grad
    with pytest.raises(ModelError, match=r'Write embedding="NAME", or input_gradients=False'):
        prepare_for_kbit_training(nn.Linear(2, 2), recompute="none")
    with pytest.raises(ModelError, match="blocks: nowhere matches no module"):
        prepare_for_kbit_training(tiny_llama(), blocks="nowhere")
    with pytest.raises(ModelError, match='recompute is "none"'):
        prepare_for_kbit_training(tiny_llama(), blocks="layers", recompute="none")


def test_a_refusal_changes_nothing() -> None:
    model = tiny_llama().bfloat16()
    with pytest.raises(ModelError):
        prepare_for_kbit_training(model, blocks="nowhere")
    assert all(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())


def test_the_cache_is_off_while_training_and_on_again_after(folder: Path) -> None:
    model = prepare_for_kbit_training(_load(folder, "nf4"))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for wrapped in (model, adapted):
        assert wrapped.train()(input_ids=IDS, use_cache=True).past_key_values is None
        assert wrapped(input_ids=IDS).past_key_values is None
        assert wrapped.eval()(input_ids=IDS).past_key_values is not None
    assert model.config.use_cache


def test_a_quantized_weight_of_16bit_storage_is_not_cast(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    prepare_for_kbit_training(model)
    assert sum(p.dtype == torch.bfloat16 for p in model.parameters()) == 14
    assert {group.part for group in model.preparation_report.groups} == {"embeddings", "norms"}


def _tiny_t5() -> tuple[Any, list[str], dict[str, Any]]:
    ids = {"decoder_start_token_id": 0}
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, **ids)
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 3, dtype=torch.long)}
    return T5ForConditionalGeneration(config), ["q", "v"], batch


def _tiny_clip() -> tuple[Any, list[str], dict[str, Any]]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8}, projection_dim=8)
    batch = {"input_ids": torch.tensor([[1, 5, 2]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    return CLIPModel(config), ["q_proj", "v_proj"], batch


@pytest.mark.parametrize("make", [_tiny_t5, _tiny_clip])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_encoder_with_decoder_and_vision_with_text_train_in_both_halves(make: Any, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model, targets, batch = make()
    prepare_for_kbit_training(model, use_reentrant=use_reentrant)
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False)).train()
    output = adapted(**batch)
    outputs = [output.logits] if "logits" in output else [output.logits_per_image, output.text_embeds]
    sum(o.square().sum() for o in outputs).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in adapted.parameters() if p.requires_grad)


def _evaluate(model: Any) -> None:
    with torch.no_grad():
        model.eval()(input_ids=IDS)


def test_evaluating_a_model_that_others_loaded_does_not_stop_its_training(folder: Path) -> None:
    """bitsandbytes 0.50 repacks a 4-bit weight on CPUs with AVX512-BF16; see `keep_trainable_layout`."""
    from bitsandbytes.functional import has_avx512bf16
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)

    model = prepare_for_kbit_training(load())
    before = tensors_of(model)
    _evaluate(model)
    after = tensors_of(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    _gradients(model, "nf4", True)
    if has_avx512bf16():
        model = load()
        _evaluate(model)
        with pytest.raises(ModelError, match=r"repacked its weight for inference.*Load the model again, and prepare"):
            prepare_for_kbit_training(model)
