"""A merged model is what peft merges, and what base and adapter answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lowmem_ft.errors import ExportError
from lowmem_ft.export import merge
from lowmem_ft.export.adapter_weights import read_adapter
from lowmem_ft.export.merge import MergedWeights
from lowmem_ft.export.trained_base import Quantization
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import load_model
from lowmem_ft.model.tensor_files import TensorFiles, write_tensor_files
from tests.export.adapters import save, with_adapter, with_peft
from tests.tiny import tiny_gemma3, tiny_gpt2, tiny_llama, tiny_qwen3

PATTERNS = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"/layers.1.*up_proj/": 3.0}}
KINDS: dict[str, tuple[PreTrainedModel, dict[str, Any]]] = {
    "lora": (tiny_llama(), {"rank": 4, "alpha": 6}),
    "patterns": (tiny_llama(), {"rank": 4, **PATTERNS}),
    "rslora": (tiny_gemma3(), {"kind": "rslora", "rank": 4}),
    "dora": (tiny_qwen3(), {"kind": "dora", "rank": 4}),
    "vera": (tiny_llama(), {"kind": "vera", "rank": 8}),
    "ia3": (tiny_llama(attention_bias=True), {"kind": "ia3"}),
    "gpt2": (tiny_gpt2(), {"rank": 4, "targets": ["c_attn", "c_proj"]}),
    "gpt2 dora": (tiny_gpt2(), {"kind": "dora", "rank": 4, "targets": ["c_attn"]}),
    "gpt2 ia3": (tiny_gpt2(), {"kind": "ia3", "targets": ["c_attn"]}),
    "whole": (tiny_qwen3(), {"rank": 4, "targets": ["q_proj"], "modules_to_save": ["lm_head", "norm", "embed_tokens"]}),
    "tokens": (tiny_qwen3(), {"rank": 4, "trainable_tokens": [5, 3]}),
    "tied tokens": (tiny_llama(), {"rank": 4, "trainable_tokens": [5, 3]}),
    "head": (tiny_qwen3(), {"rank": 4, "targets": ["lm_head"]}),
}
PEFT_KINDS: dict[str, tuple[PreTrainedModel, dict[str, Any]]] = {
    "biases": (tiny_llama(attention_bias=True), {"r": 4, "target_modules": ["q_proj", "v_proj"], "bias": "all"}),
    "lora bias": (tiny_llama(attention_bias=True), {"r": 4, "target_modules": ["q_proj"], "lora_bias": True}),
    "embedding": (tiny_qwen3(), {"r": 4, "target_modules": ["embed_tokens", "lm_head"]}),
    "tied both": (tiny_llama(), {"r": 4, "target_modules": ["embed_tokens", "lm_head"]}),
    "tied head": (tiny_llama(), {"r": 4, "target_modules": ["lm_head"]}),
    "tied embedding": (tiny_llama(), {"r": 4, "target_modules": ["embed_tokens"]}),
    "tied whole": (tiny_llama(), {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "tied whole both": (
        tiny_llama(),
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}
IDS = torch.tensor([[1, 5, 3, 9, 200, 3, 17, 5, 2, 100]])


def base_of(folder: Path, model: PreTrainedModel) -> FoundModel:
    model.save_pretrained(folder)
    return FoundModel(str(folder), None, "")


def answers(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def written(weights: MergedWeights, base: FoundModel, out: Path, **changes: Any) -> PreTrainedModel:
    """As transformers loads it."""
    import json

    out.mkdir()
    write_tensor_files(out, weights.specs, weights.tensor, 200_000)
    config = json.loads((Path(base.path) / "config.json").read_text())
    config |= changes | ({"tie_word_embeddings": False} if weights.untied else {})
    (out / "config.json").write_text(json.dumps(config))
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval()


@pytest.mark.parametrize("kind", sorted({**KINDS, **PEFT_KINDS}))
def test_in_float32_it_is_what_peft_merges_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model, settings = {**KINDS, **PEFT_KINDS}[kind]
    adapted = with_adapter(model, **settings) if kind in KINDS else with_peft(model, **settings)
    base, folder = base_of(tmp_path / "base", model), save(adapted, tmp_path / "adapter")
    before, alone = answers(adapted), answers(model)
    weights = MergedWeights(base, read_adapter(folder))
    loaded = written(weights, base, tmp_path / "out")
    torch.testing.assert_close(answers(loaded), before, rtol=1e-4, atol=1e-4)
    assert (before - alone).abs().max() > 1e-2, "the adapter must do something"
    assert weights.untied == (kind in ("tied both", "tied head", "tied embedding", "tied whole"))
    merged = adapted.merge_and_unload()
    state, ours = merged.state_dict(), loaded.state_dict()
    assert state.keys() == ours.keys()
    if weights.untied:  # peft parts the two weights too; which of them, its answers above have said
        return
    different = [name for name in state if not torch.equal(state[name], ours[name])]
    assert not different


@pytest.mark.parametrize("kind", ["lora", "dora", "gpt2", "whole", "embedding", "ia3", "vera"])
def test_pieces_of_a_weight_give_the_whole(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = {**KINDS, **PEFT_KINDS}[kind]
    adapted = with_adapter(model, **settings) if kind in KINDS else with_peft(model, **settings)
    base, adapter = base_of(tmp_path / "base", model), read_adapter(save(adapted, tmp_path / "adapter"))
    whole = dict(MergedWeights(base, adapter))
    monkeypatch.setattr(merge, "PIECE_ELEMENTS", 700)
    for name, tensor in MergedWeights(base, adapter):
        torch.testing.assert_close(tensor, whole[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_float32_and_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_llama()
    adapted = with_adapter(model, rank=4)
    base, folder = base_of(tmp_path / "base", model), save(adapted, tmp_path / "adapter")
    exact = dict(MergedWeights(base, read_adapter(folder)))
    rounded = dict(MergedWeights(base, read_adapter(folder), dtype=dtype))
    assert len(rounded) == len(exact) > 10
    assert all(torch.equal(rounded[name], exact[name].to(dtype)) for name in exact)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("method", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2])
def test_the_trained_base_is_that_of_bitsandbytes_bit_for_bit(
    tmp_path: Path, family: Any, method: str, double_quant: bool
) -> None:
    from peft.utils.integrations import dequantize_module_weight

    if method == "int8" and not double_quant:
        pytest.skip("int8 has no second scales")
    base = base_of(tmp_path / "base", family())
    loaded = load_model(base, quantization=method, double_quant=double_quant, dtype="bfloat16")
    targets = {"targets": ["c_attn"]} if family is tiny_gpt2 else {}
    adapted = with_adapter(family(), rank=4, **targets)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    adapter = read_adapter(save(adapted, tmp_path / "adapter"))
    trained = Quantization(method, double_quant, "bfloat16")
    merged = dict(MergedWeights(base, adapter, dtype=torch.float32, trained=trained))
    seen = 0
    for name, module in loaded.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            expected = dequantize_module_weight(module).float()
            ours = merged[f"{name}.weight"]
            ours = ours.T if family is tiny_gpt2 else ours
            assert torch.equal(ours, expected), name
            seen += 1
        elif weight is not None and f"{name}.weight" in merged:
            assert torch.equal(merged[f"{name}.weight"], weight.float()), name
    assert seen == (8 if family is tiny_gpt2 else 14)


def test_merged_into_the_trained_base_it_answers_as_in_training(tmp_path: Path) -> None:
    model = tiny_llama()
    folder = save(with_adapter(model, rank=4), tmp_path / "adapter")
    base = base_of(tmp_path / "base", model)
    in_training = PeftModel.from_pretrained(load_model(base, quantization="nf4", dtype="float32"), str(folder)).eval()
    trained = Quantization("nf4", True, "float32")
    into_trained = written(MergedWeights(base, read_adapter(folder), trained=trained), base, tmp_path / "trained")
    into_full = written(MergedWeights(base, read_adapter(folder)), base, tmp_path / "full")
    torch.testing.assert_close(answers(into_trained), answers(in_training), rtol=1e-4, atol=1e-4)
    assert (answers(into_full) - answers(in_training)).abs().max() > 1e-2


def test_tokens_that_were_added_stay_and_the_vocabulary_grows(tmp_path: Path) -> None:
    model = tiny_qwen3()
    base = base_of(tmp_path / "base", model)
    larger = AutoModelForCausalLM.from_pretrained(base.path)
    larger.resize_token_embeddings(460, mean_resizing=False)
    adapted = with_peft(larger, r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    weights = MergedWeights(base, read_adapter(save(adapted, tmp_path / "adapter")))
    assert weights.vocabulary == 460
    loaded = written(weights, base, tmp_path / "out", vocab_size=460)
    torch.testing.assert_close(answers(loaded), answers(adapted), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_the_base_is_listed(tmp_path: Path) -> None:
    folder = save(with_adapter(tiny_llama(), rank=4, targets=["q_proj", "down_proj"]), tmp_path / "adapter")
    other = base_of(tmp_path / "other", tiny_llama(intermediate_size=96))
    with pytest.raises(ExportError) as caught:
        MergedWeights(other, read_adapter(folder))
    assert len(caught.value.problems) == 3
    assert "layers.0.mlp.down_proj.weight as 64x128, and in the base it is 64x96" in str(caught.value)
    shallow = base_of(tmp_path / "shallow", tiny_llama(num_hidden_layers=1))
    with pytest.raises(ExportError, match=r"changes model\.layers\.1\.mlp\.down_proj\.weight, and the base has no"):
        MergedWeights(shallow, read_adapter(folder))


def test_a_base_in_packed_weights_is_refused(tmp_path: Path) -> None:
    folder = save(with_adapter(tiny_llama(), rank=4), tmp_path / "adapter")
    base = base_of(tmp_path / "base", tiny_llama())
    load_model(base, quantization="nf4").save_pretrained(tmp_path / "packed")
    with pytest.raises(ExportError, match="is stored in bitsandbytes"):
        MergedWeights(FoundModel(str(tmp_path / "packed"), None, ""), read_adapter(folder))


def test_tensors_come_in_the_order_of_the_base(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", tiny_llama())
    weights = MergedWeights(base, read_adapter(save(with_adapter(tiny_llama(), rank=4), tmp_path / "adapter")))
    assert [name for name, _ in weights] == [spec.name for spec in weights.specs] == list(TensorFiles(Path(base.path)))
    assert weights.changed == 14
