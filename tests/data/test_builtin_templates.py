"""The built-in templates: complete, refused where tokens are missing, and usable with tools where they say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_ft.data.builtin_templates import BUILTIN_TEMPLATES, template_text, usable_templates
from lowmem_ft.data.formats import Example, TokenizedExample
from lowmem_ft.data.template import make_encoder
from lowmem_ft.errors import DataError, RecipeError
from tests.data.tiny_tokenizers import tiny_tokenizer

ENDS = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "plain": "</s>"}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def chat(*turns: tuple[str, str], **fields: object) -> Example:
    messages = tuple({"role": role, "content": text} for role, text in turns)
    return Example("chat", "f", 1, messages, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
@pytest.mark.parametrize("kind", ["regex", "adds_bos"])
def test_every_template_trains_answers_with_their_ends_and_shows_the_system_turn(name: str, kind: str) -> None:
    encoder = make_encoder(tiny_tokenizer(kind), template=name, max_tokens=999)
    example = chat(
        ("system", "Be kind."), ("user", " a "), ("assistant", " dogs\n"), ("user", "b"), ("assistant", "750")
    )
    found = encoder.encode(example)
    assert isinstance(found, TokenizedExample)
    ids = [one for one, weight in zip(found.input_ids, found.weights, strict=True) if weight]
    assert encoder.decode(ids) == f" dogs\n{ENDS[name]}750{ENDS[name]}"
    assert "Be kind." in encoder.decode(found.input_ids)
    assert list(found.input_ids).count(encoder.tokenizer.bos_token_id) == (
        kind == "adds_bos" or name in ("llama-3", "gemma", "mistral")
    )
    assert encoder.tokenizer.decode([encoder.end_token_id]) == ENDS[name]
    assert encoder.tokenizer.eos_token_id in encoder.stop_token_ids


def test_a_template_whose_tokens_are_missing_is_refused_with_those_and_with_the_usable_ones() -> None:
    tokenizer = tiny_tokenizer("no_chat_tokens")
    assert usable_templates(tokenizer.get_vocab()) == ["plain"]
    for name in ("chatml", "llama-3", "gemma", "mistral"):
        first = BUILTIN_TEMPLATES[name].tokens[0].replace("|", r"\|").replace("[", r"\[")
        with pytest.raises(RecipeError, match=f'"{name}" needs {first}.*tokens for: plain'):
            template_text(tokenizer, name)


@pytest.mark.parametrize("name", ["chatml", "llama-3", "plain"])
def test_tools_and_calls_are_shown_once_and_calls_are_trained(name: str) -> None:
    encoder = make_encoder(tiny_tokenizer(), template=name, max_tokens=999)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": {"zone": "CET"}}}]}
    question = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "time?"})
    example = Example("chat", "f", 1, (*question, call, {"role": "tool", "content": "12:00"}), tools=(TOOL,))
    found = encoder.encode(example)
    assert isinstance(found, TokenizedExample)
    text = encoder.decode([one for one, weight in zip(found.input_ids, found.weights, strict=True) if weight])
    assert text == '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>' + ENDS[name]
    assert encoder.decode(found.input_ids).count('"parameters"') == 1
    assert encoder.decode(found.input_ids).count("Be kind.") == 1


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_templates_without_a_place_for_tools_or_late_system_turns_say_so(name: str) -> None:
    encoder = make_encoder(tiny_tokenizer(), template=name, max_tokens=999)
    with pytest.raises(DataError, match="no place for tools"):
        encoder.encode(chat(("user", "a"), ("assistant", "b"), tools=(TOOL,)))
    with pytest.raises(DataError, match=r"turn 3 \(system\).*not system at turn 3"):
        encoder.encode(chat(("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "a"), ("assistant", "b")))


def test_a_name_that_is_neither_template_nor_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Did you mean chatml"):
        template_text(tiny_tokenizer(), "chat-ml")
    path = tmp_path / "mine.jinja"
    path.write_bytes(b"\xff")
    with pytest.raises(RecipeError, match="cannot be read"):
        template_text(tiny_tokenizer(), str(path))
    path.write_text("{{ 1 }}", "utf-8")
    assert template_text(tiny_tokenizer(), str(path)) == "{{ 1 }}"
    assert template_text(tiny_tokenizer(), None) == ""
