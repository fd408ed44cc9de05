"""Sequences over max_tokens: what goes, and what never goes. Plain functions of ids, weights and messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lowmem_ft.data.messages import Message

_HALF_LETTER = "\ufffd"
_LETTER_TOKENS = 4  # a letter is at most four bytes, and a token holds at least one


def cut_answer(
    ids: list[int], weights: list[float], max_tokens: int, decode: Callable[[list[int]], str]
) -> tuple[list[int], list[float]]:
    """The first `max_tokens` positions, less those of a letter cut in two. A cut answer loses its end token too.

    Args:
        ids: longer than `max_tokens`.
        weights: one for each id.
        max_tokens: positions to keep at most.
        decode: ids to text.

    Returns:
        Ids and weights up to the last trained position; empty if none is left.
    """
    end = max_tokens
    for shorter in range(_LETTER_TOKENS):
        tail = decode(ids[max(0, end - shorter - 8) : end - shorter])
        if not tail.endswith(_HALF_LETTER):
            end -= shorter
            break
    while end and not weights[end - 1]:
        end -= 1
    return ids[:end], weights[:end]


def cut_front(
    ids: list[int], weights: list[float], max_tokens: int, keep: int, decode: Callable[[list[int]], str]
) -> tuple[list[int], list[float]] | None:
    """The first `keep` positions and the last ones, `max_tokens` together at most: the front of the prompt goes.

    Args:
        ids: longer than `max_tokens`.
        weights: one for each id; the first trained position must stay and have one before it.
        max_tokens: positions to keep at most.
        keep: positions at the front that stay, such as the beginning-of-sequence token.
        decode: ids to text.

    Returns:
        Ids and weights, or None if the trained positions do not fit with one position before them.
    """
    answer = next(index for index, weight in enumerate(weights) if weight)
    start = len(ids) - (max_tokens - keep)
    if start > answer - (0 if keep else 1):
        return None
    for later in range(_LETTER_TOKENS):
        if start + later >= answer or not decode(ids[start + later : start + later + 8]).startswith(_HALF_LETTER):
            start += later
            break
    return ids[:keep] + ids[start:], weights[:keep] + weights[start:]


def split_document(length: int, max_tokens: int) -> list[range]:
    """Positions of the pieces of a document: each at most `max_tokens` long, together all of it, none of a single token
    if that can be helped, because a single token has nothing to be predicted from.

    Args:
        length: tokens of the document, at least 1.
        max_tokens: at least 2.
    """
    ends = [*range(max_tokens, length, max_tokens), length]
    if len(ends) > 1 and ends[-1] - ends[-2] == 1 and max_tokens > 2:
        ends[-2] -= 1
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def leading_system(messages: Sequence[Message]) -> int:
    """How many messages at the start are system or developer turns."""
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    return count


def without_messages(
    messages: Sequence[Message], weights: Mapping[int, float], start: int, stop: int
) -> tuple[list[Message], dict[int, float]]:
    """Messages without those from `start` to `stop`, and the weights at their new indexes."""
    kept = {
        index if index < start else index - (stop - start): weight
        for index, weight in weights.items()
        if not start <= index < stop
    }
    return [*messages[:start], *messages[stop:]], kept


def without_first_exchange(
    messages: Sequence[Message], weights: Mapping[int, float]
) -> tuple[list[Message], dict[int, float]] | None:
    """The conversation without its first question and all up to the next one; system turns at the start stay.

    Returns:
        Messages and weights by their new indexes; None if the last trained answer would go, or lose its question.
    """
    start = leading_system(messages)
    last = max(weights)
    questions = (index for index in range(start + 1, last) if messages[index]["role"] == "user")
    stop = next(questions, None)
    return None if stop is None else without_messages(messages, weights, start, stop)
