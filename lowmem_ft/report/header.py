"""What is printed before the first step and after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lowmem_ft.data.audit import Audit
from lowmem_ft.data.batches import Batch
from lowmem_ft.memory.measure import MemoryMeter
from lowmem_ft.model.adapters import AdapterReport
from lowmem_ft.model.kbit import PreparationReport
from lowmem_ft.model.load import BytesByPart
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.report.progress import Display
from lowmem_ft.report.summary import adapter_line, batch_line, data_line, model_line, score_row
from lowmem_ft.units import format_bytes


def print_header(
    display: Display,
    recipe: Recipe,
    by_part: BytesByPart,
    preparation: PreparationReport,
    adapters: AdapterReport,
    audit: Audit,
    batch: Batch,
) -> None:
    """The run in four lines: model, what trains, data, batch; and what the user should know beside them."""
    kind = recipe.model.quantization
    double = " with double quantization" if kind in ("nf4", "fp4") and recipe.model.double_quant else ""
    parts = [
        (f"{kind} linears", by_part.quantized),
        ("embeddings and head (tied)" if by_part.tied else "embeddings", by_part.embeddings),
        ("head", by_part.head),
        ("linears that stayed unquantized", by_part.unquantized_linears),
        ("norms and the rest" if by_part.quantized else "the rest", by_part.rest),
    ]
    added = preparation.added_bytes
    model = model_line(recipe.model.path, by_part.parameters, kind + double, parts, added)
    trains = adapter_line(recipe.adapter.kind, recipe.adapter.rank, by_part.parameters, adapters)
    rows = [("model", model), ("trains", trains), ("data", data_line(audit)), ("batch", batch_line(batch))]
    display.block(recipe.name or "run", rows)
    if by_part.quantized:
        stayed = ", ".join(by_part.unquantized_names[:4])
        why = f"; so do {stayed}, which {kind} does not cover" if stayed else ""
        display.line(f"  unquantized by design: embeddings, output head, norms{why}")
    for warning in adapters.warnings:
        display.line(f"  {warning}")
    if batch.not_packed is not None:
        display.line(f"  each example has a row of its own: {batch.not_packed}")
    if audit.train.longest_tokens > batch.micro_batch_tokens:
        longest = f"{audit.train.longest_tokens:,} tokens"
        display.line(f"  the longest example has {longest}, and is a micro-batch by itself")


def print_end(
    display: Display,
    run: Path,
    kept: Sequence[tuple[str, Path]],
    losses: Sequence[float],
    scores: Mapping[str, Sequence[float]],
    prompts: int,
    meter: MemoryMeter,
) -> None:
    """Where everything is, what came of it, and what to type next.

    Args:
        display: where to.
        run: the run folder.
        kept: name and place of what was kept; what does not exist is left out.
        losses: held-out loss of each evaluation, in order.
        scores: mean of each metric of generated answers, in order.
        prompts: how many were answered.
        meter: peaks of the phases.
    """
    rows = [(name, str(path)) for name, path in kept if path.exists()]
    if len(losses) > 1:
        rows.append(("held-out loss", f"{losses[0]:.4f} before, {losses[-1]:.4f} after"))
    rows += [score_row(name, means, prompts) for name, means in scores.items() if len(means) > 1]
    peaks = ", ".join(f"{p.phase} {format_bytes(p.device_bytes or p.rss_bytes)}" for p in meter.phases)
    kind = "on the GPU" if meter.device.type == "cuda" else "of the process"
    rows.append((f"peak memory {kind}", f"{format_bytes(meter.peak_bytes())} ({peaks})"))
    rows.append(("next", f'lowmem-ft generate {run} "your prompt"'))
    display.block("done", rows)
