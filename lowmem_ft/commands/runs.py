"""`lowmem-ft resume` and `lowmem-ft check`: a run that goes on, and what will be trained."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add them to the parser's commands."""
    resume = commands.add_parser("resume", help="go on with a run from its newest whole checkpoint")
    resume.add_argument("run_folder", type=Path, metavar="RUN")
    resume.add_argument("overrides", nargs="*", metavar="section.key=value")
    resume.add_argument("--accept-changes", action="store_true", help="go on though what is learned changes")
    resume.set_defaults(run=_resume)
    check = commands.add_parser("check", help="read and audit the data of a recipe; no weight is read")
    check.add_argument("recipe", type=Path, help="YAML file; with --resume also a run folder")
    check.add_argument("overrides", nargs="*", metavar="section.key=value")
    check.add_argument("--resume", action="store_true", help="prove that a resumed run equals an unbroken one")
    check.add_argument("--steps", type=int, default=4, help="of that proof (4); it resumes in their middle")
    check.set_defaults(run=_check)


def _resume(options: argparse.Namespace) -> int:
    from lowmem_ft.recipe.runs import load_run
    from lowmem_ft.train import start

    load = partial(load_run, options.run_folder, options.overrides)
    return start(
        load, ["lowmem-ft", "resume", str(options.run_folder), *options.overrides], False, options.accept_changes
    )


def _check(options: argparse.Namespace) -> int:
    if options.resume:
        return _check_resume(options)
    from lowmem_ft.recipe.load import load_recipe

    loaded = load_recipe(options.recipe, options.overrides)
    from lowmem_ft.data.audit_text import render
    from lowmem_ft.report.progress import Display
    from lowmem_ft.report.quiet import quiet_libraries
    from lowmem_ft.training import inputs

    quiet_libraries()
    display = Display()
    found = inputs.find(loaded.recipe, display)
    _, encoder = inputs.make_tokenizer_and_encoder(loaded.recipe, found)
    render(inputs.load_data(loaded.recipe, encoder, display).audit, display.console)
    return 0


def _check_resume(options: argparse.Namespace) -> int:
    from lowmem_ft.errors import CheckpointError, Problem
    from lowmem_ft.report.progress import Display
    from lowmem_ft.report.quiet import quiet_libraries

    quiet_libraries()
    from lowmem_ft.training.prove import prove_resume

    display = Display()
    proof = prove_resume(options.recipe, options.overrides, display, max(2, options.steps))
    if proof.differences:
        raise CheckpointError([Problem("", line) for line in proof.differences])
    display.line(
        f"equal bit for bit: {proof.tensors} tensors, random generators, schedule and metrics of {proof.steps} steps, "
        f"unbroken and resumed after step {proof.at}"
    )
    return 0
