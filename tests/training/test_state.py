"""What is saved is all there is: a run resumed after any step ends as one that was never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from lowmem_ft.errors import CheckpointError
from lowmem_ft.model.adapters import AdapterSettings, add_adapters
from lowmem_ft.training.checkpoint import Checkpoints
from lowmem_ft.training.optim import make_optimizer, make_schedule
from lowmem_ft.training.optim_state import state_tensors
from lowmem_ft.training.prove import compare_checkpoints
from lowmem_ft.training.state import ADAPTER, BESIDE_TENSORS_BYTES, OPTIMIZER, Live, read_state
from tests.tiny import tiny_llama
from tests.training.small_run import STEPS, SmallRun, equal


@pytest.fixture(scope="module", params=["adamw", "adamw_8bit"])
def unbroken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallRun, Checkpoints]:
    store = Checkpoints(tmp_path_factory.mktemp("unbroken"), keep=STEPS + 1)
    run = SmallRun(request.param)
    run.save(store, 0)
    run.run(1, STEPS, store)
    return run, store


@pytest.mark.parametrize("k", range(STEPS + 1))
def test_resumed_after_step_k_it_ends_bit_for_bit_as_if_never_stopped(
    unbroken: tuple[SmallRun, Checkpoints], k: int, tmp_path: Path
) -> None:
    whole, store = unbroken
    fresh = SmallRun(whole.optimizer_kind)
    assert fresh.resume(store.path(k)) == k
    assert equal(fresh.weights(), whole.weights()) == (k == STEPS)
    fresh.run(k + 1, STEPS)
    assert equal(fresh.weights(), whole.weights())
    assert fresh.results == whole.results[k:]
    last = fresh.save(Checkpoints(tmp_path, 1), STEPS)
    tensors, differences = compare_checkpoints(store.path(STEPS), last)
    assert differences == []
    assert tensors == (14 * 4 if whole.optimizer_kind == "adamw" else 14 * 5 + 2)  # the two code tables once


def test_dropout_and_several_micro_batches_were_at_work(unbroken: tuple[SmallRun, Checkpoints]) -> None:
    whole, _ = unbroken
    assert max(result.micro_batches for result in whole.results) > 1
    other = SmallRun(whole.optimizer_kind, dropout=0.0)
    other.run(1, 2)
    assert [r.loss for r in other.results] != [r.loss for r in whole.results[:2]]
    kept = {tensor.dtype for tensor in state_tensors(whole.optimizer)[0].values()}
    assert (torch.uint8 in kept) == (whole.optimizer_kind == "adamw_8bit")
    assert all(p.numel() >= 4096 for p in whole.weights().values())


def test_a_checkpoint_is_adapter_and_optimizer_and_less_than_a_megabyte(
    unbroken: tuple[SmallRun, Checkpoints],
) -> None:
    whole, store = unbroken
    files = {path.name: path.stat().st_size for path in store.path(STEPS).iterdir()}
    assert sorted(files) == [
        "adapter_config.json", ADAPTER, "manifest.json", OPTIMIZER, "state.json",
    ]  # fmt: skip
    tensors = [*whole.weights().values(), *state_tensors(whole.optimizer)[0].values()]
    assert sum(files.values()) <= sum(t.numel() * t.element_size() for t in tensors) + 100_000
    assert sum(files.values()) <= whole.live.needed_bytes()
    assert BESIDE_TENSORS_BYTES == 1_000_000


def test_nothing_is_pickled(unbroken: tuple[SmallRun, Checkpoints], monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    whole, store = unbroken
    whole.save(store, STEPS)
    SmallRun(whole.optimizer_kind).resume(store.path(STEPS))


def test_another_micro_batch_gives_the_same_up_to_summation_order(tmp_path: Path) -> None:
    whole = SmallRun(dropout=0.0)
    whole.run(1, 6, Checkpoints(tmp_path, 9))
    other = SmallRun(dropout=0.0, micro_batch_tokens=1)
    other.resume(tmp_path / "step-000003")
    other.run(4, 6)
    ours, theirs = whole.weights(), other.weights()
    # three steps at up to 1e-3 each, fp32 sums in another order; Adam blows up noise of gradients near zero
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4
    assert [r.loss for r in other.results] == pytest.approx([r.loss for r in whole.results[3:]], rel=1e-5)
    assert sum(r.micro_batches for r in other.results) > sum(r.micro_batches for r in whole.results[3:])


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4},
    "dora": {"kind": "dora", "rank": 4},
    "rslora": {"kind": "rslora", "rank_pattern": {"down_proj": 2}},
    "vera": {"kind": "vera", "rank": 4},
    "ia3": {"kind": "ia3"},
    "modules_to_save": {"modules_to_save": ["norm", "lm_head"]},
    "trainable_tokens": {"trainable_tokens": [3, 5]},
}


def _adapted(kind: str, seed: int) -> PeftModel:
    torch.manual_seed(seed)
    base = tiny_llama(tie_word_embeddings=False).requires_grad_(False)
    torch.manual_seed(seed)
    model, _ = add_adapters(base, AdapterSettings(**KINDS[kind]), autocast=False)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_comes_back_and_peft_loads_it_from_the_checkpoint(kind: str, tmp_path: Path) -> None:
    ids, answers, lives = torch.arange(3, 12)[None], [], []
    for seed in (1, 2):
        model = _adapted(kind, seed)
        optimizer = make_optimizer(model, lr=0.1, weight_decay=0.0)
        lives.append(Live(model, optimizer, make_schedule(optimizer, "linear", 10, 0.0)))
    path = Checkpoints(tmp_path, 1).save(1, lives[0], {"rng": lives[0].all_rng_states(), "parts": {}})
    lives[1].read(path, read_state(path))
    models = [live.model for live in lives]
    models.append(PeftModel.from_pretrained(tiny_llama(tie_word_embeddings=False), path))
    for model in models:
        with torch.no_grad():
            answers.append(model.eval()(input_ids=ids).logits)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert not (path / "trained.safetensors").exists()


def test_a_trained_weight_beside_the_adapter_comes_back(tmp_path: Path) -> None:
    lives = []
    for seed in (1, 2):
        model = _adapted("lora", seed)
        model.get_base_model().model.norm.weight.requires_grad_(True)
        optimizer = make_optimizer(model, lr=0.1, weight_decay=0.0)
        lives.append(Live(model, optimizer, make_schedule(optimizer, "linear", 10, 0.0)))
    with torch.no_grad():
        lives[0].model.get_base_model().model.norm.weight.fill_(0.25)
    path = Checkpoints(tmp_path, 1).save(1, lives[0], {"rng": lives[0].all_rng_states(), "parts": {}})
    lives[1].read(path, read_state(path))
    assert lives[1].model.get_base_model().model.norm.weight.tolist() == [0.25] * 64


def test_a_missing_or_a_foreign_weight_is_an_error_and_not_a_silent_change(tmp_path: Path) -> None:
    run = SmallRun()
    run.run(1, 1)
    path = run.save(Checkpoints(tmp_path, 1), 1)
    saved = load_file(path / ADAPTER)
    name = sorted(saved)[0]
    save_file({**{k: v for k, v in saved.items() if k != name}, "other": torch.zeros(2)}, path / ADAPTER)
    with pytest.raises(CheckpointError) as error:
        SmallRun().resume(path)
    assert f"has no {name}, which this run trains" in str(error.value)
    assert "has other, which this run does not train" in str(error.value)


def test_a_state_without_a_part_of_this_run_is_an_error(tmp_path: Path) -> None:
    run = SmallRun()
    path = run.save(Checkpoints(tmp_path, 1), 0)
    scaled = SmallRun()
    scaled.live.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(CheckpointError, match="has no state of the loss scaler"):
        scaled.resume(path)
    state = read_state(path)
    del state["parts"]["numbers"]
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="has no state of the numbers"):
        SmallRun().resume(path)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3).bfloat16())


def _plain(scaler: torch.amp.GradScaler | None = None) -> Live:
    model = _Two()
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.0)
    return Live(model, optimizer, make_schedule(optimizer, "linear", 10, 0.0), scaler)


def test_loss_scale_and_weights_without_peft_come_back(tmp_path: Path) -> None:
    first = _plain(torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3))
    assert first.scaler is not None
    for step in range(4):
        for p in first.model.parameters():
            p.grad = torch.full_like(p, float("inf") if step == 1 else 1.0)
        first.scaler.scale(torch.ones(()))
        first.scaler.unscale_(first.optimizer)
        first.scaler.step(first.optimizer)
        first.scaler.update()
        first.schedule.step()
    store = Checkpoints(tmp_path, 1)
    path = store.save(4, first, {"rng": first.all_rng_states(), "parts": {}})
    second = _plain(torch.amp.GradScaler("cpu"))
    second.read(path, read_state(path))
    assert second.scaler is not None
    assert second.scaler.state_dict() == first.scaler.state_dict()
    assert second.scaler.get_scale() == 2.0**15
    assert equal(dict(first.model.named_parameters()), dict(second.model.named_parameters()))
    assert second.schedule.get_last_lr() == first.schedule.get_last_lr() == [pytest.approx(0.06)] * 2
    assert [group["lr"] for group in second.optimizer.param_groups] == first.schedule.get_last_lr()


class _Mean:
    def __init__(self, value: float) -> None:
        self.tensor = torch.full((3,), value)

    def state_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        return {"mean": self.tensor}, {"count": 7}

    def load_state(self, tensors: dict[str, torch.Tensor], scalars: dict[str, int]) -> None:
        assert scalars == {"count": 7}
        self.tensor = tensors["mean"]


def test_averages_come_back_and_must_be_there(tmp_path: Path) -> None:
    first, second = _plain(), _plain()
    first.averages, second.averages = _Mean(2.5), _Mean(0.0)
    path = Checkpoints(tmp_path, 1).save(1, first, {"rng": first.all_rng_states(), "parts": {}})
    second.read(path, read_state(path))
    assert second.averages.tensor.tolist() == [2.5] * 3
    with pytest.raises(CheckpointError, match="has a state of the averages, and this run has none"):
        _plain().read(path, read_state(path))
