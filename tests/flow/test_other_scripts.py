"""Our helpers in other people's scripts: those of README.md as they stand there, and two processes against one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowmem_ft import prepare_for_kbit_training
from tests.flow import two_processes
from tests.tiny import save_tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = {
    "plain": "class PackedLoss",
    "accelerate": "from accelerate import",
    "trainer": "from transformers import Trainer",
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
}
# TRL 1.16 sets arguments of transformers 5.24 by the names that go in v6
TRL_OLD_NAMES = pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning")
FP32 = {"torch.bfloat16": "torch.float32"}
ADAPTERS_TO_FP32 = "        parameter.data = parameter.data.float()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("scripts") / "model")


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def blocks() -> dict[str, str]:
    """The Python blocks of the README's section, by what they show; `start` is the one they all begin with."""
    section = (ROOT / "README.md").read_text("utf-8").split("## In your own script")[1].split("\n## ")[0]
    first, *others = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    found = {kind: block for block in others for kind, mark in KINDS.items() if mark in block}
    assert len(found) == len(others) == len(KINDS)
    return {"start": first, **found}


def script(kind: str, model: Path, out: Path, changes: dict[str, str] | None = None) -> str:
    """A script of the README on a tiny model: names and learning rate replaced, nothing else unless `changes` says."""
    parts = blocks()
    text = parts["start"] + "\ntorch.manual_seed(5)\n"
    if kind == "accelerate":
        text += parts["plain"].split("\n\n\n")[0] + "\n"  # the class
    text += parts[kind]
    replaced = {'"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(str(model)), '"out"': repr(str(out)), "2e-4": "1e-2"}
    for old, new in {**replaced, **(changes or {})}.items():
        assert old in text
        text = text.replace(old, new)
    return text


def run_here(text: str) -> dict[str, Any]:
    """Execute a script; its names."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "script of README.md", "exec"), names)
    return names


def base_weights(model: Any) -> dict[str, Tensor]:
    """All that is not an adapter, under the names that the model had before it got one."""
    found = {}
    for name, tensor in model.state_dict().items():
        if "lora_" not in name:
            found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = tensor
    return found


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4, dtype=dtype)


def check_result(folder: Path, out: Path, trained: Any) -> None:
    """The base is what was loaded, and base with saved adapter answers as what was trained."""
    fresh = load(folder)
    for name, tensor in base_weights(fresh).items():
        now = base_weights(trained)[name]
        assert torch.equal(now, tensor.to(now.dtype)), name
    reloaded = PeftModel.from_pretrained(prepare_for_kbit_training(fresh), out).train()
    ids = torch.arange(3, 19)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = trained.train()(input_ids=ids, use_cache=False).logits
        assert torch.equal(ours, reloaded(input_ids=ids, use_cache=False).logits)
        with reloaded.disable_adapter():
            assert not torch.equal(ours, reloaded(input_ids=ids, use_cache=False).logits)


def test_a_plain_loop_learns_and_saves_what_it_learned(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_here(script("plain", folder, tmp_path / "out"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    check_result(folder, tmp_path / "out", names["adapted"])


@TRL_OLD_NAMES
@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo"])
def test_a_trainer_learns_and_saves_what_it_learned(kind: str, folder: Path, tmp_path: Path) -> None:
    names = run_here(script(kind, folder, tmp_path / "out"))
    trainer = names["trainer"]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    check_result(folder, tmp_path / "out", trainer.model)


def test_trainer_with_our_loss_reports_the_losses_of_its_own_also_with_gradient_accumulation(
    folder: Path, tmp_path: Path
) -> None:
    """In fp32 from the same start; the two texts differ in length, so a mean of means would be another number."""
    ours, theirs = ", compute_loss_func=loss_of", ', "output_hidden_states": True, "logits_to_keep": 1'
    plain = {**FP32, '"bf16": True, ': "", "2e-4": "1e-3"}
    one_by_one = {"max_steps": "per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps"}
    losses = []
    for number, changes in enumerate([{}, {ours: "", theirs: ""}, one_by_one]):
        names = run_here(script("trainer", folder, tmp_path / str(number), {**plain, **changes}))
        losses.append([line["loss"] for line in names["trainer"].state.log_history if "loss" in line])
    first, *others = losses
    assert len(first) == 4
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)


def test_evaluating_between_steps_changes_neither_losses_nor_base(folder: Path, tmp_path: Path) -> None:
    often = {"train_dataset=texts": "train_dataset=texts, eval_dataset=texts"}
    often["max_steps=4"] = "max_steps=4, eval_strategy='steps', eval_steps=1"
    losses = []
    for number, changes in enumerate([{}, often]):
        names = run_here(script("trainer", folder, tmp_path / str(number), changes))
        losses.append([line["loss"] for line in names["trainer"].state.log_history if "loss" in line])
    assert losses[0] == losses[1]
    check_result(folder, tmp_path / "1", names["adapted"])


@TRL_OLD_NAMES
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_neither_undoes_nor_repeats_the_preparation(kind: str, folder: Path, tmp_path: Path) -> None:
    model = run_here(script(kind, folder, tmp_path / "out"))["trainer"].model.train()
    for name, parameter in model.named_parameters():
        packed = not parameter.is_floating_point()
        assert parameter.requires_grad == ("lora_" in name), name
        assert packed or parameter.dtype == torch.float32, name
    calls = []
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda module, args: calls.append(args[0].requires_grad))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=torch.arange(3, 19)[None], labels=torch.arange(3, 19)[None], use_cache=False).loss
    loss.backward()
    assert calls == [True, True]  # forward, and recomputed once in backward: one checkpoint, non-reentrant


@TRL_OLD_NAMES
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_puts_adapters_into_bf16_unless_taken_back(kind: str, folder: Path, tmp_path: Path) -> None:
    """When this fails, the loop in the README's TRL scripts can go."""
    text = script(kind, folder, tmp_path / "out", {ADAPTERS_TO_FP32: "        pass"})
    model = run_here(text.replace("trainer.train()", "").replace("trainer.save_model", "str"))["trainer"].model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}, trl.__version__


