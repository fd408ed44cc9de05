"""A run saved by two processes, and resumed by two and by one. Started by test_two_resume.py:

torchrun --nproc-per-node 2 -m tests.flow.two_resume MODEL_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor

from lowmem_ft import apply_packed_attention, prepare_for_kbit_training
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.load import load_model
from lowmem_ft.training.causal import CausalLoss
from lowmem_ft.training.checkpoint import Checkpoints
from lowmem_ft.training.loop import train_step
from lowmem_ft.training.optim import make_optimizer, make_schedule
from lowmem_ft.training.state import Live, read_state
from tests.flow.two_processes import LR, STEPS, rows
from tests.tiny import add_lora

AFTER = 1


class Run:
    """nf4 with LoRA in fp32, very different label counts on the two processes; all objects new."""

    def __init__(self, folder: Path, accelerator: Accelerator, seed: int = 5) -> None:
        base = load_model(FoundModel(str(folder), None, ""), quantization="nf4", dtype="float32")
        apply_packed_attention(prepare_for_kbit_training(base))
        torch.manual_seed(seed + accelerator.process_index)
        self.accelerator, (self.model, _) = accelerator, add_lora(base, rank=4, alpha=8, autocast=False)
        loss = CausalLoss(self.model)
        optimizer = make_optimizer(loss, lr=LR, weight_decay=0.01)
        self.schedule = make_schedule(optimizer, "linear", 10, 0.1)
        self.loss, self.optimizer = accelerator.prepare(loss, optimizer, device_placement=[False, False])
        self.loss.train()
        processes = {"processes": accelerator.num_processes, "process": accelerator.process_index}
        self.live = Live(self.model, self.optimizer, self.schedule, **processes)

    def steps(self, first: int, last: int, store: Checkpoints | None = None) -> dict[str, Tensor]:
        """Steps `first` to `last`, saved after step `AFTER`. Returns what was learned."""
        for step in range(first, last + 1):
            mine = rows("labels", step, self.accelerator)
            train_step(self.accelerator, self.loss, self.optimizer, self.schedule, mine, step, 1.0)
            if store is not None and step == AFTER:
                position: dict[str, Any] = {"step": step, "rng": self.live.all_rng_states(), "parts": {}}
                if self.accelerator.is_main_process:
                    store.save(step, self.live, position)
                self.accelerator.wait_for_everyone()
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}


def resume(folder: Path, out: Path, accelerator: Accelerator) -> tuple[dict[str, Tensor], list[str]]:
    """From the checkpoint to the end, by a run that began elsewhere. Returns also what could not be put back."""
    run, path = Run(folder, accelerator, seed=77), Checkpoints(out, 9).path(AFTER)
    notes = run.live.read(path, read_state(path))
    return run.steps(AFTER + 1, STEPS), notes


def main(folder: Path, out: Path) -> None:
    """Unbroken and saved, then resumed by as many processes."""
    accelerator = Accelerator(cpu=True)
    unbroken = Run(folder, accelerator).steps(1, STEPS, Checkpoints(out, 9))
    resumed, notes = resume(folder, out, accelerator)
    assert notes == []
    save_file(unbroken, out / f"unbroken-{accelerator.process_index}.safetensors")
    save_file(resumed, out / f"resumed-{accelerator.process_index}.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
