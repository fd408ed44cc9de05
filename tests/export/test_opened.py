"""What is opened answers as it did in training, or in float32 on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lowmem_ft.errors import ExportError
from lowmem_ft.export.opened import open_subject
from lowmem_ft.export.subject import find_subject
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import load_model
from tests.export.adapters import with_adapter
from tests.export.trained import trained_in
from tests.tiny import tiny_llama

IDS = torch.tensor([[1, 5, 3, 9, 200, 3, 17]])


def test_the_base_is_quantized_as_in_training(tmp_path: Path) -> None:
    adapter = trained_in(tmp_path, precision="bf16")
    opened = open_subject(find_subject(adapter))
    base = load_model(FoundModel(str(tmp_path / "base"), None, ""), quantization="nf4", dtype="bfloat16")
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(IDS).logits
        with model.disable_adapter():
            alone = model(IDS).logits
    with opened.running():
        assert torch.equal(opened.model(IDS).logits, expected)
    with opened.running(adapter=False):
        assert torch.equal(opened.model(IDS).logits, alone)
    assert opened.has_adapter
    assert not torch.equal(expected, alone)


def test_exact_products_differ_from_training_by_rounding_only(tmp_path: Path) -> None:
    subject = find_subject(trained_in(tmp_path))
    trained, stored = (open_subject(subject, as_trained=flag, exact=True) for flag in (True, False))
    assert all(p.dtype in (torch.float32, torch.uint8) for p in trained.model.parameters())
    with trained.running():
        first = trained.model(IDS).logits
    with stored.running():
        second = stored.model(IDS).logits
        torch.testing.assert_close(second, with_adapter(tiny_llama(), rank=4)(IDS).logits, rtol=1e-4, atol=1e-4)
    assert first.dtype == second.dtype == torch.float32
    assert 1e-2 < (first - second).abs().max() < 3


def test_a_model_is_opened_in_the_type_that_it_states(tmp_path: Path) -> None:
    trained_in(tmp_path, model=tiny_llama().to(torch.bfloat16))
    opened = open_subject(find_subject(tmp_path / "base"))
    assert (opened.model.dtype, opened.has_adapter) == (torch.bfloat16, False)
    assert open_subject(find_subject(tmp_path / "base"), exact=True).model.dtype == torch.float32


def test_an_adapter_of_another_base_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    adapter = trained_in(tmp_path)
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    del tensors[sorted(tensors)[0]]
    save_file(tensors, weights)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ExportError, match=r"lacks base_model.*lora_A\.weight"):
        open_subject(find_subject(adapter))


def test_a_checkpoint_has_the_tokenizer_of_its_base_and_the_template_of_its_recipe(tmp_path: Path) -> None:
    adapter = trained_in(tmp_path)
    recipe = {
        "model": {"path": str(tmp_path / "base"), "quantization": "none", "dtype": "float32"},
        "data": {"train": "t.jsonl", "template": "plain"},
        "train": {"precision": "fp32"},
    }
    (adapter / "state.json").write_text(json.dumps({"recipe": recipe}))
    subject = find_subject(adapter)
    assert (subject.kind, subject.tokenizer, subject.template) == ("checkpoint", None, "plain")
    opened = open_subject(subject)
    assert opened.encoder.template_text != (adapter / "chat_template.jinja").read_text()
    assert opened.autocast is None
