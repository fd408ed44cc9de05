"""Whether an export answers as what was trained: next-token probabilities of both, on the same passages.

What training changed is the measure: the divergence between the trained model and its base alone. An export that
diverges from the trained model by 3 % of that loses 3 % of what training changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowmem_ft.errors import ExportError, Problem
from lowmem_ft.export.opened import Opened
from lowmem_ft.model.generate import Answer, generate_answers

MOST_PROMPTS = 8
ANSWER_TOKENS = 32
"""Tokens of each answer that are compared."""
LOST = 0.05
"""An export that should be the trained model in other bytes may lose so much of what training changed."""
LOST_WITH_BASE = 0.5
"""An export into another base than the trained one (unquantized for quantized) may differ by so much."""
FLOOR = 1e-6
"""Nats a token under which two models count as equal, whatever training changed: sums in another order make less."""


@dataclass(frozen=True)
class Passage:
    """A prompt and an answer.

    Attributes:
        ids: both.
        start: length of the prompt; predictions of what follows are compared.
    """

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Comparison:
    """One model against another, over all compared positions.

    Attributes:
        name: what is compared with what.
        positions: predictions that were compared.
        kl: mean KL divergence from the first model to the second, in nats.
        same_top: share of positions where both find the same token the most likely.
        largest: largest change of a log-probability of a token that the first finds likelier than 1 in 1000.
        changed: mean divergence from the trained model to its base alone; None where there is no base.
        same_texts: answers written by both that are equal, character for character.
        texts: answers that were written.
    """

    name: str
    positions: int
    kl: float
    same_top: float
    largest: float
    changed: float | None = None
    same_texts: int = 0
    texts: int = 0

    @property
    def lost(self) -> float | None:
        """What part of the change by training the second model loses; None where that is not known."""
        return None if self.changed is None else self.kl / self.changed if self.changed > 0 else float(self.kl > FLOOR)

    def lines(self) -> list[str]:
        """For people."""
        lost = "" if self.lost is None else f"; it loses {self.lost:.2%} of what training changed"
        texts = f", {self.same_texts} of {self.texts} written answers equal" if self.texts else ""
        return [
            f"{self.name}: KL {self.kl:.2g} nats a token over {self.positions} tokens{lost}",
            f"  same most likely token at {self.same_top:.1%} of them, largest change of a log-probability "
            f"{self.largest:.2g}{texts}",
        ]

    def record(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "lost": self.lost}


def make_passages(ids: Sequence[Sequence[int]], answers: Sequence[Answer], opened: Opened) -> list[Passage]:
    """Each prompt with the answer that the trained model gives greedily.

    Args:
        ids: of the prompts.
        answers: from `write_answers`, of the trained model.
        opened: that model.
    """
    passages = []
    for prompt, answer in zip(ids, answers, strict=True):
        written = opened.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        end = opened.encoder.stop_token_ids[:1] if answer.ended else []
        passages.append(Passage((*prompt, *written, *end), len(prompt)))
    return passages


def write_answers(opened: Opened, ids: Sequence[Sequence[int]], answer_tokens: int = ANSWER_TOKENS) -> list[Answer]:
    """Greedy answers to prompts, by their ids."""
    with opened.running():
        return generate_answers(
            opened.model,
            opened.tokenizer,
            ids,
            [""] * len(ids),
            opened.encoder.stop_token_ids,
            max_new_tokens=answer_tokens,
            device=opened.device,
        )


def predictions(opened: Opened, passages: Sequence[Passage], *, adapter: bool = True) -> list[Tensor]:
    """Log-probabilities of what follows, (tokens of the answer, V) for each passage, float32 on the CPU.

    Args:
        opened: a model.
        passages: to predict.
        adapter: False: the base alone.
    """
    found = []
    with opened.running(adapter):
        for passage in passages:
            ids = torch.tensor([passage.ids], device=opened.device)
            logits = opened.model(input_ids=ids, use_cache=False).logits[0, passage.start - 1 : -1]
            found.append(F.log_softmax(logits.float(), dim=-1).cpu())
    return found


def compare(name: str, first: Sequence[Tensor], second: Sequence[Tensor], changed: float | None = None) -> Comparison:
    """Compare the predictions of two models on the same passages.

    Args:
        name: what is compared with what.
        first: of the trained model.
        second: of the export.
        changed: what training changed.

    Raises:
        ExportError: they have vocabularies of different sizes.
    """
    kl, same, largest, positions = 0.0, 0, 0.0, 0
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            what = f"one has {one.shape[1]:,} tokens and the other {other.shape[1]:,}"
            raise ExportError(Problem(name, what, "Compare models with one tokenizer"))
        kl += float(F.kl_div(other, one, log_target=True, reduction="sum").clamp(min=0))
        same += int((one.argmax(-1) == other.argmax(-1)).sum())
        likely = one > -6.9
        largest = max(largest, float((one - other)[likely].abs().max()))
        positions += len(one)
    return Comparison(name, positions, kl / positions, same / positions, largest, changed)


def refusal(comparison: Comparison, most_lost: float) -> str | None:
    """Why an export is not what was trained, or None.

    Args:
        comparison: with what training changed.
        most_lost: part of that change that may be lost.
    """
    if not comparison.kl >= 0:  # also where it is no number
        return f"{comparison.name}: the export gives no numbers"
    if comparison.kl <= FLOOR or comparison.lost is None or comparison.lost <= most_lost:
        return None
    return (
        f"{comparison.name}: {comparison.lost:.0%} of what training changed is lost, and at most {most_lost:.0%} may be"
    )


@dataclass(frozen=True)
class Reference:
    """What an export is held against.

    Attributes:
        name: in words.
        passages: what is predicted.
        trained: predictions of the trained model.
        changed: mean divergence from them to the base's.
        most_lost: part of that change that the export may lose.
        answers: what the trained model writes.
    """

    name: str
    passages: Sequence[Passage]
    trained: Sequence[Tensor]
    changed: float | None
    most_lost: float | None
    answers: Sequence[Answer]

    def against(self, opened: Opened) -> Comparison:
        """Compare an export with it."""
        predicted = predictions(opened, self.passages)
        found = compare(self.name, self.trained, predicted, self.changed)
        written = write_answers(opened, [passage.ids[: passage.start] for passage in self.passages])
        same = sum(a.text == b.text for a, b in zip(written, self.answers, strict=True))
        return Comparison(**{**asdict(found), "same_texts": same, "texts": len(written)})


def make_reference(
    name: str, opened: Opened, ids: Sequence[Sequence[int]], most_lost: float | None, earlier: Reference | None = None
) -> Reference:
    """Predictions of a trained model, and how far they are from its base's.

    Args:
        name: in words.
        opened: the trained model.
        ids: of the prompts.
        most_lost: see `Reference`.
        earlier: another reference whose passages are taken.
    """
    answers = write_answers(opened, ids)
    passages = earlier.passages if earlier else make_passages(ids, answers, opened)
    trained = predictions(opened, passages)
    changed = None
    if opened.has_adapter:
        changed = compare(name, trained, predictions(opened, passages, adapter=False)).kl
    return Reference(name, passages, trained, changed, most_lost, answers)


def check(
    references: Sequence[Reference], opened: Opened, force: bool, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Hold an export against its references.

    Args:
        references: at least one.
        opened: the export.
        force: let it pass whatever it loses.
        say: gets the lines for people.

    Returns:
        Each comparison, for a file.

    Raises:
        ExportError: it loses more than it may, and `force` is not set.
    """
    found = [(reference, reference.against(opened)) for reference in references]
    refused = []
    for reference, comparison in found:
        for line in comparison.lines():
            say(line)
        if reference.most_lost is not None:
            refused.append(refusal(comparison, reference.most_lost))
    reasons = [reason for reason in refused if reason]
    if reasons and not force:
        instead = "Merge with --dtype float32 or --base trained, or accept it by --force"
        raise ExportError([*(Problem("", reason) for reason in reasons), Problem("", instead)])
    for reason in reasons:
        say(f"accepted by --force: {reason}")
    return {comparison.name: comparison.record() for _, comparison in found}
