"""A model without numbers against the loaded one: the same layers, types and bytes, and a step that can be run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lowmem_ft.memory.tracking import TensorTracker, tensors_of
from lowmem_ft.model.facts import make_empty_model
from lowmem_ft.model.fake import make_fake, quantize_empty
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import count_bytes, load_model
from tests.tiny import FAMILIES, save_tiny_model, tiny_gemma3, tiny_llama


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", False), ("int8", True), ("none", True)])
def test_bytes_and_layers_are_those_of_the_loaded_model(tmp_path: Path, family: str, kind: str, double: bool) -> None:
    found = FoundModel(str(save_tiny_model(tmp_path / "m", FAMILIES[family]())), None, "")
    loaded = load_model(found, quantization=kind, double_quant=double)
    fake = quantize_empty(make_empty_model(found, "bfloat16"), kind, double, torch.bfloat16)
    make_fake(fake, FakeTensorMode())
    assert count_bytes(fake) == count_bytes(loaded)
    assert [type(m) for m in fake.modules()] == [type(m) for m in loaded.modules()]
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors_of(fake))
    shapes = {name: (p.shape, p.dtype) for name, p in loaded.named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in fake.named_parameters()} == shapes
    held = []
    for model in (loaded, fake):
        with TensorTracker() as tracker:
            held.append(tracker.hold(tensors_of(model)))
    assert held[0] == held[1] > 0


def test_what_is_tied_stays_tied(tmp_path: Path) -> None:
    found = FoundModel(str(save_tiny_model(tmp_path / "m", tiny_llama(tie_word_embeddings=True))), None, "")
    fake = make_empty_model(found, "bfloat16")
    make_fake(fake, FakeTensorMode())
    assert fake.get_output_embeddings().weight is fake.get_input_embeddings().weight


@pytest.mark.parametrize("kind", ["nf4", "int8", "none"])
def test_its_step_can_be_run(tmp_path: Path, kind: str) -> None:
    found = FoundModel(str(save_tiny_model(tmp_path / "m")), None, "")
    fake = quantize_empty(make_empty_model(found, "bfloat16"), kind, True, torch.bfloat16)
    mode = FakeTensorMode()
    make_fake(fake, mode)
    with mode, torch.no_grad():
        logits = fake(input_ids=torch.zeros(1, 20, dtype=torch.int64), use_cache=False).logits
    assert isinstance(logits, FakeTensor)
    assert logits.shape == (1, 20, fake.config.vocab_size)


def test_other_numbers_of_blocks_keep_their_kinds_in_order(tmp_path: Path) -> None:
    found = FoundModel(str(save_tiny_model(tmp_path / "m", tiny_gemma3(num_hidden_layers=3))), None, "")
    model = make_empty_model(found, "bfloat16", layers=7)
    assert len(model.model.layers) == 7
    sliding, full = "sliding_attention", "full_attention"
    assert model.config.layer_types == [sliding, full, sliding, sliding, full, sliding, sliding]
