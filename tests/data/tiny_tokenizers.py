"""Small tokenizers and chat templates made in code, with merges that run over the borders of prompts and answers."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

# Words and pieces of templates, so that the merges join a header's line end with the first letters of an answer.
_TEXT = [
    "unbelievable believable dogs dog dogs 1750 750 hello there\n[assistant]\ndogs [model]\n750\n\n### Assistant:\ndogs"
    "<|im_start|>assistant\nhello there<|im_end|>\n dogs. euro  two  spaces\n\n"
] * 50

CHAT_TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|end|>", "<|endoftext|>",
)  # fmt: skip


@cache
def tiny_tokenizer(kind: str = "regex") -> Any:
    """A tokenizer of one kind; do not change it.

    Args:
        kind: "regex" splits into words first; "no_regex" lets merges run over anything; "adds_bos" puts <s> first;
            "pad_is_eos"; "no_chat_tokens" knows no token but <pad>, <s> and </s>; "soft_end": <|im_end|> is not
            special; "eats_space": <|im_end|> takes the white space after it; "metaspace" puts a space in front of
            every text.
    """
    tokenizer = _metaspace() if kind == "metaspace" else _byte_level(use_regex=kind != "no_regex")
    if kind == "adds_bos":
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>" if kind == "pad_is_eos" else "<pad>",
    )
    if kind != "no_chat_tokens":
        soft = ["<|im_end|>"] if kind in ("soft_end", "eats_space") else []
        made.add_special_tokens({"additional_special_tokens": [token for token in CHAT_TOKENS if token not in soft]})
        made.add_tokens(
            [AddedToken(token, special=False, rstrip=kind == "eats_space", normalized=False) for token in soft]
        )
        made.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return made


def _byte_level(*, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    names += [chr(code) for code in range(33, 127)]
    merges = [("d", "o"), ("do", "g"), ("\u2581", "dog"), ("dog", "s"), ("\u2581dog", "s"), ("h", "e")]
    names += [left + right for left, right in merges]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


_TURN = "[{{ m['role'] }}]\n{{ m['content'] }}{{ eos_token }}\n"
_ASK = "{% if add_generation_prompt %}[assistant]\n{% endif %}"

TEMPLATES: dict[str, str] = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "default_system": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
        "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "no_system": (
        "{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}"
        "{{ raise_exception('there is no place for a system turn') }}{% endif %}"
        "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
        "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}{% endfor %}"
    ),
    "words_only": "{% for m in messages %}" + _TURN + "{% endfor %}" + _ASK,
    "with_bos": "{{ bos_token }}{% for m in messages %}" + _TURN + "{% endfor %}" + _ASK,
    "no_prompt": "{% for m in messages %}" + _TURN + "{% endfor %}",
    "drops_thoughts": (
        "{% for m in messages %}[{{ m['role'] }}]\n{% if m['role'] == 'assistant' and not loop.last %}"
        "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ eos_token }}\n{% endfor %}"
        + _ASK
    ),
    "alternates": (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must go back and forth') }}{% endif %}" + _TURN + "{% endfor %}" + _ASK
    ),
    "markers": (
        "{% for m in messages %}[{{ m['role'] }}]\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}\n{% endfor %}" + _ASK
    ),
    "closes": (  # an extra token after the last turn, which is no part of it
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
    ),
    "last_differs": (  # the last answer ends otherwise than those before it
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|endoftext|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "no_end": (
        "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    ),
    "opens_thought": (  # asks with <think>, and shows answers without it
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    "empty_thought": (  # the last answer gets an empty thought, earlier ones do not
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ '<think>\n\n</think>\n\n' if loop.last and m['role'] == 'assistant' else '' }}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}


@cache
def with_template(kind: str, template: str) -> Any:
    """A tokenizer of its own with one of `TEMPLATES`; do not change it."""
    made = tiny_tokenizer.__wrapped__(kind)
    made.chat_template = TEMPLATES[template]
    return made
