"""Examples are tokenized by several processes, and come out in the order and form in which one process gives them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from lowmem_ft.data.formats import Example, LeftOut, TokenizedExample
from lowmem_ft.errors import DataError, Problem

Outcome = TokenizedExample | LeftOut | DataError | Sequence[TokenizedExample | LeftOut]
"""What comes of one example: tokens, a reason to leave it out, an error, or several parts, as of a long document."""

Tokenize = Callable[[Sequence[Example]], Sequence[Outcome]]
"""Tokenizes a batch: one outcome for each example, in their order, each a function of its example alone.

It may raise a `DataError` for the whole batch instead; nothing is written then, but the rest is still looked at.
"""

_CHUNK_EXAMPLES = 256
_CHUNK_CHARACTERS = 2**20
# Fewer chunks than these are tokenized faster here than after a pool has started (about 0.1 s with fork, 2 s without).
_POOL_CHUNKS = 8


@dataclass(frozen=True)
class Packed:
    """The outcomes of some examples in a few arrays, which cost little to send from process to process.

    Attributes:
        input_ids: ids of all rows end to end, int32.
        weights: float32, as long.
        lengths: tokens of each row, int32.
        trained: positions of each row that are targets: weight above 0, the first position never. int32.
        lines: physical line of each row, int64.
        sources: source of each row, int32.
        files: file of each row.
        left_out: examples without a row.
        problems: examples that are errors.
        examples: examples that went in.
    """

    input_ids: np.ndarray
    weights: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    lines: np.ndarray
    sources: np.ndarray
    files: list[str]
    left_out: list[LeftOut]
    problems: list[Problem]
    examples: int


def tokenize_in_order(examples: Iterable[Example], tokenize: Tokenize, workers: int | None = None) -> Iterator[Packed]:
    """Tokenizes examples chunk by chunk; the chunks and their order do not depend on the number of workers.

    Memory: two chunks a worker (256 examples or about 1 MiB of text each), their tokens, and the longest example.

    Args:
        examples: taken as they are needed, not ahead.
        tokenize: called with a batch. With several workers it must survive a fork, and be picklable where there is no
            fork (Windows, macOS); the threads of a fast tokenizer are off there, since the processes take their place.
        workers: processes; 1 is this one alone, None as many as there are cores. Few examples are never sent out.

    Raises:
        DataError: a worker was killed, most likely for want of memory.
    """
    workers = workers or cores()
    chunks = _chunks(examples)
    first = list(islice(chunks, _POOL_CHUNKS))
    chunks = chain(first, chunks)
    if workers == 1 or len(first) < _POOL_CHUNKS:
        for chunk in chunks:
            yield pack(chunk, tokenize)
        return
    fork = sys.platform == "linux"
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("fork" if fork else "spawn"),
        initializer=_start_worker,
        initargs=(tokenize, os.getpid()),
    )
    waiting: deque[Future[Packed]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            Problem(
                "", f"one of {workers} tokenizing processes was killed, most likely for want of memory", "Free memory."
            )
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pack(examples: Sequence[Example], tokenize: Tokenize) -> Packed:
    """Tokenizes some examples here and packs what comes of them.

    Rows in which no position became a target are left out: a step of nothing but those would divide by zero.

    Raises:
        ValueError: `tokenize` broke its contract: another number of outcomes, or ids and weights of unlike length.
    """
    try:
        outcomes = tokenize(examples)
    except DataError as error:
        return _pack_rows([], [], list(error.problems), len(examples))
    if len(outcomes) != len(examples):
        raise ValueError(f"tokenize gave {len(outcomes)} outcomes for {len(examples)} examples")
    rows: list[tuple[TokenizedExample, int]] = []
    left_out: list[LeftOut] = []
    problems: list[Problem] = []
    for example, outcome in zip(examples, outcomes, strict=True):
        for part in (outcome,) if isinstance(outcome, (TokenizedExample, LeftOut, DataError)) else outcome:
            if isinstance(part, TokenizedExample):
                rows.append((part, example.source))
            elif isinstance(part, LeftOut):
                left_out.append(part)
            else:
                problems += part.problems
    return _pack_rows(rows, left_out, problems, len(examples))


def _pack_rows(
    rows: list[tuple[TokenizedExample, int]], left_out: list[LeftOut], problems: list[Problem], examples: int
) -> Packed:
    kept: list[tuple[TokenizedExample, int]] = []
    ids, weights, trained = [], [], []
    for row, source in rows:
        row_ids, row_weights = np.asarray(row.input_ids, np.int32), np.asarray(row.weights, np.float32)
        if row_ids.shape != row_weights.shape or row_ids.ndim != 1:
            raise ValueError(f"{row.file} line {row.line}: ids {row_ids.shape} and weights {row_weights.shape}")
        targets = int(np.count_nonzero(row_weights[1:]))
        if not targets:
            left_out.append(LeftOut("nothing to train", row.file, row.line, len(row_ids)))
            continue
        ids.append(row_ids)
        weights.append(row_weights)
        trained.append(targets)
        kept.append((row, source))
    all_weights = np.concatenate(weights) if weights else np.zeros(0, np.float32)
    if not np.all(np.isfinite(all_weights)) or np.any(all_weights < 0):
        raise ValueError("tokenize gave a weight that is negative or not finite")
    return Packed(
        input_ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
        weights=all_weights,
        lengths=np.array([len(row_ids) for row_ids in ids], np.int32),
        trained=np.array(trained, np.int32),
        lines=np.array([row.line for row, _ in kept], np.int64),
        sources=np.array([source for _, source in kept], np.int32),
        files=[row.file for row, _ in kept],
        left_out=left_out,
        problems=problems,
        examples=examples,
    )


def _chunks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    chunk: list[Example] = []
    characters = 0
    for example in examples:
        chunk.append(example)
        characters += _characters(example)
        if len(chunk) >= _CHUNK_EXAMPLES or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _characters(example: Example) -> int:
    if example.kind == "chat":
        return sum(len(message["content"] or "") for message in example.messages)
    return sum(len(part) for part in (example.prompt, example.completion, example.text))


_worker_tokenize: Tokenize | None = None


def _start_worker(tokenize: Tokenize, parent: int) -> None:
    global _worker_tokenize
    _worker_tokenize = tokenize
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # what was inherited is no garbage, and looking at it would copy its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the pool
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this worker when its parent was killed: it would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(chunk: list[Example]) -> Packed:
    assert _worker_tokenize is not None
    return pack(chunk, _worker_tokenize)
