"""A run on one page: recipe -> data -> model -> loop -> what is kept.

    python -m lowmem_ft.train RECIPE [section.key=value ...] [--dry-run]

A wrong recipe ends here with exit code 2, before torch is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_ft.errors import LowmemError, Stopped
from lowmem_ft.recipe.load import LoadedRecipe, dump_recipe, load_recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from lowmem_ft.data.batches import StepOrder
    from lowmem_ft.data.template import Encoder
    from lowmem_ft.memory.measure import MemoryMeter
    from lowmem_ft.model.find import FoundModel
    from lowmem_ft.recipe.schema import Recipe
    from lowmem_ft.report.progress import Display
    from lowmem_ft.training.examine import Exam
    from lowmem_ft.training.inputs import Data
    from lowmem_ft.training.resume import Past
    from lowmem_ft.training.run_folder import RunFolder
    from lowmem_ft.training.setup import PreparedModel
    from lowmem_ft.training.signals import StopRequests


@dataclass(frozen=True)
class Ready:
    """All that the loop needs."""

    accelerator: Accelerator
    found: FoundModel
    meter: MemoryMeter
    tokenizer: Any
    encoder: Encoder
    data: Data
    exam: Exam
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
    from lowmem_ft.training.examine import make_exam

    recipe = loaded.recipe
    accelerator, meter = setup.make_accelerator(loaded)

    # what goes in, before any weight is read
    found = inputs.find(recipe, display)
    tokenizer, encoder = inputs.make_tokenizer_and_encoder(recipe, found)
    with meter.phase("data"):
        data = inputs.load_data(recipe, encoder, display)
    render(data.audit, display.console)
    exam = make_exam(recipe, encoder, display, loaded.where)
    order = setup.make_order(recipe, data.train)

    # the model: quantized on arrival, prepared, given adapters
    with meter.phase("load"):
        if dry_run:
            prepared = setup.predict_prepared(recipe, found)
        else:
            prepared = setup.load_prepared(recipe, found, accelerator.device, display)
    batch = setup.describe_batch(recipe, data.train, order, prepared, accelerator.device)
    print_header(display, recipe, prepared.bytes, prepared.preparation, prepared.adapters, data.audit, batch)
    return Ready(accelerator, found, meter, tokenizer, encoder, data, exam, order, prepared)


def train(loaded: LoadedRecipe, display: Display, command: Sequence[str] = (), accept_changes: bool = False) -> Path:
    """Run a recipe to its end, from its start or from a checkpoint.

    Args:
        loaded: from `load_recipe`.
        display: where to print.
        command: how it was started, for the run folder.
        accept_changes: go on from a checkpoint though settings changed that alter what is learned.

    Returns:
        The run folder.

    Raises:
        LowmemError: anything that the user can mend; nothing half done is left that looks finished.
        Stopped: a signal or `train.max_seconds` ended it, and what was learned is saved.
    """
    from lowmem_ft.training import setup
    from lowmem_ft.training.resume import find_past
    from lowmem_ft.training.run_folder import RunFolder
    from lowmem_ft.training.signals import StopRequests

    recipe = loaded.recipe
    with StopRequests(recipe.train.max_seconds) as stop, RunFolder.claim(recipe) as run:
        if recipe.checkpoint.resume == "auto" and run.is_finished and not accept_changes:
            display.line(f"{run.path} is finished, and nothing is left to do")
            return run.path
        with stop.at_once():  # nothing is learned yet
            past = find_past(recipe, run.store, display, accept_changes)
            ready = get_ready(loaded, display)
        base = setup.describe_base(recipe, ready.found)
        run.begin(dump_recipe(recipe), str(ready.accelerator.device), command, past, base)
        learn(recipe, ready, run, stop, past, display, accept_changes)
    return run.path


def learn(
    recipe: Recipe,
    ready: Ready,
    run: RunFolder,
    stop: StopRequests,
    past: Past | None,
    display: Display,
    accept_changes: bool = False,
) -> None:
    """The steps from where the run stands to its end, and what is kept of them. Arguments as in `train`."""
    from lowmem_ft.report.header import print_end
    from lowmem_ft.training import setup
    from lowmem_ft.training.examine import Examiner
    from lowmem_ft.training.fingerprint import digests
    from lowmem_ft.training.gradients import check_gradients, shortest_row
    from lowmem_ft.training.loop import train_step
    from lowmem_ft.training.saver import Saver
    from lowmem_ft.training.state import Live
    from lowmem_ft.training.watch import NumberWatch

    accelerator, order, data, prepared = ready.accelerator, ready.order, ready.data, ready.prepared
    model, optimizer, schedule = setup.make_trainable(recipe, prepared, accelerator, order.steps)
    check_gradients(model, prepared.model, shortest_row(data.train, order), accelerator, display)
    examiner = Examiner(
        recipe, data.eval, ready.exam, prepared, ready.tokenizer, ready.encoder, accelerator, run, display
    )
    watch = NumberWatch()
    parts: dict[str, Any] = {"evaluations": examiner, "numbers": watch}
    live = Live(prepared.model, optimizer, schedule, accelerator.scaler, parts=parts)
    saver = Saver(recipe, run, live, stop, digests(prepared.model, data.train), display)
    done, owed = saver.restore(past, accept_changes)
    with ready.meter.phase("evaluation before"):
        if owed and done == 0:
            saver.evaluate(0, lambda: examiner.examine(model, 0))
        elif owed:
            saver.end_step(done, examiner.due(model, done))

    with ready.meter.phase("training"), display.steps(order.steps) as bar:
        for step in range(done + 1, order.steps + 1):
            if saver.best.why_stop():
                break
            rows = setup.rows_of_step(recipe, data.train, order, step, accelerator, prepared.packed)
            result = train_step(accelerator, model, optimizer, schedule, rows, step, recipe.train.max_grad_norm)
            bar.show(run.record_step(result, order, ready.meter, watch.look(result, display)))
            watch.stop_if_lost(step, saver.last_checkpoint)
            saver.end_step(step, examiner.due(model, step))
            done = step

    run.save_adapter(prepared.model, ready.tokenizer, ready.encoder.template_text)
    with ready.meter.phase("evaluation after"):
        saver.evaluate(done, lambda: examiner.examine(model, done))
    run.record_memory(ready.meter.phases)
    for line in (*watch.lines(), *saver.end_lines(done, order.steps)):
        display.line(line)
    print_end(display, run.path, run.kept(), examiner.losses, examiner.scores, len(ready.exam.examples), ready.meter)


def start(
    load: Callable[[], LoadedRecipe], command: Sequence[str], dry_run: bool = False, accept_changes: bool = False
) -> int:
    """Load a recipe, run it, and turn what ends it into an exit code; see `lowmem_ft.errors`.

    Args:
        load: gives the recipe.
        command: how the program was started.
        dry_run: print what would be done, and stop.
        accept_changes: see `train`.
    """
    try:
        loaded = load()
        from lowmem_ft.report.progress import Display
        from lowmem_ft.report.quiet import quiet_libraries

        quiet_libraries()
        display = Display()
        if dry_run:
            display.line(dump_recipe(loaded.recipe))
            get_ready(loaded, display, dry_run=True)
            display.line("dry run: no weight was read, nothing was trained")
        else:
            train(loaded, display, command, accept_changes)
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        print("stopped; checkpoints that were written are whole", file=sys.stderr)
        return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lowmem_ft.train", description="Fine-tune by a recipe.")
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and the header, then stop")
    parser.add_argument("--accept-changes", action="store_true", help="resume though what is learned changes")
    options = parser.parse_intermixed_args(arguments)
    command = sys.argv if arguments is None else ["lowmem-ft", "train", *arguments]
    load = partial(load_recipe, options.recipe, options.overrides)
    return start(load, command, options.dry_run, options.accept_changes)


if __name__ == "__main__":
    sys.exit(main())
