"""`lowmem-ft generate` and `lowmem-ft chat`: what a run, a checkpoint, an adapter or a model answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lowmem_ft.errors import Problem, RecipeError


def add(commands: Any) -> None:
    """Add them to the parser's commands."""
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
