"""What is printed before and after a run."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console

from lowmem_ft.data.audit import Audit
from lowmem_ft.data.batches import Batch
from lowmem_ft.memory.measure import MemoryMeter, PhasePeak
from lowmem_ft.model.adapters import AdapterReport
from lowmem_ft.model.kbit import PreparationReport
from lowmem_ft.model.load import BytesByPart
from lowmem_ft.recipe.data_section import DataSection
from lowmem_ft.recipe.schema import ModelSection, Recipe
from lowmem_ft.report.header import print_end, print_header
from lowmem_ft.report.progress import Display
from tests.report.test_summary import split_audit

BYTES = BytesByPart(1000, 500, 0, 200, 10, 9000, ("model.wpe.weight",), True)


def _header(batch: Batch) -> list[str]:
    out = io.StringIO()
    recipe = Recipe(name="mine", model=ModelSection(path="m"), data=DataSection(train="t"))
    audit = Audit(split_audit(), None, 0, "", "")
    adapters = AdapterReport({"q_proj": 2}, 1000, 4000)
    preparation = PreparationReport("all", (), 9000, "block", True)
    print_header(Display(Console(file=out)), recipe, BYTES, preparation, adapters, audit, batch)
    return out.getvalue().splitlines()


def test_the_header_is_four_lines_under_the_name() -> None:
    lines = _header(Batch(16, 2.0, 1024, 57, 1.0, 1, None))
    assert lines[0] == "mine"
    assert [line.split()[0] for line in lines[1:5]] == ["model", "trains", "data", "batch"]
    assert "nf4 with double quantization: 1.67 KiB" in lines[1]
    assert "linears that stayed unquantized 200 B" in lines[1]
    assert lines[5:] == [
        "  unquantized by design: embeddings, output head, norms; so do model.wpe.weight, which nf4 does not cover"
    ]


def test_what_a_user_would_wonder_about_is_said() -> None:
    lines = _header(Batch(16, 16.0, 256, 57, 1.0, 1, "the model is an encoder-decoder"))
    assert "  each example has a row of its own: the model is an encoder-decoder" in lines
    assert "  the longest example has 300 tokens, and is a micro-batch by itself" in lines


def test_the_end_says_what_came_of_it_and_what_to_type_next(tmp_path: Path) -> None:
    out = io.StringIO()
    meter = MemoryMeter(torch.device("cpu"), [PhasePeak("load", 2**30, 0), PhasePeak("training", 2**40, 0)])
    kept = [("adapter", tmp_path), ("checkpoints", tmp_path / "none")]
    scores = {"exact_match": [0.0, 0.96], "rouge_l": [0.125, 0.3, 0.98765], "late": [0.5]}
    print_end(Display(Console(file=out)), Path("runs/x"), kept, [2.5, 1.0, 0.5], scores, 50, meter)
    text = out.getvalue()
    assert f"adapter                     {tmp_path}" in text
    assert "checkpoints" not in text
    assert "2.5000 before, 0.5000 after" in text
    assert "0% before, 96% after, of 50 held-out prompts" in text
    assert "0.125 before, 0.9877 after, on 50 held-out prompts" in text
    assert "late" not in text
    assert "1.00 TiB (load 1.00 GiB, training 1.00 TiB)" in text
    assert text.rstrip().endswith('lowmem-ft generate runs/x "your prompt"')
