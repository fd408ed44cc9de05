"""A merged folder is whole, is loaded by transformers in a fresh process, or is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_ft.errors import ExportError
from lowmem_ft.export.merged_folder import RECORD, Merged, MergeRequest, merge
from lowmem_ft.export.subject import find_subject
from lowmem_ft.export.trained_base import Quantization
from lowmem_ft.model.base_record import FILE, record_base
from lowmem_ft.model.find import FoundModel
from tests.export.adapters import save, with_adapter, with_peft
from tests.tiny import save_tiny_model, tiny_llama

IDS = torch.tensor([[1, 5, 3, 9, 200, 3, 17]])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return adapter_in(tmp_path, with_adapter(tiny_llama(), rank=4))


def adapter_in(folder: Path, adapted: Any) -> Path:
    base = save_tiny_model(folder / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    record = record_base(
        FoundModel(str(base), None, ""), model=str(base), quantization="nf4", double_quant=True, dtype="bfloat16",
        precision="bf16",
    )  # fmt: skip
    saved = save(adapted, folder / "adapter")
    (saved / FILE).write_text(record.text())
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(saved)
    (saved / "chat_template.jinja").write_text("{{ messages[0].content }} of the training")
    return saved


def merged(adapter: Path, out: Path, **options: Any) -> Merged:
    return merge(MergeRequest(find_subject(adapter), out, **options), lambda folder: {"seen": folder.name})


def test_a_fresh_process_loads_it_with_tokenizer_and_template(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = merged(adapter, out, dtype="bfloat16", shard_bytes=100_000)
    assert (result.tensors, result.changed, result.dtype) == (20, 14, "bfloat16")
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        f"m, t = M.from_pretrained({str(out)!r}), T.from_pretrained({str(out)!r})\n"
        "print(m.dtype, m.generation_config.eos_token_id, len(t) > 10)\n"
        "print(t.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False))\n"
        f"torch.save(m(torch.tensor({IDS.tolist()})).logits.float(), {str(tmp_path / 'logits')!r})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["torch.bfloat16 2 True", "x of the training"]
    with torch.no_grad():
        expected = with_adapter(tiny_llama(), rank=4)(IDS).logits
    assert (torch.load(tmp_path / "logits") - expected).abs().max() < 0.02 * expected.abs().max()
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out"]
    assert len(list(out.glob("*.safetensors"))) > 1
    assert json.loads((out / RECORD).read_text())["proof"] == {"seen": ".out.part"}
    assert not list(out.glob("adapter*"))


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float32"])
def test_the_type_that_was_asked_for_is_stated(adapter: Path, tmp_path: Path, dtype: str | None) -> None:
    merged(adapter, tmp_path / "out", dtype=dtype)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == (dtype or "float32")
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype) == f"torch.{dtype or 'float32'}"


def test_both_bases_are_offered_and_differ(adapter: Path, tmp_path: Path) -> None:
    merged(adapter, tmp_path / "full")
    result = merged(adapter, tmp_path / "trained", base="trained")
    assert "nf4 in bfloat16, double quantization" in result.notes[0]
    assert "as trained" in json.loads((tmp_path / "trained" / RECORD).read_text())["into"]
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name)(IDS).logits for name in ("full", "trained"))
    assert (first - second).abs().max() > 1e-3


def test_a_training_that_is_not_known_must_be_named(adapter: Path, tmp_path: Path) -> None:
    (adapter / FILE).unlink()
    base = str(tmp_path / "base")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    with pytest.raises(ExportError, match="Write --quantization nf4, or --base full"):
        merged(adapter, tmp_path / "out", base="trained")
    named = find_subject(adapter, quantization="nf4")
    assert named.quantization == Quantization("nf4", True, "bfloat16")
    merge(MergeRequest(named, tmp_path / "out", base="trained"), lambda _: {})


def test_a_head_that_parts_from_the_embedding_is_said_and_stated(tmp_path: Path) -> None:
    folder = adapter_in(tmp_path, with_peft(tiny_llama(), r=4, target_modules=["lm_head"]))
    result = merged(folder, tmp_path / "out")
    assert "no longer do" in result.notes[0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_what_is_not_proven_is_not_left(adapter: Path, tmp_path: Path) -> None:
    def refuse(folder: Path) -> dict[str, Any]:
        assert (folder / "model.safetensors").exists()
        raise ExportError("it is not what was trained")

    with pytest.raises(ExportError, match="not what was trained"):
        merge(MergeRequest(find_subject(adapter), tmp_path / "out"), refuse)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_folder_that_is_there_is_not_written_over(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="is there already"):
        merged(adapter, tmp_path / "out")
    with pytest.raises(ExportError, match="nothing to merge"):
        merged(tmp_path / "base", tmp_path / "other")


def test_a_changed_base_is_merged_only_by_force(adapter: Path, tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight += 1
    save_tiny_model(tmp_path / "base", model)
    with pytest.raises(ExportError, match=r"model\.norm\.weight has other values"):
        merged(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merged(adapter, tmp_path / "out", force=True)
