"""Assistant turns are located in rendered texts, or the template is said not to show them."""

from __future__ import annotations

import pytest

from lowmem_ft.data.turns import Answer, ChatTemplate, Conversation, Part, TemplateRefusal, parts_of
from tests.data.tiny_tokenizers import TEMPLATES

SPECIAL = ("</s>", "<s>", "<|im_end|>", "<|im_start|>", "<|end|>", "<|endoftext|>", "<|start_header_id|>", "<|eot_id|>")


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}, SPECIAL, ("<|soft|>",))


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation([{"role": role, "content": text} for role, text in turns])


@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml", "<|im_end|>"), ("llama", "<|eot_id|>"), ("closes", "<|end|>"), ("no_end", ""), ("words_only", "</s>")],
)
def test_the_end_token_is_what_follows_an_answer(name: str, end: str) -> None:
    made = template(TEMPLATES[name])
    assert made.end == end
    answer = made.answer_at(conversation(("user", "a"), ("assistant", "b"), ("user", "c")), 1)
    assert (answer.text, answer.end) == ("b", end)


def test_several_end_tokens_in_a_row_end_a_turn_together_and_a_soft_one_only_if_there_is_no_other() -> None:
    ask = "{% if add_generation_prompt %}A:{% endif %}"
    for tail, end in [("<|end|></s>\n", "<|end|></s>"), ("<|soft|>\n", "<|soft|>"), ("<|soft|></s>", "</s>")]:
        made = template(
            "{% for m in messages %}{{ 'U:' if m.role == 'user' else 'A:' }}{{ m.content }}"
            + tail
            + "{% endfor %}"
            + ask
        )
        assert made.end == end


def test_an_assistant_turn_at_the_start_is_found_without_its_header() -> None:
    for name in ("chatml", "default_system", "words_only", "no_prompt", "with_bos"):
        made = template(TEMPLATES[name])
        answer = made.answer_at(conversation(("assistant", "first"), ("user", "a"), ("assistant", "b")), 0)
        assert answer.text == "first"
        assert answer.prefix.endswith(
            "assistant]\n" if "im_start" not in TEMPLATES[name] else "<|im_start|>assistant\n"
        )


def test_a_prompt_that_is_given_only_after_questions_does_not_put_headers_into_answers() -> None:
    text = TEMPLATES["words_only"].replace(
        "add_generation_prompt", "add_generation_prompt and messages[-1].role == 'user'"
    )
    two = conversation(("user", "a"), ("assistant", "b"), ("assistant", "[assistant]"))
    for index, content in ((1, "b"), (2, "[assistant]")):
        answer = template(text).answer_at(two, index)
        assert (answer.text, answer.end) == (content, "</s>")


def test_an_answer_that_is_changed_is_refused() -> None:
    made = template(TEMPLATES["words_only"].replace("m['content']", "m['content'] | upper"))
    with pytest.raises(TemplateRefusal, match="changes the answer of turn 2: it renders 'B'"):
        made.answer_at(conversation(("user", "a"), ("assistant", "b")), 1)


def test_white_space_that_is_trimmed_or_folded_is_no_change() -> None:
    made = template(TEMPLATES["words_only"].replace("m['content']", "m['content'].split() | join(' ')"))
    assert made.answer_at(conversation(("user", "a"), ("assistant", " b\n c ")), 1).text == "b c"


def test_missing_content_is_empty_for_templates_that_need_it() -> None:
    made = template(TEMPLATES["chatml"])
    call = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{}]}])
    assert "None" not in made.rendered(call, 2, generation=False)


def test_one_bad_conversation_does_not_spoil_a_batch() -> None:
    made = template(TEMPLATES["alternates"])
    good, bad = conversation(("user", "a"), ("assistant", "b")), conversation(("assistant", "b"))
    made.render_all([(good, 2, False), (bad, 1, False)])
    assert made.rendered(good, 2, generation=False) == "[user]\na</s>\n[assistant]\nb</s>\n"
    with pytest.raises(TemplateRefusal, match="turns must go back and forth"):
        made.rendered(bad, 1, generation=False)


def test_parts_join_to_the_text_and_skip_answers_that_it_shows_otherwise() -> None:
    text = "Q:a A:b</s> Q:c A:d</s>"
    shown, other = Answer(1, "Q:a A:", "b", "</s>"), Answer(3, "Q:a A:x</s> Q:c A:", "d", "</s>")
    parts = parts_of(text, [shown, other])
    assert parts == [Part("Q:a A:"), Part("b", 1, "</s>"), Part(" Q:c A:d</s>")]
    assert "".join(part.text + part.end for part in parts) == text


def test_text_that_is_no_template_is_refused_at_once() -> None:
    with pytest.raises(TemplateRefusal, match="endfor"):
        template("{% for m in messages %}")


def test_a_thought_that_the_prompt_opens_is_trained_from_there_on() -> None:
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    made = template(text)
    thinking = conversation(("user", "a"), ("assistant", "<think>\nso\n</think>\nb"))
    answer = made.answer_at(thinking, 1)
    assert answer.prefix.endswith("assistant\n<think>\n")
    assert answer.text == "so\n</think>\nb"
    without = made.answer_at(conversation(("user", "a"), ("assistant", "b")), 1)
    assert without.prefix.endswith("assistant\n")
    assert made.unfollowed_prompt == "<think>\n"


def test_arguments_are_json_text_for_templates_that_put_texts_together() -> None:
    made = template(
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "\u00e9"}}}],
    }
    answer = made.answer_at(Conversation([{"role": "user", "content": "a"}, call]), 1)
    assert answer.text == 'f{"a": "\u00e9"}'


def test_an_answer_that_follows_neither_prompt_nor_header_is_refused_with_the_prompt() -> None:
    opened = "{{ '<no>' if m.role == 'assistant' and 'x' not in m.content }}"
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + opened + "{{ m.content }}<|im_end|>{% endfor %}"
    made = template(turns + "{% if add_generation_prompt %}<|im_start|>assistant\n<no>{% endif %}")
    assert made.answer_at(conversation(("user", "a"), ("assistant", "b")), 1).text == "b"
    with pytest.raises(TemplateRefusal, match=r"answer of turn 2 begins: it asks with .*<no>"):
        made.answer_at(conversation(("user", "a"), ("assistant", "x")), 1)
