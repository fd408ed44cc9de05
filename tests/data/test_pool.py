"""Tokenizing in several processes gives what one process gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from lowmem_ft.data.formats import Example, LeftOut, TokenizedExample
from lowmem_ft.data.pool import Outcome, Packed, cores, pack, tokenize_in_order
from lowmem_ft.errors import DataError, Problem


def _examples(count: int) -> list[Example]:
    return [
        Example("text", "x.jsonl", line, text=f"{line} " * (line % 7 + 1), source=line % 3) for line in range(count)
    ]


def tokenize(examples: Sequence[Example]) -> list[Outcome]:
    """One token a letter; some examples are left out, some become several."""
    outcomes: list[Outcome] = []
    for example in examples:
        ids = [ord(letter) for letter in example.text]
        row = TokenizedExample(ids, [0.0] + [1.0] * (len(ids) - 1), example.file, example.line)
        if example.line % 5 == 4:
            outcomes.append(LeftOut("every fifth", example.file, example.line, len(ids)))
        elif example.line % 5 == 3:
            outcomes.append([row, LeftOut("a part", example.file, example.line), row])
        else:
            outcomes.append(row)
    return outcomes


def _joined(packed: Iterator[Packed]) -> dict[str, list]:
    chunks = list(packed)
    arrays = ("input_ids", "weights", "lengths", "trained", "lines", "sources")
    joined = {name: np.concatenate([getattr(chunk, name) for chunk in chunks]).tolist() for name in arrays}
    for name in ("files", "left_out", "problems"):
        joined[name] = [one for chunk in chunks for one in getattr(chunk, name)]
    joined["examples"] = [chunk.examples for chunk in chunks]
    return joined


def test_outcomes_do_not_depend_on_the_workers() -> None:
    examples = _examples(4000)
    alone = _joined(tokenize_in_order(examples, tokenize, workers=1))
    assert sum(alone["examples"]) == 4000
    assert len(alone["lengths"]) == 4000  # of five examples three are one row, one is two and one none
    for workers in (2, 3):
        assert _joined(tokenize_in_order(examples, tokenize, workers)) == alone


def test_examples_are_taken_as_they_are_needed() -> None:
    taken = 0

    def examples() -> Iterator[Example]:
        nonlocal taken
        for example in _examples(20_000):
            taken += 1
            yield example

    packed = tokenize_in_order(examples(), tokenize, workers=2)
    next(packed)
    assert taken <= 256 * 12
    packed.close()


def test_few_examples_start_no_process() -> None:
    pids: list[int] = []

    def where(examples: Sequence[Example]) -> list[Outcome]:
        pids.append(os.getpid())
        return tokenize(examples)

    list(tokenize_in_order(_examples(1000), where, workers=8))
    assert set(pids) == {os.getpid()}


def test_long_texts_make_small_chunks() -> None:
    examples = [Example("text", "x", line, text="x" * 400_000) for line in range(7)]
    assert [chunk.examples for chunk in tokenize_in_order(examples, tokenize, workers=1)] == [3, 3, 1]


def test_a_row_without_a_target_is_left_out() -> None:
    def rows(examples: Sequence[Example]) -> list[Outcome]:
        weights = [[1.0, 0.0], [0.0, 0.5], [1.0, 1.0]]
        return [TokenizedExample([1, 2], one, "x", line) for line, one in enumerate(weights)]

    packed = pack(_examples(3), rows)
    assert packed.trained.tolist() == [1, 1]
    assert packed.left_out == [LeftOut("nothing to train", "x", 0, 2)]


def test_errors_of_a_batch_and_of_an_example_are_problems() -> None:
    def refuse(examples: Sequence[Example]) -> list[Outcome]:
        if examples[0].line == 0:
            raise DataError([Problem("x line 0", "bad"), Problem("x line 1", "bad")])
        return [DataError(Problem(example.where(), "bad")) for example in examples]

    assert [problem.where for problem in pack(_examples(2), refuse).problems] == ["x line 0", "x line 1"]
    assert [problem.where for problem in pack(_examples(3)[1:], refuse).problems] == [
        "x.jsonl line 1",
        "x.jsonl line 2",
    ]


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([], "0 outcomes for 1"),
        ([TokenizedExample([1, 2], [1.0], "x", 1)], "ids"),
        ([TokenizedExample([1, 2], [1.0, -1.0], "x", 1)], "negative"),
        ([TokenizedExample([1, 2], [1.0, float("nan")], "x", 1)], "not finite"),
    ],
)
def test_a_broken_tokenizer_is_a_programming_error(outcomes: list[Outcome], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack(_examples(1), lambda examples: outcomes)


def test_a_killed_worker_is_our_error() -> None:
    parent = os.getpid()

    def die(examples: Sequence[Example]) -> list[Outcome]:
        if examples[0].line >= 2048 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return tokenize(examples)

    with pytest.raises(DataError, match="killed"):
        list(tokenize_in_order(_examples(8000), die, workers=2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        from lowmem_ft.data.formats import Example
        from lowmem_ft.data.pool import tokenize_in_order
        def slow(examples):
            open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
            time.sleep(60)
        list(tokenize_in_order((Example("text", "x", n, text="a") for n in range(9999)), slow, 2))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)])
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [Path("/proc") / path.name for path in tmp_path.iterdir()]
    assert len(workers) == 2
    process.kill()
    process.wait()
    while any(worker.exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker.exists() for worker in workers)


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
