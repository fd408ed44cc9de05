"""Greedy answers to many prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PROMPTS_AT_ONCE = 32


@dataclass(frozen=True)
class Answer:
    """One generated answer.

    Attributes:
        prompt: as the model saw it, decoded.
        reference: the answer of the data.
        text: what the model wrote, without its end token.
        ended: whether it ended by itself, within the allowed tokens.
    """

    prompt: str
    reference: str
    text: str
    ended: bool

    @property
    def exact(self) -> bool:
        """Whether it is the reference, but for white space around it."""
        return self.ended and self.text.strip() == self.reference.strip()


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    references: Sequence[str],
    stop_ids: Sequence[int],
    *,
    max_new_tokens: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Answer]:
    """Answer each prompt by greedy generation.

    Prompts of like length share a batch, padded on the left; the order of the result is that of `prompts`.

    Args:
        model: a transformers model, with or without peft. Call this under the autocast of training.
        tokenizer: to decode.
        prompts: token ids of each prompt, exactly as in training before the answer.
        references: the answers of the data.
        stop_ids: tokens that end an answer.
        max_new_tokens: longest answer.
        device: where the model is.
        progress: told how many are done.
    """
    was_training = model.training
    model.eval()
    answers: dict[int, Answer] = {}
    by_length = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    pad = stop_ids[0]
    for start in range(0, len(by_length), PROMPTS_AT_ONCE):
        chosen = by_length[start : start + PROMPTS_AT_ONCE]
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + list(prompts[i]) for i in chosen], device=device)
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen], device=device)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(stop_ids),
            pad_token_id=pad,
        )
        for index, new in zip(chosen, out[:, width:].tolist(), strict=True):
            end = next((k for k, token in enumerate(new) if token in stop_ids), None)
            text = tokenizer.decode(new[:end], skip_special_tokens=False)
            prompt = tokenizer.decode(list(prompts[index]), skip_special_tokens=False)
            answers[index] = Answer(prompt, references[index], text, end is not None)
        progress(len(answers))
    model.train(was_training)
    return [answers[i] for i in range(len(prompts))]
