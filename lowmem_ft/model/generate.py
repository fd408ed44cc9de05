"""Greedy answers to many prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PROMPTS_AT_ONCE = 32
CACHE_BYTES = 256 * 1024**2
"""What the keys and values of a batch may take where nothing else is said."""

PLAIN: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
}
"""The most likely token each time, and nothing else: what a model's generation_config.json says would come in where a
value is not given (transformers 5.24), such as Qwen2.5's repetition_penalty."""


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
    most_tokens: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Answer]:
    """Answer each prompt by greedy generation.

    Prompts of like length share a batch, padded on the left; the order of the result is that of `prompts`. A batch
    changes memory and speed only, up to the rounding of larger products.

    Args:
        model: a transformers model, with or without peft. Call this under the autocast of training.
        tokenizer: to decode.
        prompts: token ids of each prompt, exactly as in training before the answer.
        references: the answers of the data.
        stop_ids: tokens that end an answer.
        max_new_tokens: longest answer.
        device: where the model is.
        most_tokens: of prompts and answers in one batch, at least one prompt; None for what `CACHE_BYTES` hold.
        progress: told how many are done.
    """
    was_training = model.training
    model.eval()
    answers: dict[int, Answer] = {}
    pad = stop_ids[0]
    most = most_tokens or max(1, CACHE_BYTES // cache_bytes_per_token(model.config))
    for chosen in batches_of_prompts([len(prompt) for prompt in prompts], max_new_tokens, most):
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + list(prompts[i]) for i in chosen], device=device)
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen], device=device)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            use_cache=True,
            eos_token_id=list(stop_ids),
            pad_token_id=pad,
            **PLAIN,
        )
        for index, new in zip(chosen, out[:, width:].tolist(), strict=True):
            end = next((k for k, token in enumerate(new) if token in stop_ids), None)
            text = tokenizer.decode(new[:end], skip_special_tokens=False)
            prompt = tokenizer.decode(list(prompts[index]), skip_special_tokens=False)
            answers[index] = Answer(prompt, references[index], text, end is not None)
        progress(len(answers))
    model.train(was_training)
    return [answers[i] for i in range(len(prompts))]


def batches_of_prompts(lengths: Sequence[int], max_new_tokens: int, most_tokens: int) -> list[list[int]]:
    """Positions into `lengths`, shortest first, in batches of at most 32 prompts.

    Args:
        lengths: tokens of each prompt.
        max_new_tokens: longest answer.
        most_tokens: padding, prompts and answers of a batch; one that is longer alone is a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        now = batches[-1] if batches else []
        # this prompt is the longest so far, so it is the width of its batch
        fits = (len(now) + 1) * (lengths[index] + max_new_tokens) <= most_tokens
        if now and fits and len(now) < PROMPTS_AT_ONCE:
            now.append(index)
        else:
            batches.append([index])
    return batches


def cache_bytes_per_token(config: Any) -> int:
    """Most bytes of keys and values that a token takes, at 4 bytes a number.

    Args:
        config: of a transformers model. Where it has layers of several kinds, all count as the largest does.
    """
    config = config.get_text_config()
    heads: int = getattr(config, "num_attention_heads", 1)
    key_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * 4 * int(config.num_hidden_layers) * key_heads * head_dim
