"""The header before a run and the block after it, in words and checked numbers."""

from __future__ import annotations

from collections.abc import Sequence

from lowmem_ft.data.audit import Audit
from lowmem_ft.data.batches import Batch
from lowmem_ft.model.adapters import AdapterReport
from lowmem_ft.model.targets import TargetMatch, format_layers
from lowmem_ft.units import format_bytes, format_count


def model_line(name: str, parameters: int, quantization: str, parts: Sequence[tuple[str, int]], added: int) -> str:
    """Model and where its bytes are.

    Args:
        name: as in the recipe.
        parameters: weights.
        quantization: of its linear layers.
        parts: name and bytes of each part; empty ones are left out.
        added: what casts to fp32 added, in bytes.
    """
    total = sum(size for _, size in parts)
    shown = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts if size)
    cast = f"; fp32 casts add {format_bytes(added)}" if added else ""
    return f"{name}, {format_count(parameters)} weights in {quantization}: {format_bytes(total)} ({shown}){cast}"


def adapter_line(kind: str, rank: int, base_parameters: int, adapters: AdapterReport) -> str:
    """What trains, as a share of all weights."""
    trained = adapters.trainable_parameters
    names = ", ".join(f"{count} {name}" for name, count in adapters.layers.items()) + _where(adapters.table)
    others = "".join(f"; {other}" for other in adapters.others)
    what = kind if kind == "ia3" else f"{kind} rank {rank}"
    of = f"{format_count(trained)} of {format_count(trained + base_parameters)} weights"
    share = trained / (trained + base_parameters)
    size = format_bytes(adapters.trainable_bytes)
    return f"{what}: {of} ({share:.2%}), {size} in fp32, on {names}{others}"


def _where(table: Sequence[TargetMatch]) -> str:
    """The blocks; name by name where they differ."""
    if len({row.layers for row in table}) == 1:
        return f" in layers {format_layers(table[0].layers)}" if table[0].layers else ""
    return "".join(
        f"; {row.name} matches {row.matches}" + (f" in layers {format_layers(row.layers)}" if row.layers else "")
        for row in table
    )


def data_line(audit: Audit) -> str:
    """Training and held-out data, in examples and tokens."""
    train = audit.train
    dropped = f", {train.records - train.kept:,} left out" if train.records > train.kept else ""
    trained = f"{train.trained_tokens:,} trained ({train.trained_tokens / train.tokens:.0%})"
    held_out = f"{audit.eval.kept:,} held-out examples" if audit.eval else "no held-out examples"
    return f"{train.kept:,} examples{dropped}, {train.tokens:,} tokens, {trained}; {held_out}"


def batch_line(batch: Batch) -> str:
    """One step as micro-batches times accumulation, and how many steps there are."""
    accumulation = f"{batch.micro_batches:.1f}".removesuffix(".0")
    per_row = f"{batch.examples / batch.micro_batches:.1f}".removesuffix(".0")
    filled = f"filled up to a multiple of {batch.row_multiple}" if batch.row_multiple > 1 else "no padding"
    return (
        f"{batch.examples} examples a step = {per_row} in a micro-batch (at most {batch.micro_batch_tokens:,} tokens, "
        f"{filled}) x {accumulation} accumulated, on average; {batch.steps:,} steps, {batch.epochs:.2f} epochs"
    )


def score_row(name: str, means: Sequence[float], prompts: int) -> tuple[str, str]:
    """A metric before and after, for the block at the end.

    Args:
        name: of the metric.
        means: at each generation, in order.
        prompts: how many were answered.
    """
    if name == "exact_match":
        return "exact answers", f"{means[0]:.0%} before, {means[-1]:.0%} after, of {prompts} held-out prompts"
    return name, f"{means[0]:.4g} before, {means[-1]:.4g} after, on {prompts} held-out prompts"
