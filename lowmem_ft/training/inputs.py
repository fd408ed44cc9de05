"""What a run reads before any weight: where its model is, its tokenizer, its data, and the audit of these.

Nothing here imports peft or bitsandbytes, so a check of the data starts fast. torch and accelerate come with the
tokenizers of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowmem_ft.data.audit import Audit, make_audit
from lowmem_ft.data.dataset import Split, load_split
from lowmem_ft.data.template import Encoder, make_encoder
from lowmem_ft.model.find import FoundModel, cache_folder, find_model
from lowmem_ft.model.tokenizer import load_tokenizer
from lowmem_ft.recipe.schema import Recipe
from lowmem_ft.training.reporter import Reporter


@dataclass(frozen=True)
class Data:
    """What is trained and evaluated on.

    Attributes:
        train: training examples.
        eval: held-out examples, or None.
        audit: what is known of both.
    """

    train: Split
    eval: Split | None
    audit: Audit


def find(recipe: Recipe, reporter: Reporter) -> FoundModel:
    """The model's folder; the demo model is built here if it has to be.

    Raises:
        ModelError: there is no such model.
    """
    with reporter.working(f"model {recipe.model.path}") as work:
        found = find_model(recipe.model.path, recipe.model.revision, work.now)
        work.result = f"model {recipe.model.path}: {found.how}"
    return found


def make_tokenizer_and_encoder(recipe: Recipe, found: FoundModel) -> tuple[Any, Encoder]:
    """The tokenizer, and how it makes an example into ids.

    Raises:
        ModelError: no tokenizer.
        RecipeError: the template cannot be used.
    """
    tokenizer = load_tokenizer(found, recipe.model.trust_remote_code)
    data = recipe.data
    encoder = make_encoder(
        tokenizer,
        template=data.template,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        train_on=data.train_on,
    )
    return tokenizer, encoder


def load_data(recipe: Recipe, encoder: Encoder, reporter: Reporter) -> Data:
    """Both splits, tokenized, and their audit.

    Raises:
        DataError: a record is wrong, or nothing can be trained.
    """
    splits: list[Split | None] = []
    cache = cache_folder() / "tokens"
    for name, sources in (("training", recipe.data.train), ("held-out", recipe.data.eval)):
        if sources is None:
            splits.append(None)
            continue
        with reporter.working(f"{name} data") as work:
            split = load_split(sources, recipe.data, encoder, cache, lambda done: work.now(f"{done:,} examples"))
            files = ", ".join(file for report in split.reports for file in report.files[:3])
            work.result = f"{name} data: {split.tokens.examples:,} examples from {files}"
        splits.append(split)
    train, held_out = splits
    assert train is not None
    formats = [report.decided for split in splits if split for report in split.reports if report.decided]
    notes = [note for split in splits if split for report in split.reports for note in report.notes]
    notes += [note for split in splits if split for note in split.notes]
    audit = make_audit(
        train.tokens, held_out.tokens if held_out else None, encoder, formats=tuple(dict.fromkeys(formats)), notes=notes
    )
    return Data(train, held_out, audit)
