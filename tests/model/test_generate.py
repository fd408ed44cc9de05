"""Greedy answers in batches equal answers one by one."""

from __future__ import annotations

import pytest
import torch

from lowmem_ft.model import generate
from lowmem_ft.model.generate import Answer, generate_answers
from tests.data.tiny_tokenizers import with_template
from tests.tiny import tiny_llama

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14], [15, 16, 17, 18]]


def _answers(at_once: int, monkeypatch: pytest.MonkeyPatch, stop: list[int]) -> list[Answer]:
    monkeypatch.setattr(generate, "PROMPTS_AT_ONCE", at_once)
    done: list[int] = []
    answers = generate_answers(
        tiny_llama(), with_template("regex", "chatml"), PROMPTS, list("abcd"), stop,
        max_new_tokens=6, device=torch.device("cpu"), progress=done.append,
    )  # fmt: skip
    assert done[-1] == 4
    return answers


def test_batches_and_order_do_not_change_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = (_answers(n, monkeypatch, [2]) for n in (1, 3))
    assert alone == together
    assert [a.reference for a in alone] == list("abcd")
    assert len({a.text for a in alone}) > 1


def test_an_answer_ends_at_its_stop_token_which_is_not_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    free = _answers(4, monkeypatch, [2])[0]
    assert not free.ended
    tokenizer = with_template("regex", "chatml")
    with torch.no_grad():
        first = int(tiny_llama()(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].argmax())
    stopped = _answers(4, monkeypatch, [first])[0]
    assert stopped.ended
    assert stopped.text == ""
    assert free.text.startswith(tokenizer.decode([first]))


def test_exact_means_the_whole_answer_and_an_end() -> None:
    assert Answer("p", "yes", " yes\n", True).exact
    assert not Answer("p", "yes", "yes", False).exact
    assert not Answer("p", "yes", "yes sir", True).exact
