"""Quantized loading on CPU: what is packed, what is not, and that it can be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_ft.errors import ModelError
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import BytesByPart, count_bytes, load_model
from lowmem_ft.model.packed import is_packed
from tests.tiny import save_tiny_model, tiny_gpt2, tiny_llama

KINDS = ["nf4", "fp4", "int8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tiny_llama())


def _load(folder: Path, **changes: Any) -> Any:
    return load_model(FoundModel(str(folder), None, ""), **{"dtype": "bfloat16", **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_but_the_head_is_packed_and_nothing_else(folder: Path, kind: str) -> None:
    model = _load(folder, quantization=kind)
    packed = {name for name, p in model.named_parameters() if is_packed(p)}
    linears = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    assert packed == linears
    assert len(packed) == 14  # 7 in each of two layers
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_layers_pass_gradients_to_their_input(folder: Path, kind: str) -> None:
    model = _load(folder, quantization=kind).train()
    embedded = model.model.embed_tokens(torch.arange(3, 11)[None]).detach().requires_grad_()
    model(inputs_embeds=embedded, use_cache=False).logits.float().square().mean().backward()
    assert embedded.grad is not None
    assert embedded.grad.isfinite().all()
    assert embedded.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_generating_in_between_does_not_cut_the_gradient(folder: Path, kind: str) -> None:
    """bitsandbytes repacks 4-bit weights for inference on some CPUs, and does not pack them back for training."""
    model = _load(folder, quantization=kind)
    ids = torch.arange(3, 11)[None]

    def gradient() -> torch.Tensor:
        embedded = model.train().model.embed_tokens(ids).detach().requires_grad_()
        model(inputs_embeds=embedded, use_cache=False).logits.float().square().mean().backward()
        assert embedded.grad is not None
        return embedded.grad

    before = gradient()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(gradient(), before)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_bytes_by_part_add_up_and_shrink_with_bits(folder: Path) -> None:
    sizes: dict[str, BytesByPart] = {}
    for kind in ("none", *KINDS):
        model = _load(folder, quantization=kind)
        sizes[kind] = by_part = count_bytes(model)
        stored = sum(p.numel() * p.element_size() for p in model.parameters())
        assert by_part.total >= stored  # scales come on top
        assert by_part.tied
        assert by_part.head == 0
        assert by_part.embeddings == 448 * 64 * 2
    assert sizes["none"].quantized == 0
    assert sizes["nf4"].quantized < sizes["int8"].quantized < sizes["none"].total
    assert len({by_part.parameters for by_part in sizes.values()}) == 1


def test_double_quantization_makes_scales_smaller(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", tiny_llama(hidden_size=128, intermediate_size=512))
    with_it, without = (count_bytes(_load(folder, quantization="nf4", double_quant=b)).quantized for b in (True, False))
    assert with_it < without


def test_untied_heads_and_gpt2_layers_are_told_apart(tmp_path: Path) -> None:
    untied = count_bytes(
        _load(save_tiny_model(tmp_path / "a", tiny_llama(tie_word_embeddings=False)), quantization="nf4")
    )
    assert untied.head == untied.embeddings == 448 * 64 * 2
    assert not untied.tied
    gpt2 = _load(save_tiny_model(tmp_path / "b", tiny_gpt2()), quantization="nf4")
    assert sum(is_packed(p) for p in gpt2.parameters()) == 8
    assert count_bytes(gpt2).unquantized_names == ("transformer.wpe.weight",)


def test_a_model_that_is_quantized_already_is_not_quantized_again(tmp_path: Path, folder: Path) -> None:
    _load(folder, quantization="nf4").save_pretrained(tmp_path / "packed")
    with pytest.raises(
        ModelError, match=r"is quantized already \(bitsandbytes\), and model.quantization asks for int8"
    ):
        _load(tmp_path / "packed", quantization="int8")
    assert count_bytes(_load(tmp_path / "packed", quantization="none")).quantized > 0


def test_folders_that_cannot_be_loaded_say_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(ModelError, match="transformers cannot load it"):
        _load(tmp_path)
