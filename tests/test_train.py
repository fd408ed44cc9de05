"""The main command, as its user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from lowmem_ft.train import main
from tests.flow.recipes import write_run
from tests.tiny import tiny_llama


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_run_leaves_a_folder_that_peft_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path / "work"))]) == 0
    run = tmp_path / "work" / "runs" / "tiny"
    names = sorted(path.name for path in run.iterdir())
    assert names == [
        "adapter", "answers-000000.jsonl", "answers-000004.jsonl", "base.json", "checkpoints", "environment.json",
        "memory.jsonl", "metrics.jsonl", "recipe.yaml",
    ]  # fmt: skip
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "loss" in m] == [1, 2, 3, 4]
    assert [m["step"] for m in metrics if "eval_loss" in m] == [0, 2, 4]
    assert [m["prompts"] for m in metrics if "exact_match" in m] == [3, 3]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    phases = [json.loads(line)["phase"] for line in (run / "memory.jsonl").read_text().splitlines()]
    assert phases == ["data", "load", "evaluation before", "training", "evaluation after"]
    model = PeftModel.from_pretrained(tiny_llama(), run / "adapter")
    trained = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    assert len(trained) == 14
    assert all(p.abs().sum() > 0 for p in trained.values())
    out, err = capsys.readouterr()
    assert err == ""
    assert "4 steps" in out
    assert f"lowmem-ft generate {run}" in out


def test_two_runs_of_a_recipe_are_bit_identical(tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "work")
    assert main([str(recipe)]) == main([str(recipe)]) == 0
    first, second = (tmp_path / "work" / "runs" / name for name in ("tiny", "tiny-2"))
    files = [run / "adapter" / "adapter_model.safetensors" for run in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_micro_batch_packing_and_recompute_do_not_change_what_is_learned(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    recipe = write_run(tmp_path / "work")
    knobs = [
        [],
        ["train.micro_batch_tokens=1"],
        ["data.packing=false"],
        ["memory.recompute=none", "memory.loss_chunk_tokens=3"],
    ]
    adapters = []
    for number, overrides in enumerate(knobs):
        out = tmp_path / f"out{number}"
        # the default rate: Adam makes a whole step of any tiny gradient, so noise shows at the size of the rate
        settings = ["train.precision=fp32", "model.dtype=float32", "train.steps=2", "train.lr=2e-4"]
        assert main([str(recipe), f"output={out}", *settings, *overrides]) == 0
        adapters.append(load_file(out / "adapter" / "adapter_model.safetensors"))
    for other in adapters[1:]:
        assert max(float((adapters[0][name] - other[name]).abs().max()) for name in adapters[0]) < 1e-6


@pytest.mark.parametrize("held_out", [True, False])
def test_every_module_is_in_training_mode_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    """Dropout and recompute depend on it, and a loaded model begins in evaluation mode."""
    from lowmem_ft.training import loop

    modes: list[set[bool]] = []
    plain = loop.train_step

    def watched(accelerator: Any, model: Any, *rest: Any) -> Any:
        modes.append({module.training for module in model.modules()})
        return plain(accelerator, model, *rest)

    monkeypatch.setattr(loop, "train_step", watched)
    overrides = [] if held_out else ["data.eval=null", "eval=null"]
    assert main([str(write_run(tmp_path / "work")), *overrides]) == 0
    assert modes == [{True}] * 4


def test_dropout_is_on_without_held_out_data(tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "work")
    adapters = []
    for dropout in (0.0, 0.5):
        out = tmp_path / f"out{dropout}"
        assert main([str(recipe), f"output={out}", "data.eval=null", "eval=null", f"adapter.dropout={dropout}"]) == 0
        adapters.append((out / "adapter" / "adapter_model.safetensors").read_bytes())
    assert adapters[0] != adapters[1]


def test_a_dry_run_reads_no_weight_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path / "work")
    (tmp_path / "work" / "model" / "model.safetensors").write_bytes(b"no weights")
    assert main([str(recipe), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "micro_batch_tokens: 128" in out
    assert "trains  lora rank 4" in out
    assert out.rstrip().endswith("dry run: no weight was read, nothing was trained")
    assert not (tmp_path / "work" / "runs").exists()


def test_the_header_of_a_dry_run_is_that_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path / "work")
    headers = []
    for arguments in (["--dry-run"], []):
        main([str(recipe), *arguments])
        lines = capsys.readouterr().out.splitlines()
        start = lines.index("tiny")
        headers.append(lines[start : start + 6])
    assert headers[0][2:] == headers[1][2:]  # bytes of tiny nf4 layers are mostly code tables, which are not predicted
    assert [line.split()[0] for line in headers[1][1:5]] == ["model", "trains", "data", "batch"]


def test_a_wrong_recipe_ends_with_code_2_before_torch_is_imported(tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "work")
    program = (
        "import sys; from lowmem_ft.train import main; "
        f"code = main([{str(recipe)!r}, 'train.lr=fast', 'trian.epochs=2']); print(code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout == "2 False\n", result.stderr
    assert "command line: train.lr=fast" in result.stderr
    assert "trian" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can do fp16")
def test_fp16_without_a_gpu_is_refused_with_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path / "work")
    recipe.write_text(recipe.read_text().replace("lr: 1e-3,", "precision: fp16,"))
    assert main([str(recipe)]) == 2
    assert "mine.yaml line 10: train.precision: fp16 needs loss scaling on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "code", "words"),
    [
        ('{"messages": [{"role": "user", "content": "hi"}]}', 3, "0 of 1 examples left"),
        ('{"messages": [{"role": "user", "content": ', 3, "train.jsonl line 1"),
    ],
)
def test_data_that_cannot_be_trained_on_ends_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str, code: int, words: str
) -> None:
    recipe = write_run(tmp_path / "work")
    (tmp_path / "work" / "train.jsonl").write_text(record + "\n")
    (tmp_path / "work" / "model" / "model.safetensors").write_bytes(b"no weights")
    assert main([str(recipe)]) == code
    assert words in capsys.readouterr().err


def test_a_target_that_matches_nothing_ends_with_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path / "work")), "adapter.targets=[q_porj]"]) == 4
    assert "q_porj matches no linear layer. Write q_proj" in capsys.readouterr().err
