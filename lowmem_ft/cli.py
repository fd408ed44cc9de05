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
import sys
from collections.abc import Sequence

from lowmem_ft import __version__
from lowmem_ft.commands import answers, merging, runs, settings
from lowmem_ft.errors import LowmemError

COMMANDS = (runs, answers, merging, settings)
"""In the order of the help page, after `train`, which has a parser of its own."""


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
    for module in COMMANDS:
        module.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
