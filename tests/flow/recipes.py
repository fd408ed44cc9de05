"""A tiny run as files: model, data and recipe in a folder."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import save_tiny_model

RECIPE = """\
name: tiny
seed: 3
output: runs/tiny
model: {path: ./model, quantization: nf4}
adapter: {rank: 4, alpha: 8}
data:
  train: train.jsonl
  eval: eval.jsonl
  max_tokens: 128
train: {steps: 4, batch_size: 5, lr: 1e-3, micro_batch_tokens: 128}
checkpoint: {every_steps: 2, keep: 1}
eval: {every_steps: 2, generate: 3, max_new_tokens: 4}
"""


def write_run(folder: Path, recipe: str = RECIPE, records: int = 12) -> Path:
    """Everything that a run needs. Returns the recipe file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_model(folder / "model")
    for name, count in (("train", records), ("eval", 4)):
        lines = []
        for index in range(count):
            messages = [
                {"role": "user", "content": f"hello {name} {index}" + " dogs" * (index % 5)},
                {"role": "assistant", "content": f"there {index}"},
            ]
            lines.append(json.dumps({"messages": messages}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "mine.yaml").write_text(recipe)
    return folder / "mine.yaml"
