"""Runs of `train_step` that must come out the same in one process and in two. Started by test_other_scripts.py:

torchrun --nproc-per-node 2 -m tests.flow.two_processes MODEL_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from lowmem_ft import apply_packed_attention, prepare_for_kbit_training
from lowmem_ft.data.batches import Row, StepOrder
from lowmem_ft.data.formats import TokenizedExample
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import load_model
from lowmem_ft.training.causal import CausalLoss
from lowmem_ft.training.loop import train_step
from lowmem_ft.training.optim import make_optimizer, make_schedule
from lowmem_ft.training.setup import rows_of_step
from tests.tiny import VOCABULARY, add_lora

STEPS = 3
LR = 2e-4
LONG = 40


def _example(index: int, length: int, trained: int) -> TokenizedExample:
    """`trained` labels at the end of `length` tokens."""
    ids = np.random.default_rng(index).integers(3, VOCABULARY, length)
    weights = np.zeros(length, dtype=np.float32)
    weights[length - trained :] = 1
    return TokenizedExample(ids, weights, "train.jsonl", index + 1)


# Examples go round the processes, so with two of them the first gets the even ones.
EXAMPLES = {
    "labels": [_example(i, 30, 1 if i % 2 == 0 else 28) for i in range(12)],
    "no_example": [_example(i, 20, 10) for i in range(9)],  # the third step holds one example
    "micro_batches": [_example(i, 50 if i % 2 == 0 else 12, 8) for i in range(12)],  # 2 rows against 1
}
ROWS_OF_FIRST_STEP = {"labels": [1, 1], "no_example": [1, 1], "micro_batches": [2, 1]}


def rows(name: str, step: int, accelerator: Accelerator) -> list[Row]:
    """This process' rows of a step, four examples a step and at most 64 tokens a row."""
    settings: Any = SimpleNamespace(train=SimpleNamespace(micro_batch_tokens=64), data=SimpleNamespace(max_tokens=64))
    split: Any = SimpleNamespace(tokens=EXAMPLES[name])
    order = StepOrder(size=len(EXAMPLES[name]), batch_size=4, steps=STEPS, seed=0, shuffle=False)
    return rows_of_step(settings, split, order, step, accelerator, packed=True)


class SometimesUsed(nn.Module):
    """Calls its second weight only for long examples and its third never, like an expert or a second tower."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.for_long, self.never = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, row: Row) -> Tensor:
        """Any sum over examples."""
        total = torch.zeros(())
        for length in row.lengths:
            weight = self.always * (self.for_long if length > LONG else 1.0)
            total = total + length * (weight**2).sum()
        return total


def train(name: str, folder: Path, accelerator: Accelerator, save: Path | None = None) -> dict[str, Any]:
    """Train nf4 with LoRA in fp32 for three steps. Returns parameters and what each step said."""
    adapted: Any = None
    if name == "sometimes_used":
        loss: nn.Module = SometimesUsed()
        data = "micro_batches"
    else:
        base = load_model(FoundModel(str(folder), None, ""), quantization="nf4", dtype="float32")
        apply_packed_attention(prepare_for_kbit_training(base))
        torch.manual_seed(5 + accelerator.process_index)  # processes that start apart get the first one's adapters
        adapted, _ = add_lora(base, rank=4, alpha=8, autocast=False)
        loss, data = CausalLoss(adapted), name
    before = {key: p.detach().clone() for key, p in loss.named_parameters() if not p.requires_grad}
    optimizer = make_optimizer(loss, lr=LR, weight_decay=0.01)
    schedule = make_schedule(optimizer, "linear", 10, 0.1)
    model, optimizer = accelerator.prepare(loss, optimizer, device_placement=[False, False])
    model.train()
    results = []
    for step in range(1, STEPS + 1):
        results.append(train_step(accelerator, model, optimizer, schedule, rows(data, step, accelerator), step, 1.0))
    if save is not None and adapted is not None and accelerator.is_main_process:
        adapted.save_pretrained(save)
    parameters = {key: p.detach().clone() for key, p in loss.named_parameters() if p.requires_grad}
    unchanged = all(torch.equal(p, before[key]) for key, p in loss.named_parameters() if key in before)
    return {"parameters": parameters, "steps": [vars(result) for result in results], "base_unchanged": unchanged}


def main(folder: Path, out: Path) -> None:
    """Each run, into a file a process."""
    accelerator = Accelerator(cpu=True)
    done = {name: train(name, folder, accelerator, out / name) for name in [*EXAMPLES, "sometimes_used"]}
    torch.save(done, out / f"process-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
