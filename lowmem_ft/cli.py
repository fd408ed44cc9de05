"""The `lowmem-ft` command.

lowmem-ft train RECIPE [section.key=value ...] [--dry-run]
lowmem-ft resume RUN [section.key=value ...] [--accept-changes]    go on from the newest whole checkpoint
lowmem-ft check RECIPE [section.key=value ...]      read and audit the data; no weight is read
lowmem-ft check RUN --resume                        train a few steps unbroken and resumed, and compare every bit
lowmem-ft generate RUN PROMPT [--system TEXT]       the trained model's answer beside the base's
lowmem-ft generate RUN --prompts FILE --out FILE    answers to a file of prompts, as JSONL
lowmem-ft chat RUN                                  a conversation; /base lets the base answer beside it
lowmem-ft merge RUN OUT [--base trained]            base and adapter as one model, proven to be what was trained
lowmem-ft verify A B [--prompts FILE]               how far B is from A, measured by what training changed
lowmem-ft schema                                    JSON Schema of a recipe, for editors
lowmem-ft reference                                 every setting of a recipe, as Markdown
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lowmem_ft import __version__
from lowmem_ft.errors import LowmemError, Problem, RecipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:
        from lowmem_ft.train import main as train

        return train(given[1:])
    options = _parse(given)
    try:
        return int(options.run(options))
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parse(given: Sequence[str]) -> argparse.Namespace:
    """Overrides may stand before and after options, which argparse's commands do not allow by themselves."""
    parser = _parser()
    options, rest = parser.parse_known_args(given)
    if any(text.startswith("-") or not hasattr(options, "overrides") for text in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowmem-ft", description="Fine-tune quantized language models.")
    parser.add_argument("--version", action="version", version=f"lowmem-ft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", help="fine-tune by a recipe", add_help=False)
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
    _add_answering(commands)
    _add_merge(commands)
    verify = commands.add_parser("verify", help="compare what two models answer")
    verify.add_argument("trained", type=Path, metavar="A", help="a run, a checkpoint, an adapter or a model")
    verify.add_argument("export", type=Path, metavar="B", help="likewise")
    _add_proof(verify)
    verify.set_defaults(run=_verify)
    commands.add_parser("schema", help="JSON Schema of a recipe").set_defaults(run=_schema)
    commands.add_parser("reference", help="every setting of a recipe").set_defaults(run=_reference)
    return parser


def _add_answering(commands: Any) -> None:
    generate = commands.add_parser("generate", help="answer a prompt, or a file of prompts")
    generate.add_argument("subject", type=Path, metavar="RUN", help="a run, a checkpoint, an adapter or a model")
    generate.add_argument("prompt", nargs="?")
    generate.add_argument("--prompts", type=Path, metavar="FILE", help="text, a prompt a line, or JSONL with messages")
    generate.add_argument("--out", type=Path, metavar="FILE", help="JSONL of answers to --prompts")
    generate.add_argument("--with-base", action="store_true", help="with --prompts: the base's answers too")
    generate.set_defaults(run=_generate)
    chat = commands.add_parser("chat", help="a conversation with a run, a checkpoint, an adapter or a model")
    chat.add_argument("subject", type=Path, metavar="RUN", help="a run, a checkpoint, an adapter or a model")
    chat.add_argument("--temperature", type=float, default=0.0, help="0 (default): always the most likely token")
    chat.add_argument("--top-p", type=float, default=1.0, help="draw among the most likely tokens of this much (1)")
    chat.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    chat.set_defaults(run=_chat)
    for command, length in ((generate, 256), (chat, 512)):
        command.add_argument("--system", help="system message")
        command.add_argument("--max-new-tokens", type=_positive, default=length, help=f"longest answer ({length})")
        command.add_argument("--model", help="where the base is, if it is not where it was in training")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number from 1')
    return int(text)


def _add_merge(commands: Any) -> None:
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


def _resume(options: argparse.Namespace) -> int:
    from lowmem_ft.recipe.runs import load_run
    from lowmem_ft.train import start

    load = partial(load_run, options.run_folder, options.overrides)
    return start(
        load, ["lowmem-ft", "resume", str(options.run_folder), *options.overrides], False, options.accept_changes
    )


def _generate(options: argparse.Namespace) -> int:
    if (options.prompt is None) == (options.prompts is None) or (options.prompts is None) != (options.out is None):
        what = "needs either a prompt, or --prompts FILE with --out FILE"
        raise RecipeError(Problem("generate", what, 'Write lowmem-ft generate RUN "a prompt"'))
    from lowmem_ft.report.quiet import quiet_libraries

    quiet_libraries()
    if options.prompts is not None:
        return _answer_file(options)
    from lowmem_ft.export.generate import generate

    trained, base = generate(
        options.subject,
        options.prompt,
        system=options.system,
        max_new_tokens=options.max_new_tokens,
        model=options.model,
    )
    print(trained if base is None else f"trained: {trained}\nbase:    {base}")
    return 0


def _answer_file(options: argparse.Namespace) -> int:
    from lowmem_ft.export.generate import answer_file
    from lowmem_ft.export.opened import open_subject
    from lowmem_ft.export.prompts import read_prompts
    from lowmem_ft.export.subject import find_subject
    from lowmem_ft.report.progress import Display

    prompts = read_prompts(options.prompts, options.system)
    with Display().working("answering") as work:
        opened = open_subject(find_subject(options.subject, options.model), progress=work.now)
        written = answer_file(
            opened,
            prompts,
            options.out,
            max_new_tokens=options.max_new_tokens,
            with_base=options.with_base,
            progress=lambda done: work.now(f"{done:,} of {len(prompts):,}"),
        )
        work.result = f"{options.out}: {written.line()}"
    return 0


def _chat(options: argparse.Namespace) -> int:
    if not (options.temperature >= 0 and 0 < options.top_p <= 1):
        what = f"--temperature {options.temperature:g} --top-p {options.top_p:g} cannot be drawn by"
        raise RecipeError(Problem("chat", what, "Write a temperature from 0, and a top-p over 0 and up to 1"))
    from lowmem_ft.report.quiet import quiet_libraries

    quiet_libraries()
    import torch

    from lowmem_ft.export.chat import Chat, Sampling, read_lines, write_now
    from lowmem_ft.export.opened import open_subject
    from lowmem_ft.export.subject import find_subject

    opened = open_subject(find_subject(options.subject, options.model))
    torch.manual_seed(options.seed)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p)
    Chat(opened, write_now, sampling, options.system).run(read_lines())
    return 0


def _schema(options: argparse.Namespace) -> int:
    from lowmem_ft.recipe.reference import recipe_json_schema

    print(json.dumps(recipe_json_schema(), indent=2))
    return 0


def _reference(options: argparse.Namespace) -> int:
    from lowmem_ft.recipe.reference import reference_page

    print(reference_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
