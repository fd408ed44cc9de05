"""The audit counts what is there, and stops a run in which nothing would be trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lowmem_ft.data.audit import make_audit
from lowmem_ft.data.cache import LeftOutCount
from lowmem_ft.data.formats import Example, LeftOut, TokenizedExample
from lowmem_ft.data.template import Encoder, make_encoder
from lowmem_ft.errors import DataError
from tests.data.tiny_tokenizers import tiny_tokenizer


@dataclass
class Tokens:
    """Tokens in memory, in the form of the cache."""

    rows: list[TokenizedExample]
    examples: int
    left_out: tuple[LeftOutCount, ...] = ()
    lengths: np.ndarray = field(init=False)
    trained: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = np.array([len(row.input_ids) for row in self.rows], np.int32)
        self.trained = np.array([np.count_nonzero(row.weights) for row in self.rows], np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> TokenizedExample:
        return self.rows[index]


def encoder(kind: str = "adds_bos", **options: Any) -> Encoder:
    return make_encoder(tiny_tokenizer(kind), **{"template": "plain", "max_tokens": 64, **options})


def tokens(made: Encoder, examples: list[Example]) -> Tokens:
    rows: list[TokenizedExample] = []
    left: dict[str, list[LeftOut]] = {}
    for result in made.encode_batch(examples):
        for part in result if isinstance(result, list) else [result]:
            if isinstance(part, TokenizedExample):
                rows.append(part)
            else:
                left.setdefault(part.reason, []).append(part)
    counts = (LeftOutCount(why, len(all), max(one.tokens for one in all), tuple(all)) for why, all in left.items())
    return Tokens(rows, len(examples), tuple(counts))


def completion(line: int, prompt: str, answer: str) -> Example:
    return Example("completion", "d.jsonl", line, prompt=prompt, completion=answer)


RECORDS = [
    completion(1, "one", "dogs"),
    completion(2, "two", "750 dogs"),
    completion(3, "one", "dogs"),
    completion(4, "three", ""),
    completion(5, "long " * 90, "dogs"),
    Example("text", "d.jsonl", 6, text="unbelievable " * 60),
]


def test_counts_are_exact() -> None:
    made = encoder()
    data = tokens(made, RECORDS)
    audit = make_audit(data, None, made).train
    assert (audit.records, audit.kept) == (6, 4)
    assert audit.sequences == len(data) > 4
    assert {one.reason: one.count for one in audit.left_out} == {"empty answer": 1, "longer than max_tokens": 1}
    assert audit.tokens == sum(len(row.input_ids) for row in data.rows)
    assert audit.trained_tokens == sum(map(bool, (weight for row in data.rows for weight in row.weights)))
    assert audit.ended == 4  # of the long document only the last piece ends
    assert audit.begun == 4
    assert audit.begun_twice == 0
    assert audit.duplicates == 1
    assert audit.longest_tokens == 64
    assert sum(count for _, _, count in audit.bars) == audit.sequences
    assert [example.where for example in audit.shown] == ["d.jsonl line 1", "d.jsonl line 2", "d.jsonl line 3"]
    assert [(part.text, part.trained) for part in audit.shown[0].stretches] == [("<s>one", False), ("dogs</s>", True)]


def test_parts_of_kept_records_are_told_from_left_out_records() -> None:
    made = encoder(too_long="cut_prompt")
    audit = make_audit(tokens(made, RECORDS), None, made).train
    assert audit.kept == 5
    assert [(one.reason, one.count) for one in audit.in_part] == [("in part: prompt cut to max_tokens", 1)]


def test_percentiles_are_lengths_that_occur() -> None:
    made = encoder()
    rows = [TokenizedExample([5] * length, [0.0] + [1.0] * (length - 1), "f", length) for length in range(2, 102)]
    audit = make_audit(Tokens(rows, 100), None, made).train
    assert dict(audit.percentiles) == {5: 6, 25: 26, 50: 51, 75: 76, 95: 96, 99: 100}
    assert audit.bars[0] == (2, 14, 13)
    assert audit.ended == 0


def test_a_doubled_bos_is_counted() -> None:
    made = encoder()
    bos = made.tokenizer.bos_token_id
    audit = make_audit(Tokens([TokenizedExample([bos, bos, 9], [0.0, 0.0, 1.0], "f", 1)], 1), None, made).train
    assert (audit.begun, audit.begun_twice) == (1, 1)


def test_evaluation_sequences_that_are_trained_are_counted() -> None:
    made = encoder()
    train = tokens(made, RECORDS)
    held_out = tokens(made, [completion(1, "two", "750 dogs"), completion(2, "new", "dogs")])
    audit = make_audit(train, held_out, made)
    assert audit.overlap == 1
    assert audit.eval is not None
    assert audit.eval.records == 2


def test_nothing_left_at_max_tokens_says_the_longest_length_and_what_to_write() -> None:
    made = encoder(max_tokens=9)
    long = [completion(3, "dogs " * 40, "x"), completion(4, "dogs " * 60, "x")]
    longest = max(one.longest_tokens for one in tokens(made, long).left_out)
    with pytest.raises(DataError) as error:
        make_audit(tokens(made, long), None, made)
    text = str(error.value)
    assert text.startswith("d.jsonl line 3: 0 of 2 examples left at max_tokens 9 (data.train)")
    assert f"the longest has {longest} tokens" in text
    assert f"data.max_tokens: {longest}" in text


def test_nothing_to_train_is_an_error_that_names_the_first_record_of_training_and_evaluation() -> None:
    made = encoder()
    question = [Example("chat", "q.jsonl", line, ({"role": "user", "content": "a"},)) for line in (2, 3)]
    with pytest.raises(DataError, match=r"q.jsonl line 2: 0 of 2 examples left \(data.train\): nothing to train in 2"):
        make_audit(tokens(made, question), None, made)
    with pytest.raises(DataError, match=r"q.jsonl line 2: 0 of 2 examples left \(data.eval\)"):
        make_audit(tokens(made, RECORDS), tokens(made, question), made)
    with pytest.raises(DataError, match="no examples"):
        make_audit(tokens(made, []), None, made)


def test_the_template_notes_of_the_encoder_are_kept() -> None:
    made = encoder()
    audit = make_audit(tokens(made, RECORDS), None, made, formats=["text: decided"], notes=["more"])
    assert audit.notes == (*made.notes, "more")
    assert len(made.notes) == 1
    assert audit.formats == ("text: decided",)
