"""From the settings of a recipe to the objects that the loop runs on. Each function makes one thing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import PeftModel
from transformers import PreTrainedModel

from lowmem_ft.data.batches import Batch, Row, StepOrder, count_steps, make_row, micro_batches
from lowmem_ft.data.dataset import Split
from lowmem_ft.errors import Problem, RecipeError
from lowmem_ft.memory import attention
from lowmem_ft.memory.lora import apply_lean_lora
from lowmem_ft.memory.measure import MemoryMeter
from lowmem_ft.memory.mlp import apply_lean_mlp
from lowmem_ft.memory.products import HALVES, product_dtype
from lowmem_ft.memory.recompute import Policy
from lowmem_ft.model.adapters import AdapterReport, AdapterSettings, add_adapters
from lowmem_ft.model.base_record import BaseRecord, record_base
from lowmem_ft.model.facts import make_empty_model, predict_bytes
from lowmem_ft.model.find import FoundModel, fetch_weights
from lowmem_ft.model.kbit import PreparationReport, predict_preparation, prepare_for_kbit_training
from lowmem_ft.model.load import BytesByPart, count_bytes, load_model
from lowmem_ft.recipe.load import LoadedRecipe
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.causal import CausalLoss
from lowmem_ft.training.optim import make_optimizer, make_schedule
from lowmem_ft.training.reporter import Reporter

CPU_ROW_LENGTHS = 16
"""Row lengths that occur on CPU with 16-bit products, at most; see `fill_up`. Costs 1/32 of the tokens on average."""


@dataclass(frozen=True)
class PreparedModel:
    """A model with its adapters, before the optimizer.

    Attributes:
        model: peft around the base.
        bytes: of the base as it was loaded, by part.
        preparation: what the casts did.
        adapters: what trains.
        not_packed: why rows hold one example each, or None where they hold several.
        attends_apart: examples are attended each alone, by `apply_packed_attention`.
    """

    model: PeftModel
    bytes: BytesByPart
    preparation: PreparationReport
    adapters: AdapterReport
    not_packed: str | None
    attends_apart: bool

    @property
    def packed(self) -> bool:
        """Whether rows may hold several examples."""
        return self.not_packed is None


def make_accelerator(loaded: LoadedRecipe) -> tuple[Accelerator, MemoryMeter]:
    """The device and its mixed precision; seeds everything that is drawn from now on.

    Raises:
        RecipeError: the device cannot do the precision.
    """
    precision = loaded.recipe.train.precision
    on_cuda = torch.cuda.is_available()
    if precision == "fp16" and not on_cuda:
        what = "fp16 needs loss scaling on a GPU, and there is none here"
        raise RecipeError(Problem(loaded.where("train.precision"), what, "Write precision: bf16, or fp32"))
    if precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        what = f"{torch.cuda.get_device_name()} does not compute in bf16"
        raise RecipeError(Problem(loaded.where("train.precision"), what, "Write precision: fp16"))
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision, cpu=not on_cuda, gradient_accumulation_steps=1
    )
    if accelerator.num_processes > 1:
        what = f"{accelerator.num_processes} processes were started, and a run is one process so far"
        raise RecipeError(Problem("", what, "Start it with: python -m lowmem_ft.train RECIPE"))
    set_seed(loaded.recipe.seed)
    return accelerator, MemoryMeter(accelerator.device)


def make_order(recipe: Recipe, train: Split) -> StepOrder:
    """Which examples each step sees, and how many steps there are."""
    size = len(train.indices(recipe.seed, 0))
    settings = recipe.train
    return StepOrder(
        size=size,
        batch_size=settings.batch_size,
        steps=count_steps(size, settings.batch_size, settings.epochs, settings.steps),
        seed=recipe.seed,
        shuffle=settings.shuffle,
        indices=train.indices,
        lengths=train.tokens.lengths if recipe.data.length_grouping else None,
    )


def load_prepared(recipe: Recipe, found: FoundModel, device: torch.device, reporter: Reporter) -> PreparedModel:
    """Load, quantize, prepare, add adapters.

    Raises:
        ModelError: one of these cannot be done.
    """
    settings = recipe.model
    if found.hub_id is not None:
        with reporter.working(f"downloading the weights of {found.hub_id}"):
            fetch_weights(found)
    with reporter.working(f"loading in {settings.quantization}"):
        model = load_model(
            found,
            quantization=settings.quantization,
            double_quant=settings.double_quant,
            dtype=settings.dtype,
            device=str(device),
            trust_remote_code=settings.trust_remote_code,
        )
    return prepare(recipe, model, count_bytes(model))


def prepare(recipe: Recipe, model: PreTrainedModel, by_part: BytesByPart) -> PreparedModel:
    """Prepare a loaded model, with numbers or on the meta device, and add adapters. In place.

    Raises:
        ModelError: one of these cannot be done.
    """
    model = prepare_for_kbit_training(model, recompute=_recompute(recipe), **recipe.prepare.model_dump())
    preparation = cast(PreparationReport, model.preparation_report)
    attends_apart = attention.why_not_packed(model) is None
    if attends_apart:
        attention.apply_packed_attention(model)
    adapted, adapters = _adapt(recipe, model)
    if recipe.memory.lean:
        apply_lean_lora(adapted)
        apply_lean_mlp(adapted, slice_tokens=recipe.memory.mlp_slice_tokens)
    return PreparedModel(adapted, by_part, preparation, adapters, why_not_packed(recipe, model), attends_apart)


def describe_base(recipe: Recipe, found: FoundModel) -> BaseRecord:
    """What is trained on, to know it again later; its weights are here.

    Raises:
        ModelError: they cannot be read.
    """
    settings = recipe.model
    return record_base(
        found,
        model=settings.path,
        quantization=settings.quantization,
        double_quant=settings.double_quant,
        dtype=settings.dtype,
        precision=recipe.train.precision,
    )


def predict_prepared(recipe: Recipe, found: FoundModel) -> PreparedModel:
    """What `load_prepared` will give, on the meta device: only the model's configuration is read.

    Raises:
        ModelError: as `load_prepared`, as far as it can be known without weights.
    """
    settings = recipe.model
    model = make_empty_model(found, settings.dtype, settings.trust_remote_code)
    by_part = predict_bytes(model, settings.quantization, settings.double_quant)
    quantized = settings.quantization != "none"
    preparation = predict_preparation(
        model, quantized=quantized, recompute=_recompute(recipe), **recipe.prepare.model_dump()
    )
    adapted, adapters = _adapt(recipe, model)
    apart = attention.why_not_packed(model) is None
    return PreparedModel(adapted, by_part, preparation, adapters, why_not_packed(recipe, model), apart)


def _recompute(recipe: Recipe) -> Policy:
    return "block" if recipe.memory.recompute == "auto" else recipe.memory.recompute


def _adapt(recipe: Recipe, model: PreTrainedModel) -> tuple[PeftModel, AdapterReport]:
    settings = AdapterSettings(**recipe.adapter.model_dump())
    on_meta = next(model.parameters()).is_meta  # then adapters are too: those of a large model are large themselves
    with torch.device("meta") if on_meta else nullcontext():
        return add_adapters(model, settings, autocast=recipe.train.precision != "fp32")


def why_not_packed(recipe: Recipe, model: torch.nn.Module) -> str | None:
    """Why every example gets a row of its own, or None where examples share rows."""
    return attention.why_not_packed(model) if recipe.data.packing else "data.packing is false"


def make_trainable(
    recipe: Recipe, prepared: PreparedModel, accelerator: Accelerator, steps: int
) -> tuple[torch.nn.Module, Any, Any]:
    """The loss module in training mode, the optimizer (both prepared for the device) and the schedule.

    Raises:
        ModelError: the model's head does something that our loss does not know.
    """
    chunk = recipe.memory.loss_chunk_tokens
    multiple = row_multiple(recipe, accelerator.device)
    loss = CausalLoss(prepared.model, None if chunk == "auto" else chunk, prepared.attends_apart, multiple)
    with accelerator.autocast():
        loss.check_head()
    optimizer = make_optimizer(loss, recipe.train.lr, recipe.train.weight_decay)
    schedule = make_schedule(optimizer, recipe.train.schedule, steps, recipe.train.warmup_ratio)
    model, optimizer = accelerator.prepare(loss, optimizer, device_placement=[False, False])
    model.train()  # `from_pretrained` leaves the base in evaluation mode: no dropout, and no recompute
    return model, optimizer, schedule


def micro_batch_tokens(recipe: Recipe) -> int:
    """Most tokens of a row."""
    chosen = recipe.train.micro_batch_tokens
    return recipe.data.max_tokens if chosen == "auto" else chosen


def row_multiple(recipe: Recipe, device: torch.device) -> int:
    """Rows are filled up to a multiple of so many tokens, where the device profits from few shapes."""
    if device.type != "cpu" or recipe.train.precision == "fp32":
        return 1
    if product_dtype(torch.bfloat16, device) not in HALVES:
        return 1  # products are widened to fp32, for which nothing is kept a shape
    return max(1, micro_batch_tokens(recipe) // CPU_ROW_LENGTHS)


def rows_of_step(
    recipe: Recipe, split: Split, order: StepOrder, step: int, accelerator: Accelerator, packed: bool
) -> list[Row]:
    """This process' rows of a step counted from 1. Examples go round the processes; one without any gets an empty turn.

    An empty turn is a row whose labels are all untrained: the process takes part in the sum of gradients with zero.
    """
    everyone = order.examples(step)
    world, rank = accelerator.num_processes, accelerator.process_index
    mine = everyone[rank::world]
    if not mine:
        row = make_row([split.tokens[everyone[0]]])
        nothing = torch.full_like(row.labels, -100)
        none = torch.empty(0, dtype=torch.int64)
        return [Row(row.input_ids, row.position_ids, nothing, None, row.lengths, 0, 0.0, (), none)]
    examples = [split.tokens[index] for index in mine]
    groups = micro_batches([len(e.input_ids) for e in examples], micro_batch_tokens(recipe), packed)
    return [make_row([examples[i] for i in group]) for group in groups]


def held_out_rows(recipe: Recipe, split: Split, packed: bool) -> Iterator[Row]:
    """All held-out examples, in rows of the size that training uses."""
    batch: list[int] = []
    for index in range(len(split.tokens)):
        batch.append(index)
        if len(batch) == recipe.train.batch_size or index == len(split.tokens) - 1:
            lengths = [int(split.tokens.lengths[i]) for i in batch]
            for group in micro_batches(lengths, micro_batch_tokens(recipe), packed):
                yield make_row([split.tokens[batch[i]] for i in group])
            batch = []


def describe_batch(
    recipe: Recipe, split: Split, order: StepOrder, prepared: PreparedModel, device: torch.device
) -> Batch:
    """A step in numbers; micro-batches on average over the first epoch, at most its first 200 steps."""
    most = micro_batch_tokens(recipe)
    steps = range(1, min(order.steps, order.steps_per_epoch, 200) + 1)
    lengths = [[int(split.tokens.lengths[i]) for i in order.examples(step)] for step in steps]
    counts = [len(micro_batches(step, most, prepared.packed)) for step in lengths]
    mean = math.fsum(counts) / len(counts)
    epochs, multiple = order.epoch_of(order.steps), row_multiple(recipe, device)
    return Batch(order.batch_size, mean, most, order.steps, epochs, multiple, prepared.not_packed)


def is_due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0
