#!/usr/bin/env python3
"""Speed and peak memory of lowmem_ft beside the plain way, in one run, as ratios.

    python scripts/bench.py [RECIPE] [--steps 6] [--pairs 3] [section.key=value ...]

The plain way is transformers' Trainer with peft: `prepare_model_for_kbit_training` (fp32 casts, gradient
checkpointing), padded micro-batches, full logits. Both sides see the same examples in the same order, with the same
model, quantization, adapter, precision and examples a step. Each side runs in a process of its own, one after the
other: two torch processes at once slow each other down. Tokens are real tokens; the first step is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIDES = ("ours", "plain")


def settings(steps: int, overrides: list[str]) -> list[str]:
    """What is the same on both sides, so that their losses can be compared."""
    return [f"train.steps={steps}", "train.schedule=constant", "train.warmup_ratio=0", *overrides]


def run_ours(recipe_file: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """The project's own flow, without evaluation."""
    from lowmem_ft.recipe.load import load_recipe
    from lowmem_ft.report.progress import Display
    from lowmem_ft.report.quiet import quiet_libraries
    from lowmem_ft.train import get_ready
    from lowmem_ft.training import setup
    from lowmem_ft.training.loop import train_step

    quiet_libraries()
    loaded = load_recipe(Path(recipe_file), settings(steps, overrides))
    recipe = loaded.recipe
    ready = get_ready(loaded, Display())
    model, optimizer, schedule = setup.make_trainable(recipe, ready.prepared, ready.accelerator, steps)
    results = []
    with ready.meter.phase("training"):
        for step in range(1, steps + 1):
            packed = ready.prepared.packed
            rows = setup.rows_of_step(recipe, ready.data.train, ready.order, step, ready.accelerator, packed)
            results.append(train_step(ready.accelerator, model, optimizer, schedule, rows, step, 1.0))
    tokens, seconds = sum(r.tokens for r in results[1:]), sum(r.seconds for r in results[1:])
    return {"tokens_per_second": tokens / seconds, "peak_bytes": ready.meter.peak_bytes(), "loss": results[-1].loss}


def run_plain(recipe_file: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """transformers.Trainer and peft, as their documentation says."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import (
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from lowmem_ft.memory.measure import rss_peak_bytes
    from lowmem_ft.recipe.load import load_recipe
    from lowmem_ft.report.progress import Display
    from lowmem_ft.report.quiet import quiet_libraries
    from lowmem_ft.training import inputs, setup

    recipe = load_recipe(Path(recipe_file), settings(steps, overrides)).recipe
    quiet_libraries()
    found = inputs.find(recipe, Display())
    _, encoder = inputs.make_tokenizer_and_encoder(recipe, found)
    data = inputs.load_data(recipe, encoder, Display())
    order = setup.make_order(recipe, data.train)
    examples = [data.train.tokens[i] for step in range(1, steps + 1) for i in order.examples(step)]
    records = [
        {
            "input_ids": e.input_ids.tolist(),
            "labels": [i if w else -100 for i, w in zip(e.input_ids, e.weights, strict=True)],
        }
        for e in examples
    ]
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=recipe.model.quantization,
        bnb_4bit_use_double_quant=recipe.model.double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(found.path, quantization_config=config, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    set_seed(recipe.seed)
    lora = LoraConfig(
        r=recipe.adapter.rank, lora_alpha=recipe.adapter.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora)

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(b["input_ids"]) for b in batch)
        fill = {"input_ids": 0, "labels": -100}
        out = {k: torch.tensor([b[k] + [v] * (width - len(b[k])) for b in batch]) for k, v in fill.items()}
        lengths = [len(b["input_ids"]) for b in batch]
        out["attention_mask"] = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
        return out

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    half = max(1, recipe.train.batch_size // 2)
    arguments = TrainingArguments(
        output_dir="unused", max_steps=steps, per_device_train_batch_size=half, gradient_accumulation_steps=2,
        learning_rate=recipe.train.lr, lr_scheduler_type="constant", bf16=True,
        use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
        remove_unused_columns=False, gradient_checkpointing=True, dataloader_pin_memory=False, disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=records, data_collator=collate, callbacks=[Clock()])
    trainer.train()
    tokens = sum(len(r["input_ids"]) for r in records[recipe.train.batch_size :])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "tokens_per_second": tokens / (times[-1] - times[0]),
        "peak_bytes": rss_peak_bytes(),
        "loss": float(losses[-1]),
    }


def main() -> int:
    """Run the pairs and print the ratios."""
    parser = argparse.ArgumentParser(description="lowmem_ft beside the plain way.")
    parser.add_argument("recipe", nargs="?", default="recipes/llama-lora.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.side:
        with contextlib.redirect_stdout(sys.stderr):
            run = run_ours if options.side == "ours" else run_plain
            result = run(options.recipe, options.steps, options.overrides)
        print(json.dumps(result))
        return 0
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for pair in range(options.pairs):
        for side in SIDES:
            command = [sys.executable, __file__, options.recipe, *options.overrides, "--side", side]
            done = subprocess.run(
                [*command, "--steps", str(options.steps)], capture_output=True, text=True,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )  # fmt: skip
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            one = json.loads(done.stdout)
            results[side].append(one)
            speed, peak = one["tokens_per_second"], one["peak_bytes"] / 2**20
            print(
                f"pair {pair + 1}  {side:5}  {speed:6.0f} tokens/s  peak {peak:6.0f} MiB  loss {one['loss']:.4f}",
                flush=True,
            )
    for key, name in (("tokens_per_second", "speed"), ("peak_bytes", "peak memory")):
        ratios = [ours[key] / plain[key] for ours, plain in zip(results["ours"], results["plain"], strict=True)]
        print(f"{name}, ours / plain: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
