"""`lowmem-ft merge` and `lowmem-ft verify`: base and adapter as one model, proven to be what was trained."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lowmem_ft.errors import Problem, RecipeError


def add(commands: Any) -> None:
    """Add them to the parser's commands."""
    merge = commands.add_parser("merge", help="write base and adapter as one model")
    merge.add_argument("trained", type=Path, metavar="RUN", help="a run, a checkpoint or an adapter")
    merge.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    merge.add_argument(
        "--base",
        choices=("full", "trained"),
        default="full",
        help="full (default): into the base as it is stored; trained: into the base as it was quantized in training",
    )
    merge.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights (the base's)")
    merge.add_argument("--shard-size", default="2GiB", help="of a file of weights (2GiB)")
    merge.add_argument("--quantization", choices=("nf4", "fp4", "int8"), help="of the training, if it is not recorded")
    _add_proof(merge)
    merge.set_defaults(run=_merge)
    verify = commands.add_parser("verify", help="compare what two models answer")
    verify.add_argument("trained", type=Path, metavar="A", help="a run, a checkpoint, an adapter or a model")
    verify.add_argument("export", type=Path, metavar="B", help="likewise")
    _add_proof(verify)
    verify.set_defaults(run=_verify)


def _add_proof(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help="where the base is, if it is not where it was in training")
    command.add_argument("--prompts", type=Path, metavar="FILE", help="text, a prompt a line, or JSONL with messages")
    command.add_argument("--max-lost", type=float, help="part of what training changed that may be lost, as 0.05")
    command.add_argument("--force", action="store_true", help="accept a changed base, and more than that lost")


def _merge(options: argparse.Namespace) -> int:
    from lowmem_ft.report.progress import Display
    from lowmem_ft.report.quiet import quiet_libraries
    from lowmem_ft.units import format_bytes, parse_bytes

    try:
        shard_bytes = parse_bytes(options.shard_size)
    except ValueError as error:
        raise RecipeError(Problem("--shard-size", str(error))) from None
    quiet_libraries()
    from lowmem_ft.export.merged_folder import MergeRequest, merge
    from lowmem_ft.export.proof import Proof
    from lowmem_ft.export.subject import find_subject

    display = Display()
    subject = find_subject(options.trained, options.model, options.quantization)
    request = MergeRequest(subject, options.out, options.base, options.dtype, shard_bytes, options.force)
    proof = Proof(subject, options.base, options.prompts, options.max_lost, options.force, display.line)
    with display.working("merging") as work:
        merged = merge(request, proof, work.now)
        work.result = (
            f"{merged.folder}: {format_bytes(merged.bytes)} in {merged.dtype}, {merged.changed} of {merged.tensors} "
            "weights changed"
        )
    for note in merged.notes:
        display.line(note)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from lowmem_ft.report.progress import Display
    from lowmem_ft.report.quiet import quiet_libraries

    quiet_libraries()
    from lowmem_ft.export.proof import Proof, base_of_export
    from lowmem_ft.export.subject import find_subject

    display = Display()
    subject = find_subject(options.trained, options.model)
    base = base_of_export(options.export)
    Proof(subject, base, options.prompts, options.max_lost, options.force, display.line)(options.export)
    return 0
