"""A run on one page: recipe -> data -> model -> loop -> what is kept.

    python -m lowmem_ft.train RECIPE [section.key=value ...] [--dry-run]

A wrong recipe ends here with exit code 2, before torch is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_ft.errors import LowmemError
from lowmem_ft.recipe.load import LoadedRecipe, dump_recipe, load_recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from lowmem_ft.data.batches import StepOrder
    from lowmem_ft.data.template import Encoder
    from lowmem_ft.memory.measure import MemoryMeter
    from lowmem_ft.report.progress import Display
    from lowmem_ft.training.inputs import Data
    from lowmem_ft.training.setup import PreparedModel


@dataclass(frozen=True)
class Ready:
    """All that the loop needs."""

    accelerator: Accelerator
    meter: MemoryMeter
    tokenizer: Any
    encoder: Encoder
    data: Data
    order: StepOrder
    prepared: PreparedModel


def get_ready(loaded: LoadedRecipe, display: Display, dry_run: bool = False) -> Ready:
    """Read and audit the data, then load the model, and print what will be done.

    Args:
        loaded: from `load_recipe`.
        display: where to print.
        dry_run: the model is made from its configuration alone; no weight is read.

    Raises:
        LowmemError: anything that the user can mend.
    """
    from lowmem_ft.data.audit_text import render
    from lowmem_ft.report.header import print_header
    from lowmem_ft.training import inputs, setup

    recipe = loaded.recipe
    accelerator, meter = setup.make_accelerator(loaded)

    # what goes in, before any weight is read
    found = inputs.find(recipe, display)
    tokenizer, encoder = inputs.make_tokenizer_and_encoder(recipe, found)
    with meter.phase("data"):
        data = inputs.load_data(recipe, encoder, display)
    render(data.audit, display.console)
    order = setup.make_order(recipe, data.train)

    # the model: quantized on arrival, prepared, given adapters
    with meter.phase("load"):
        if dry_run:
            prepared = setup.predict_prepared(recipe, found)
        else:
            prepared = setup.load_prepared(recipe, found, accelerator.device, display)
    batch = setup.describe_batch(recipe, data.train, order, prepared, accelerator.device)
    print_header(display, recipe, prepared.bytes, prepared.preparation, prepared.adapters, data.audit, batch)
    return Ready(accelerator, meter, tokenizer, encoder, data, order, prepared)


def train(loaded: LoadedRecipe, display: Display, command: Sequence[str] = ()) -> Path:
    """Run a recipe from beginning to end.

    Args:
        loaded: from `load_recipe`.
        display: where to print.
        command: how it was started, for the run folder.

    Returns:
        The run folder.

    Raises:
        LowmemError: anything that the user can mend; nothing half done is left that looks finished.
    """
    from lowmem_ft.report.header import print_end
    from lowmem_ft.training import setup
    from lowmem_ft.training.examine import Examiner
    from lowmem_ft.training.gradients import check_gradients, shortest_row
    from lowmem_ft.training.loop import train_step
    from lowmem_ft.training.run_folder import RunFolder

    recipe, ready = loaded.recipe, get_ready(loaded, display)
    accelerator, order, peft_model = ready.accelerator, ready.order, ready.prepared.model
    model, optimizer, schedule = setup.make_trainable(recipe, ready.prepared, accelerator, order.steps)
    check_gradients(model, peft_model, shortest_row(ready.data.train, order), accelerator, display)
    run = RunFolder.create(recipe, dump_recipe(recipe), str(accelerator.device), command)
    examiner = Examiner(recipe, ready.data, ready.prepared, ready.tokenizer, ready.encoder, accelerator, run, display)
    with ready.meter.phase("evaluation before"):
        examiner.examine(model, step=0)

    with ready.meter.phase("training"), display.steps(order.steps) as bar:
        for step in range(1, order.steps + 1):
            rows = setup.rows_of_step(recipe, ready.data.train, order, step, accelerator, ready.prepared.packed)
            result = train_step(accelerator, model, optimizer, schedule, rows, step, recipe.train.max_grad_norm)
            bar.show(run.record_step(result, order, ready.meter))
            if setup.is_due(recipe.checkpoint.every_steps, step):
                run.save_checkpoint(peft_model, ready.tokenizer, ready.encoder.template_text, step)
            if setup.is_due(recipe.eval.every_steps, step):
                examiner.loss(model, step)

    run.save_adapter(peft_model, ready.tokenizer, ready.encoder.template_text)
    with ready.meter.phase("evaluation after"):
        examiner.examine(model, step=order.steps)
    run.record_memory(ready.meter.phases)
    print_end(display, run.path, run.kept(), examiner.losses, examiner.exact, recipe.eval.generate, ready.meter)
    return run.path


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code; see `lowmem_ft.errors` for those of errors."""
    parser = argparse.ArgumentParser(prog="python -m lowmem_ft.train", description="Fine-tune by a recipe.")
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and the header, then stop")
    options = parser.parse_intermixed_args(arguments)
    try:
        loaded = load_recipe(options.recipe, options.overrides)
        from lowmem_ft.report.progress import Display
        from lowmem_ft.report.quiet import quiet_libraries

        quiet_libraries()
        display = Display()
        if options.dry_run:
            display.line(dump_recipe(loaded.recipe))
            get_ready(loaded, display, dry_run=True)
            display.line("dry run: no weight was read, nothing was trained")
        else:
            train(loaded, display, sys.argv if arguments is None else ["lowmem-ft", "train", *arguments])
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; checkpoints that were written are whole", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
