"""Greedy answers in batches equal answers one by one."""

from __future__ import annotations

import pytest
import torch

from lowmem_ft.memory.attention import apply_packed_attention
from lowmem_ft.model import generate
from lowmem_ft.model.generate import Answer, batches_of_prompts, cache_bytes_per_token, generate_answers
from tests.data.tiny_tokenizers import with_template
from tests.tiny import FAMILIES, VOCABULARY, tiny_llama

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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_give_what_a_plain_loop_gives_for_each_prompt_alone(family: str, packed: bool) -> None:
    """The loop has no batch, no padding, no cache: all of the text so far, and the likeliest token is added."""
    model, new = FAMILIES[family](seed=3), 12
    prompts = [*PROMPTS, list(range(20, 50))]
    alone = []
    for prompt in prompts:
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + new:
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        alone.append(ids[len(prompt) :])
    if packed:
        apply_packed_attention(model)
    tokenizer = with_template("regex", "chatml")
    answers = generate_answers(
        model, tokenizer, prompts, ["r"] * 5, [VOCABULARY - 1], max_new_tokens=new, device=torch.device("cpu")
    )
    assert [answer.text for answer in answers] == [tokenizer.decode(ids, skip_special_tokens=False) for ids in alone]


def test_what_a_models_generation_config_says_does_not_change_the_answers() -> None:
    def answers(**changes: float) -> list[Answer]:
        model = tiny_llama(seed=4)
        model.generation_config.update(**changes)
        return generate_answers(
            model, with_template("regex", "chatml"), PROMPTS, list("abcd"), [2], max_new_tokens=12,
            device=torch.device("cpu"),
        )  # fmt: skip

    assert answers() == answers(repetition_penalty=3.0, no_repeat_ngram_size=1, do_sample=True, temperature=9.0)


def test_batches_hold_the_tokens_that_are_allowed_and_every_prompt_once() -> None:
    lengths = [7, 1, 30, 3, 3, 100, 2]
    batches = batches_of_prompts(lengths, max_new_tokens=5, most_tokens=40)
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    sizes = [(len(batch), len(batch) * (max(lengths[i] for i in batch) + 5)) for batch in batches]
    assert sizes == [(4, 32), (1, 12), (1, 35), (1, 105)]
    assert [len(batch) for batch in batches_of_prompts([4] * 70, 5, 10**9)] == [32, 32, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_token_in_the_cache_are_those_of_its_tensors(family: str) -> None:
    model = FAMILIES[family]()
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=True).past_key_values
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert cache_bytes_per_token(model.config) * 4 == held
