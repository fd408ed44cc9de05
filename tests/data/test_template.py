"""Trained ids decode to answers and end tokens, and what comes before is what generation sees, for any template."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowmem_ft.data.drafts import QUOTED_CONTROL
from lowmem_ft.data.formats import Example, LeftOut, TokenizedExample
from lowmem_ft.data.template import IN_PART, Encoder, Result, make_encoder
from lowmem_ft.errors import DataError, ModelError, RecipeError
from tests.data.tiny_tokenizers import CHAT_TOKENS, TEMPLATES, tiny_tokenizer, with_template

BYTE_LEVEL = ("regex", "no_regex", "adds_bos", "pad_is_eos", "soft_end", "eats_space")
# What ends a turn, and what a template makes of an answer.
ENDS = {
    "chatml": "<|im_end|>", "default_system": "<|im_end|>", "llama": "<|eot_id|>", "no_system": "<end_of_turn>",
    "mistral": "</s>", "closes": "<|end|>", "last_differs": "<|endoftext|>", "opens_thought": "<|im_end|>",
    "empty_thought": "<|im_end|>",
}  # fmt: skip
TRIMS = {"llama", "no_system"}
NO_SYSTEM = {"no_system", "mistral", "alternates"}
ALWAYS_APART = {"last_differs", "no_end", "empty_thought"}

# Pieces that quote control tokens, headers and marks, and pieces that merge with what stands before them.
_PIECES = st.sampled_from(
    ["</s>", "<s>", "<|im_end|>", "<|im_start|>assistant\n", "[assistant]\n", "<|eot_id|>", "<end_of_turn>", "[/INST]",
     "dogs", "un", "believable", "1", "750", " ", "  ", "\n", "\n\n", "\t", "### assistant:\n", "\ue000", "\ue001",
     "\ufffd", "\U0001f469\u200d\U0001f467", "e\u0301", "\u05e9\u05dc", "{{ x }}", "{% raw %}", "</think>", "<",
     "<|im_", "end|>"]
)  # fmt: skip
TEXTS = st.lists(_PIECES | st.text(max_size=6), max_size=6).map("".join)
ANSWERS = TEXTS.filter(lambda text: bool(text.strip()))


@st.composite
def conversations(draw: st.DrawFn, *, system: bool) -> tuple[dict[str, Any], ...]:
    messages = []
    if system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        messages.append({"role": "assistant", "content": draw(ANSWERS)})
    return tuple(messages)


def chat(*turns: tuple[str, str], **fields: Any) -> Example:
    return Example("chat", "f.jsonl", 1, tuple({"role": role, "content": text} for role, text in turns), **fields)


def encoder(kind: str = "regex", template: str | None = "chatml", **options: Any) -> Encoder:
    tokenizer = with_template(kind, template) if template else tiny_tokenizer(kind)
    return make_encoder(tokenizer, **{"template": None, "max_tokens": 4096, **options})


def sequences(result: Result) -> list[TokenizedExample]:
    parts = result if isinstance(result, list) else [result]
    return [part for part in parts if isinstance(part, TokenizedExample)]


def trained_ids(example: TokenizedExample) -> list[int]:
    return [one for one, weight in zip(example.input_ids, example.weights, strict=True) if weight]


def trained(made: Encoder, example: TokenizedExample) -> str:
    return made.decode(trained_ids(example))


def reasons(result: Result) -> list[str]:
    return [part.reason for part in (result if isinstance(result, list) else [result]) if isinstance(part, LeftOut)]


def runs(example: TokenizedExample) -> list[tuple[int, int]]:
    """Start and end of each run of trained positions."""
    weights = [0.0, *example.weights, 0.0]
    starts = [index for index in range(1, len(weights)) if weights[index] and not weights[index - 1]]
    stops = [index for index in range(1, len(weights)) if not weights[index] and weights[index - 1]]
    return [(start - 1, stop - 1) for start, stop in zip(starts, stops, strict=True)]


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_trained_ids_decode_to_answers_and_ends_and_prefixes_are_prompts(
    kind: str, template: str, data: st.DataObject
) -> None:
    made = encoder(kind, template)
    messages = data.draw(conversations(system=template not in NO_SYSTEM))
    example = Example("chat", "f.jsonl", 1, messages)
    result = made.encode(example)
    assert reasons(result) == []
    answers = [(index, message["content"]) for index, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [
        ("<think>\n\n</think>\n\n" if template == "empty_thought" else "")
        + (text.strip() if template in TRIMS else text)
        + ENDS.get(template, "</s>")
        for _, text in answers
    ]
    found = sequences(result)
    for sequence in found:
        assert (sequence.weights[0], sequence.weights[-1]) == (0, 1)
        assert trained_ids(sequence)[-1] in made.stop_token_ids
    if len(found) == 1:
        assert trained(made, found[0]) == "".join(wanted)
        assert len(runs(found[0])) == len(answers)
        for (index, _), (start, _) in zip(answers, runs(found[0]), strict=True):
            assert made.encode_prompt(messages[:index]) == list(found[0].input_ids[:start])
    else:
        assert [trained(made, sequence) for sequence in found] == wanted
        for (index, _), sequence in zip(answers, found, strict=True):
            start, stop = runs(sequence)[0]
            assert stop == len(sequence.input_ids)
            assert made.encode_prompt(messages[:index]) == list(sequence.input_ids[:start])
    assert made.encode_prompt(example) == list(found[-1].input_ids[: runs(found[-1])[-1][0]])
    assert made.reference_answer(example) + ENDS.get(template, "</s>") == wanted[-1]


@pytest.mark.parametrize("template", ["chatml", "llama", "default_system", "words_only", "closes"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_text_of_a_record_becomes_a_control_token(template: str, data: st.DataObject) -> None:
    made = encoder("regex", template)
    messages = data.draw(conversations(system=True))
    harmless = tuple({**message, "content": "x"} for message in messages)
    found = sequences(made.encode(Example("chat", "f", 1, messages)))
    control = set(made.tokenizer.convert_tokens_to_ids(["<s>", "</s>", "<pad>", *CHAT_TOKENS]))
    expected = sequences(made.encode(Example("chat", "f", 1, harmless)))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert [i for i in one.input_ids if i in control] == [i for i in other.input_ids if i in control]


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_way_by_headers_finds_what_rendering_every_turn_finds(template: str, data: st.DataObject) -> None:
    quick, slow = encoder("regex", template), encoder("regex", template)
    assert slow._reader is not None
    slow._reader.template.header = ""
    example = Example("chat", "f", 1, data.draw(conversations(system=template not in NO_SYSTEM)))
    assert quick.encode(example) == slow.encode(example)


def test_the_way_by_headers_is_taken_only_where_a_header_has_a_control_token() -> None:
    known = {name: encoder("regex", name)._reader.template.header for name in TEMPLATES}  # type: ignore[union-attr]
    assert {name for name, header in known.items() if header} == {"chatml", "default_system", "llama", "no_system"}


@pytest.mark.parametrize("kind", ["regex", "adds_bos"])
@pytest.mark.parametrize("template", ["chatml", "default_system", "no_system", "with_bos"])
def test_ids_are_those_of_transformers_where_nothing_merges_over_a_border(kind: str, template: str) -> None:
    made = encoder(kind, template)
    example = chat(("user", "hello"), ("assistant", "dogs"), ("user", "750"), ("assistant", "euro there"))
    ids = list(sequences(made.encode(example))[0].input_ids)
    tokenizer = with_template(kind, template)
    whole = tokenizer.apply_chat_template(
        list(example.messages), chat_template=made.template_text, tokenize=True, return_dict=False
    )
    assert whole[: len(ids)] == ids
    assert len(whole) - len(ids) <= 1  # the line end after the last end token changes no loss


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("many a dog", "s."), ("Total: 1", "750 euro"), ("space at the end ", "dogs"), ("un", "believable"), ("", "dogs")],
)
@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_a_completion_is_trained_whole_and_nothing_of_its_prompt(kind: str, prompt: str, completion: str) -> None:
    made = encoder(kind, None)
    example = Example("completion", "f", 1, prompt=prompt, completion=completion)
    (found,) = sequences(made.encode(example))
    before = made.encode_prompt(example)
    assert list(found.input_ids[: len(before)]) == before
    assert made.decode(found.input_ids[len(before) :]) == completion + "</s>"
    assert made.decode(before).removeprefix("<s>") == prompt
    # Position 0 has nothing to be predicted from, so a completion with nothing before it loses its first token's loss.
    assert list(found.weights) == [0.0] * max(1, len(before)) + [1.0] * (len(found.input_ids) - max(1, len(before)))


@settings(max_examples=60, deadline=None)
@given(prompt=TEXTS, completion=ANSWERS)
def test_completions_decode_to_themselves_with_one_end(prompt: str, completion: str) -> None:
    made = encoder("adds_bos", None)
    (found,) = sequences(made.encode(Example("completion", "f", 1, prompt=prompt, completion=completion)))
    assert trained(made, found) == completion + "</s>"
    eos, bos = made.tokenizer.eos_token_id, made.tokenizer.bos_token_id
    assert list(found.input_ids).count(eos) == 1
    assert list(found.input_ids).count(bos) == 1


@pytest.mark.parametrize("template", ["words_only", "with_bos", "chatml", "llama"])
@pytest.mark.parametrize("kind", ["regex", "adds_bos"])
def test_bos_stands_once_where_template_or_tokenizer_want_it(kind: str, template: str) -> None:
    made = encoder(kind, template)
    (found,) = sequences(made.encode(chat(("user", "hello"), ("assistant", "dogs"))))
    wanted = int(kind == "adds_bos" or template in ("with_bos", "llama"))
    assert list(found.input_ids).count(made.tokenizer.bos_token_id) == wanted
    given_by_template = template not in ("with_bos", "llama") and kind == "adds_bos"
    assert made.template_text == "{{ bos_token }}" * given_by_template + TEMPLATES[template]
    assert bool(made.notes) == given_by_template


def test_history_that_is_shown_otherwise_makes_a_sequence_of_each_turn() -> None:
    made = encoder("regex", "drops_thoughts")
    example = chat(("user", "a"), ("assistant", "<think>so</think>dogs"), ("user", "b"), ("assistant", "there"))
    found = sequences(made.encode(example))
    assert [made.decode(one.input_ids) for one in found] == [
        "[user]\na</s>\n[assistant]\n<think>so</think>dogs</s>",
        "[user]\na</s>\n[assistant]\ndogs</s>\n[user]\nb</s>\n[assistant]\nthere</s>",
    ]
    assert [trained(made, one) for one in found] == ["<think>so</think>dogs</s>", "there</s>"]
    (last,) = sequences(encoder("regex", "drops_thoughts", train_on="last").encode(example))
    assert last == found[1]


def test_history_that_is_shown_as_written_stays_one_sequence() -> None:
    example = chat(("user", "a"), ("assistant", "dogs"), ("user", "b"), ("assistant", "there"))
    for template in TEMPLATES:
        assert len(sequences(encoder("regex", template).encode(example))) == 1 + (template in ALWAYS_APART), template


@pytest.mark.parametrize(
    ("train_on", "weights"),
    [
        ("all", [1.0, 1.0, 1.0]),
        ("last", [0.0, 0.0, 1.0]),
        ({"1": 0.5, "last": 2}, [0.5, 0.0, 2.0]),
        ({2: 1}, [0.0, 1.0, 0.0]),
        ({"3": 0.25}, [0.0, 0.0, 0.25]),
    ],
)
@pytest.mark.parametrize("template", ["chatml", "no_prompt"])
def test_train_on_weighs_turns_by_number(template: str, train_on: Any, weights: list[float]) -> None:
    turns = [turn for word in ("dogs", "750", "there") for turn in (("user", "hello"), ("assistant", word))]
    made = encoder("regex", template, train_on=train_on)
    (found,) = sequences(made.encode(chat(*turns)))
    end = ENDS.get(template, "</s>")
    words = [word + end for word, weight in zip(("dogs", "750", "there"), weights, strict=True) if weight]
    assert [made.decode(found.input_ids[start:stop]) for start, stop in runs(found)] == words
    assert [found.weights[start] for start, _ in runs(found)] == [weight for weight in weights if weight]


def test_context_turns_of_a_record_are_never_trained() -> None:
    turns = [("user", "a"), ("assistant", "dogs"), ("user", "b"), ("assistant", "there")]
    made = encoder()
    (found,) = sequences(made.encode(chat(*turns, untrained=(1,))))
    assert trained(made, found) == "there<|im_end|>"
    assert reasons(made.encode(chat(*turns, untrained=(1, 3)))) == ["nothing to train"]


def test_examples_with_nothing_to_train_are_left_out_with_the_reason() -> None:
    made = encoder()
    assert reasons(made.encode(chat(("user", "hello")))) == ["nothing to train"]
    assert reasons(made.encode(chat(("user", "hello"), ("assistant", " \n")))) == ["empty answer"]
    assert reasons(made.encode(Example("completion", "f", 1, prompt="a", completion=""))) == ["empty answer"]
    assert reasons(made.encode(Example("text", "f", 1, text="\n"))) == ["empty text"]


def test_an_empty_answer_among_others_is_context_and_counted() -> None:
    made = encoder()
    result = made.encode(chat(("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "dogs")))
    assert trained(made, sequences(result)[0]) == "dogs<|im_end|>"
    assert reasons(result) == [IN_PART + "empty answer"]


def test_the_words_of_a_template_that_refuses_are_passed_on_with_file_line_and_turn() -> None:
    made = encoder("regex", "alternates")
    with pytest.raises(DataError, match=r"f.jsonl line 1: .*turn 2 \(user\): turns must go back and forth"):
        made.encode(chat(("user", "a"), ("user", "b"), ("assistant", "c")))
    with pytest.raises(DataError, match=r"turn 3 \(system\)"):
        made.encode(chat(("user", "a"), ("assistant", "c"), ("system", "b"), ("user", "a"), ("assistant", "c")))


def test_all_bad_examples_of_a_batch_are_reported_and_can_be_skipped() -> None:
    made = encoder("regex", "no_system")
    good, bad = chat(("user", "a"), ("assistant", "b")), chat(("system", "s"), ("user", "a"), ("assistant", "b"))
    with pytest.raises(DataError) as error:
        made.encode_batch([bad, good, bad])
    assert len(error.value.problems) == 2
    results = made.encode_batch([bad, good, bad], skip_bad=True)
    assert [len(sequences(result)) for result in results] == [0, 1, 0]
    assert "no place for a system turn" in reasons(results[0])[0]


def test_a_template_that_loses_or_moves_a_turn_is_an_error() -> None:
    tokenizer = tiny_tokenizer.__wrapped__("regex")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'tool' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = make_encoder(tokenizer, template=None, max_tokens=99)
    with pytest.raises(DataError, match=r"does not render turn 2 \(tool\)"):
        made.encode(chat(("user", "a"), ("tool", "twelve"), ("assistant", "b")))


def test_quotes_that_cannot_be_told_from_the_templates_own_tokens_are_left_out() -> None:
    tokenizer = tiny_tokenizer.__wrapped__("regex")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | tojson(ensure_ascii=True) "
        "if m['role'] == 'user' else m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = make_encoder(tokenizer, template=None, max_tokens=99)
    assert reasons(made.encode(chat(("user", "what is </s>?"), ("assistant", "b")))) == [QUOTED_CONTROL]
    assert (
        trained(made, sequences(made.encode(chat(("user", 'what is "that"?'), ("assistant", "b"))))[0]) == "b<|im_end|>"
    )
    with pytest.raises(DataError, match="quotes a control token"):
        made.encode_prompt([{"role": "user", "content": "what is </s>?"}])


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "clock", "arguments": {"zone": "CET"}}}],
}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def test_a_tool_call_that_is_not_rendered_is_not_trained_and_counted() -> None:
    made = encoder("regex", "chatml")
    messages = ({"role": "user", "content": "time?"}, CALL, {"role": "tool", "content": "12:00"})
    example = Example("chat", "f", 1, (*messages, {"role": "assistant", "content": "Noon."}), tools=(TOOL,))
    result = made.encode(example)
    assert trained(made, sequences(result)[0]) == "Noon.<|im_end|>"
    assert "None" not in made.decode(sequences(result)[0].input_ids)
    assert reasons(result) == [
        IN_PART + "tool schemas that the chat template does not render",
        IN_PART + "tool call that the chat template does not render",
    ]


def test_a_long_document_is_split_without_losing_a_token() -> None:
    text = "unbelievable dogs, " * 40
    for kind in ("regex", "adds_bos"):
        whole = sequences(encoder(kind, None).encode(Example("text", "f", 1, text=text)))[0]
        for max_tokens in (2, 3, 7, 50):
            parts = sequences(encoder(kind, None, max_tokens=max_tokens).encode(Example("text", "f", 1, text=text)))
            assert max(len(part.input_ids) for part in parts) <= max_tokens
            if max_tokens > 2:
                assert [i for part in parts for i in part.input_ids] == list(whole.input_ids)
                assert all(list(part.weights) == [0.0] + [1.0] * (len(part.weights) - 1) for part in parts)
        assert whole.input_ids[-1] == tiny_tokenizer(kind).eos_token_id


LONG = chat(
    ("system", "be kind"),
    ("user", "first " * 5),
    ("assistant", "dogs"),
    ("user", "second " * 9),
    ("assistant", "there"),
)


def test_too_long_is_dropped_counted_or_an_error() -> None:
    length = len(sequences(encoder().encode(LONG))[0].input_ids)
    assert sequences(encoder(max_tokens=length).encode(LONG))
    (left,) = [encoder(max_tokens=length - 1).encode(LONG)]
    assert left == LeftOut("longer than max_tokens", "f.jsonl", 1, length)
    with pytest.raises(DataError, match=f"f.jsonl line 1: {length} tokens, and data.max_tokens is {length - 1}"):
        encoder(max_tokens=length - 1, too_long="error").encode(LONG)


@pytest.mark.parametrize("template", ["chatml", "with_bos", "drops_thoughts", "no_end"])
def test_cut_prompt_keeps_whole_answers_behind_the_system_turn_and_the_end_of_the_question(template: str) -> None:
    full = encoder("regex", template)
    lengths = [len(sequence.input_ids) for sequence in sequences(full.encode(LONG))]
    for max_tokens in range(2, max(lengths)):
        made = encoder("regex", template, max_tokens=max_tokens, too_long="cut_prompt")
        result = made.encode(LONG)
        for sequence in sequences(result):
            assert len(sequence.input_ids) <= max_tokens
            text = made.decode(sequence.input_ids)
            assert text.count("<s>") == (template == "with_bos")
            assert trained(made, sequence).endswith(
                ("there" + ENDS.get(template, "</s>"), "dogs" + ENDS.get(template, "</s>"))
            )
        if not sequences(result):
            assert reasons(result) == ["answer longer than max_tokens"]
        else:
            assert any(reason == IN_PART + "prompt cut to max_tokens" for reason in reasons(result))


@pytest.mark.parametrize("kind", ["regex", "adds_bos"])
def test_cut_prompt_of_a_completion_keeps_bos_and_the_answer(kind: str) -> None:
    example = Example("completion", "f", 1, prompt="\U0001f469 hello there " * 9, completion="dogs")
    made = encoder(kind, None, max_tokens=9, too_long="cut_prompt")
    (found,) = sequences(made.encode(example))
    assert trained(made, found) == "dogs</s>"
    assert "\ufffd" not in made.decode(found.input_ids)
    assert list(found.input_ids).count(made.tokenizer.bos_token_id) == (kind == "adds_bos")
    assert reasons(encoder(kind, None, max_tokens=2, too_long="cut_prompt").encode(example)) == [
        "answer longer than max_tokens"
    ]


@pytest.mark.parametrize("text", ["believable " * 9, "\U0001f469\U0001f467" * 9])
def test_a_cut_answer_never_ends_in_a_trained_end_or_half_a_letter(text: str) -> None:
    example = Example("completion", "f", 1, prompt="hello", completion=text)
    length = len(sequences(encoder(template=None).encode(example))[0].input_ids)
    start = len(encoder(template=None).encode_prompt(example))
    for max_tokens in range(2, length):
        made = encoder(template=None, max_tokens=max_tokens, too_long="cut_answer")
        result = made.encode(example)
        if not sequences(result):
            assert max_tokens < start + 4
            assert reasons(result) == ["prompt longer than max_tokens"]
            continue
        (found,) = sequences(result)
        assert text.startswith(trained(made, found))
        assert found.input_ids[-1] not in made.stop_token_ids
        assert reasons(result) == [IN_PART + "answer cut to max_tokens"]


def test_a_conversation_without_a_template_is_an_error_that_names_those_that_can_be_used() -> None:
    example = chat(("user", "a"), ("assistant", "b"))
    with pytest.raises(
        DataError, match=r"f.jsonl line 1: .*no chat template.*\(chatml, llama-3, gemma, mistral, plain\)"
    ):
        encoder(template=None).encode(example)
    with pytest.raises(DataError, match=r"\(plain\)"):
        encoder("no_chat_tokens", None).encode_prompt(example)


def test_a_preference_pair_is_an_error_with_its_place() -> None:
    example = Example("preference", "p.jsonl", 7, prompt="a", chosen="b", rejected="c")
    with pytest.raises(DataError, match=r"p.jsonl line 7: .*not trained yet"):
        encoder().encode(example)


def test_a_tokenizer_without_any_end_token_is_refused() -> None:
    tokenizer = tiny_tokenizer.__wrapped__("no_chat_tokens")
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="end-of-sequence"):
        make_encoder(tokenizer, template=None, max_tokens=9)


def test_a_template_that_is_not_jinja_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}", "utf-8")
    with pytest.raises(RecipeError, match=r"data.template: .*not jinja"):
        make_encoder(tiny_tokenizer(), template=str(path), max_tokens=9)


def test_the_unfollowed_end_of_a_generation_prompt_is_said() -> None:
    made = encoder("regex", "opens_thought")
    assert "'<think>\\n'" in made.notes[0]
    assert made.decode(made.encode_prompt([{"role": "user", "content": "a"}])).endswith("<|im_start|>assistant\n")


def test_a_pickled_encoder_encodes_the_same() -> None:
    made = encoder("adds_bos", "chatml", train_on={"last": 0.5})
    again: Encoder = pickle.loads(pickle.dumps(made))
    assert again.encode_batch([LONG]) == made.encode_batch([LONG])
    assert (again.template_text, again.stop_token_ids) == (made.template_text, made.stop_token_ids)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_batch_is_its_examples_one_by_one(data: st.DataObject) -> None:
    made = encoder()
    batch = [Example("chat", "f", n, data.draw(conversations(system=True))) for n in range(4)]
    batch.append(Example("completion", "f", 5, prompt="un", completion="believable"))
    assert made.encode_batch(batch) == [made.encode(example) for example in batch]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_tokenizer_that_prepends_a_space_does_not_do_so_inside(data: st.DataObject) -> None:
    made = encoder("metaspace", "chatml")
    words = st.lists(st.sampled_from(["dogs", "dog", "he", "750", "</s>", ".", "e\u0301"]), min_size=1, max_size=5)
    answer = " ".join(data.draw(words))
    (found,) = sequences(made.encode(chat(("user", "dogs"), ("assistant", answer))))
    assert trained(made, found) == answer + "<|im_end|>"
    assert not made.tokenizer.convert_ids_to_tokens(trained_ids(found)[0]).startswith("\u2581")
