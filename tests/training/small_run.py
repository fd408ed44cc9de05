"""Twelve steps of a tiny model with all that a resumed run can get wrong: two epochs, shuffling, dropout, packing,
several micro-batches a step, clipping, warm-up. Everything is made anew for each run, as in a fresh process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from lowmem_ft.data.batches import Row, StepOrder, make_row, micro_batches
from lowmem_ft.data.formats import TokenizedExample
from lowmem_ft.memory.attention import apply_packed_attention
from lowmem_ft.model.kbit import prepare_for_kbit_training
from lowmem_ft.training.causal import CausalLoss
from lowmem_ft.training.checkpoint import Checkpoints
from lowmem_ft.training.loop import StepResult, train_step
from lowmem_ft.training.optim import make_optimizer, make_schedule
from lowmem_ft.training.state import Live, read_state
from lowmem_ft.training.watch import NumberWatch
from tests.tiny import VOCABULARY, add_lora, tiny_llama

STEPS = 12
RANK = 128  # with the 32 rows of k_proj: every matrix has the 4,096 elements from which on bitsandbytes keeps 8 bits


class Silent:
    """A reporter that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def working(self, what: str) -> Any:
        raise AssertionError(what)


def examples(count: int = 18) -> list[TokenizedExample]:
    """Ragged lengths, and masks with holes."""
    chance = np.random.default_rng(1)
    made = []
    for line in range(count):
        length = int(chance.integers(4, 30))
        weights = (chance.random(length) < 0.6).astype(np.float32)
        weights[-1] = 1
        made.append(TokenizedExample(chance.integers(3, VOCABULARY, length), weights, "train.jsonl", line + 1))
    return made


@dataclass
class SmallRun:
    """A run whose objects are all new.

    Attributes:
        results: of its steps so far, without their seconds.
    """

    optimizer_kind: str = "adamw"
    micro_batch_tokens: int = 40
    dropout: float = 0.2
    steps: int = STEPS
    watch: NumberWatch = field(default_factory=NumberWatch)
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(99)
        np.random.seed(99)
        random.seed(99)
        base = prepare_for_kbit_training(tiny_llama(num_hidden_layers=1), recompute="block")
        apply_packed_attention(base)
        torch.manual_seed(5)
        self.model, _ = add_lora(base, rank=RANK, alpha=8, dropout=self.dropout, autocast=False)
        self.accelerator = Accelerator(cpu=True, mixed_precision="no")
        loss = CausalLoss(self.model, packed=True)
        optimizer = make_optimizer(loss, lr=1e-3, weight_decay=0.01)
        if self.optimizer_kind == "adamw_8bit":
            optimizer = bitsandbytes.optim.AdamW8bit(optimizer.param_groups, lr=1e-3)
        self.schedule = make_schedule(optimizer, "cosine", self.steps, 0.2)
        self.loss, self.optimizer = self.accelerator.prepare(loss, optimizer, device_placement=[False, False])
        self.loss.train()
        self.examples = examples()
        self.order = StepOrder(size=len(self.examples), batch_size=3, steps=self.steps, seed=17)
        self.live = Live(self.model, self.optimizer, self.schedule, parts={"numbers": self.watch})

    def rows(self, step: int) -> list[Row]:
        """Micro-batches of a step."""
        mine = [self.examples[index] for index in self.order.examples(step)]
        groups = micro_batches([len(e.input_ids) for e in mine], self.micro_batch_tokens)
        return [make_row([mine[i] for i in group]) for group in groups]

    def run(self, first: int, last: int, store: Checkpoints | None = None) -> None:
        """Steps `first` to `last`, each saved in `store`."""
        for step in range(first, last + 1):
            result = train_step(
                self.accelerator, self.loss, self.optimizer, self.schedule, self.rows(step), step, max_grad_norm=1.0
            )
            self.watch.look(result, Silent())
            self.results.append(replace(result, seconds=0.0))
            if store is not None:
                self.save(store, step)

    def save(self, store: Checkpoints, step: int) -> Path:
        """A checkpoint."""
        position = {"step": step, "rng": self.live.all_rng_states(), "parts": self.live.part_states()}
        return store.save(step, self.live, position)

    def resume(self, path: Path) -> int:
        """Bring this run to a checkpoint. Returns its step."""
        state = read_state(path)
        assert self.live.read(path, state) == []
        return int(state["step"])

    def weights(self) -> dict[str, Tensor]:
        """What it learned."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
