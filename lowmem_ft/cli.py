"""The `lowmem-ft` command.

lowmem-ft train RECIPE [section.key=value ...] [--dry-run]
lowmem-ft check RECIPE [section.key=value ...]      read and audit the data; no weight is read
lowmem-ft generate RUN PROMPT [--system TEXT]       the trained model's answer beside the base's
lowmem-ft schema                                    JSON Schema of a recipe, for editors
lowmem-ft reference                                 every setting of a recipe, as Markdown
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lowmem_ft import __version__
from lowmem_ft.errors import LowmemError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:
        from lowmem_ft.train import main as train

        return train(given[1:])
    options = _parser().parse_args(given)
    try:
        return int(options.run(options))
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowmem-ft", description="Fine-tune quantized language models.")
    parser.add_argument("--version", action="version", version=f"lowmem-ft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", help="fine-tune by a recipe", add_help=False)
    check = commands.add_parser("check", help="read and audit the data of a recipe; no weight is read")
    check.add_argument("recipe", type=Path)
    check.add_argument("overrides", nargs="*", metavar="section.key=value")
    check.set_defaults(run=_check)
    generate = commands.add_parser("generate", help="answer a prompt with a trained run, and with its base")
    generate.add_argument("run_folder", type=Path, metavar="RUN")
    generate.add_argument("prompt")
    generate.add_argument("--system", help="system message")
    generate.add_argument("--max-new-tokens", type=int, default=256)
    generate.set_defaults(run=_generate)
    commands.add_parser("schema", help="JSON Schema of a recipe").set_defaults(run=_schema)
    commands.add_parser("reference", help="every setting of a recipe").set_defaults(run=_reference)
    return parser


def _check(options: argparse.Namespace) -> int:
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


def _generate(options: argparse.Namespace) -> int:
    from lowmem_ft.report.quiet import quiet_libraries

    quiet_libraries()
    from lowmem_ft.export.generate import generate

    trained, base = generate(
        options.run_folder, options.prompt, system=options.system, max_new_tokens=options.max_new_tokens
    )
    print(f"trained: {trained}\nbase:    {base}")
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