def start_two(*arguments: str) -> None:
    """Two processes of one thread each, which sum over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    assert first
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture(scope="module")
def of_two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What each process of `two_processes` ended with, and where the first saved it."""
    out = tmp_path_factory.mktemp("two")
    start_two("-m", "tests.flow.two_processes", str(folder), str(out))
    return out, [torch.load(out / f"process-{index}.pt") for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*two_processes.EXAMPLES, "sometimes_used"])
def test_two_processes_make_the_step_of_one(name: str, folder: Path, of_two: Any) -> None:
    """Labels 1 against 28 an example; no example for one in the last step; 2 micro-batches against 1; weights that one
    process does not call, or none.
    """
    both = [process[name] for process in of_two[1]]
    one = two_processes.train(name, folder, Accelerator(cpu=True))
    for process in both:
        # three steps of fp32 sums in another order; each step moves a parameter by up to 2e-4
        assert largest_difference(one["parameters"], process["parameters"]) < 1e-6
        assert process["base_unchanged"]
        for step, reference in zip(process["steps"], one["steps"], strict=True):
            assert step["loss"] == pytest.approx(reference["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
            assert step["trained_tokens"] == reference["trained_tokens"]
    assert largest_difference(both[0]["parameters"], both[1]["parameters"]) == 0.0
    rows = [process["steps"][0]["micro_batches"] for process in both]
    assert rows == two_processes.ROWS_OF_FIRST_STEP.get(name, [2, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", two_processes.EXAMPLES)
def test_what_two_processes_saved_answers_as_what_they_trained(name: str, folder: Path, of_two: Any) -> None:
    saved, both = of_two
    model = PeftModel.from_pretrained(load(folder, torch.float32), saved / name)
    trained = both[0][name]["parameters"]
    now = {f"model.{key}": p for key, p in model.named_parameters() if "lora_" in key}
    assert largest_difference(trained, now) == 0.0  # so are the logits: the base is bit-identical


@pytest.mark.slow
def test_the_accelerate_script_gives_in_two_processes_what_it_gives_in_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # at this rate AdamW does not blow the order of fp32 sums up
    changes = {**FP32, 'mixed_precision="bf16"': 'mixed_precision="no"', "2e-4": "5e-4"}
    run_here(script("accelerate", folder, tmp_path / "one", changes))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    (tmp_path / "script.py").write_text(script("accelerate", folder, tmp_path / "two", changes))
    start_two(str(tmp_path / "script.py"))
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert largest_difference(one, two) < 1e-6


def test_the_accelerate_script_saves_what_it_learned(folder: Path, tmp_path: Path) -> None:
    names = run_here(script("accelerate", folder, tmp_path / "out"))
    check_result(folder, tmp_path / "out", names["adapted"])
