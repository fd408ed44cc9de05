"""What will be trained, said before it is: counts, lengths, end tokens, duplicates, and examples to look at.

Memory: 8 bytes a sequence for its hash; sequences are looked at one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lowmem_ft.data.cache import LeftOutCount
from lowmem_ft.data.formats import TokenizedExample
from lowmem_ft.data.template import ANSWER_TOO_LONG, IN_PART, PROMPT_TOO_LONG, TOO_LONG, Encoder
from lowmem_ft.errors import DataError, Problem

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_EXAMPLES = 3
PERCENTILES = (5, 25, 50, 75, 95, 99)
_BARS = 8
_TOO_LONG = (TOO_LONG, ANSWER_TOO_LONG, PROMPT_TOO_LONG)


class Tokenized(Protocol):
    """The tokens of a data set, such as `cache.TokenizedData`.

    Attributes:
        lengths: tokens of each sequence.
        trained: trained positions of each sequence.
        examples: records that were read, left out or not.
        left_out: what was left out, by reason.
    """

    lengths: np.ndarray
    trained: np.ndarray
    examples: int
    left_out: tuple[LeftOutCount, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TokenizedExample: ...


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of an example that are all trained, or all not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownExample:
    """An example decoded, to look at.

    Attributes:
        where: file and line.
        tokens: its length.
        stretches: its text in order.
    """

    where: str
    tokens: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class SplitAudit:
    """What is known of the training data, or of the evaluation data.

    Attributes:
        setting: `data.train` or `data.eval`.
        records: records read.
        kept: records of which something is trained.
        sequences: training sequences they became.
        left_out: records left out, by reason.
        in_part: parts of kept records that were left out, by reason.
        tokens: tokens of all sequences.
        trained_tokens: trained positions of all sequences.
        longest_tokens: the longest sequence.
        percentiles: percent and length in tokens.
        bars: histogram of lengths: shortest, longest, number of sequences.
        ended: sequences whose last trained token is one at which generation ends.
        begun: sequences that begin with the beginning-of-sequence token.
        begun_twice: sequences that begin with it twice.
        unknown_tokens: positions that hold the tokenizer's unknown token.
        duplicates: sequences equal to an earlier one.
        shown: the first few, decoded.
    """

    setting: str
    records: int
    kept: int
    sequences: int
    left_out: tuple[LeftOutCount, ...]
    in_part: tuple[LeftOutCount, ...]
    tokens: int
    trained_tokens: int
    longest_tokens: int
    percentiles: tuple[tuple[int, int], ...]
    bars: tuple[tuple[int, int, int], ...]
    ended: int
    begun: int
    begun_twice: int
    unknown_tokens: int
    duplicates: int
    shown: tuple[ShownExample, ...]


@dataclass(frozen=True)
class Audit:
    """What will be trained and evaluated.

    Attributes:
        train: the training data.
        eval: the evaluation data, if there is any.
        overlap: evaluation sequences that are training sequences too.
        begin: text of the beginning-of-sequence token, "" if the tokenizer has none.
        end: text of the token that ends an answer.
        formats: what was decided about the form of the records, a line each.
        notes: what else the user should know, a line each.
    """

    train: SplitAudit
    eval: SplitAudit | None
    overlap: int
    begin: str
    end: str
    formats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def render(self, console: Console) -> None:
        """Prints the audit, see `audit_text.render`."""
        from lowmem_ft.data.audit_text import render

        render(self, console)

    def lines(self) -> list[str]:
        """The audit as text, trained text in [[ ]]."""
        from lowmem_ft.data.audit_text import audit_lines

        return [line.plain for line in audit_lines(self, colour=False)]


def make_audit(
    train: Tokenized,
    eval: Tokenized | None,
    encoder: Encoder,
    *,
    formats: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Audit:
    """Looks at every sequence once.

    Args:
        train: training data.
        eval: evaluation data, or None.
        encoder: what made them.
        formats: lines about the form of the records.
        notes: further lines, such as those of `text_watch.TextWatch`.

    Raises:
        DataError: nothing of one of the two can be trained; with the reasons, the first place of each, what to write.
    """
    problems = [
        problem
        for setting, data in (("data.train", train), ("data.eval", eval))
        if data is not None and not len(data)
        for problem in _why_nothing(setting, data, encoder.max_tokens)
    ]
    if problems:
        raise DataError(problems)
    train_audit, train_hashes = _look_at("data.train", train, encoder)
    eval_audit, overlap = None, 0
    if eval is not None:
        eval_audit, eval_hashes = _look_at("data.eval", eval, encoder)
        overlap = int(np.isin(eval_hashes, train_hashes).sum())
    return Audit(
        train_audit,
        eval_audit,
        overlap,
        encoder.tokenizer.bos_token or "",
        encoder.decode([encoder.end_token_id]),
        tuple(formats),
        (*encoder.notes, *notes),
    )


def _why_nothing(setting: str, data: Tokenized, max_tokens: int) -> list[Problem]:
    if not data.left_out:
        return [Problem(setting, "no examples", "Name a file that has some.")]
    problems = []
    for one in data.left_out:
        first = one.first[0] if one.first else None
        where = f"{first.file} line {first.line}" if first else setting
        if one.reason in _TOO_LONG:
            what = (
                f"0 of {data.examples} examples left at max_tokens {max_tokens} ({setting}): "
                f"{one.count} are {one.reason}, and the longest has {one.longest_tokens} tokens"
            )
            instead = f"Write data.max_tokens: {one.longest_tokens}, or data.too_long: cut_prompt"
        else:
            what = f"0 of {data.examples} examples left ({setting}): {one.reason} in {one.count}"
            instead = "Give each record an answer, and name its turns in data.train_on"
        problems.append(Problem(where, what, instead))
    return problems


def _look_at(setting: str, data: Tokenized, encoder: Encoder) -> tuple[SplitAudit, np.ndarray]:
    bos, unknown = encoder.tokenizer.bos_token_id, _plain_unknown(encoder.tokenizer)
    stops = set(encoder.stop_token_ids)
    hashes = np.zeros(len(data), np.uint64)
    ended = begun = begun_twice = unknown_tokens = 0
    for index in range(len(data)):
        example = data[index]
        ids = np.asarray(example.input_ids, np.int32)
        hashes[index] = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
        ended += int(ids[-1]) in stops and bool(example.weights[-1] > 0)
        if bos is not None and ids[0] == bos:
            begun += 1
            begun_twice += len(ids) > 1 and ids[1] == bos
        if unknown is not None:
            unknown_tokens += int(np.count_nonzero(ids == unknown))
    in_part = tuple(one for one in data.left_out if one.reason.startswith(IN_PART))
    left_out = tuple(one for one in data.left_out if not one.reason.startswith(IN_PART))
    percentiles = np.percentile(data.lengths, PERCENTILES, method="inverted_cdf").astype(int).tolist()
    split = SplitAudit(
        setting=setting,
        records=data.examples,
        kept=data.examples - sum(one.count for one in left_out),
        sequences=len(data),
        left_out=left_out,
        in_part=in_part,
        tokens=int(data.lengths.sum(dtype=np.int64)),
        trained_tokens=int(data.trained.sum(dtype=np.int64)),
        longest_tokens=int(data.lengths.max()),
        percentiles=tuple(zip(PERCENTILES, percentiles, strict=True)),
        bars=_bars(data.lengths),
        ended=ended,
        begun=begun,
        begun_twice=begun_twice,
        unknown_tokens=unknown_tokens,
        duplicates=len(hashes) - len(np.unique(hashes)),
        shown=tuple(show_example(data[index], encoder) for index in range(min(SHOWN_EXAMPLES, len(data)))),
    )
    return split, hashes


def _plain_unknown(tokenizer: Any) -> int | None:
    """The unknown token, unless the tokenizer uses the same token for something else."""
    unknown = tokenizer.unk_token_id
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return None if unknown in others else unknown


def _bars(lengths: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // _BARS)
    starts = range(shortest, longest + 1, width)
    counts = np.bincount((lengths - shortest) // width, minlength=len(starts))
    return tuple((start, start + width - 1, int(count)) for start, count in zip(starts, counts, strict=True))


def show_example(example: TokenizedExample, encoder: Encoder) -> ShownExample:
    """An example decoded, cut where what is trained begins and ends.

    Args:
        example: any example.
        encoder: what made it.
    """
    ids = [int(one) for one in example.input_ids]
    trained = [bool(weight > 0) for weight in example.weights]
    borders = [index for index in range(len(ids)) if index == 0 or trained[index] != trained[index - 1]]
    stretches = [
        Stretch(encoder.decode(ids[start:stop]), trained[start])
        for start, stop in zip(borders, [*borders[1:], len(ids)], strict=True)
    ]
    return ShownExample(f"{example.file} line {example.line}", len(ids), tuple(stretches))
