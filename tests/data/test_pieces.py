"""Pieces are encoded apart, and quoted control tokens stay letters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_ft.data.pieces import ControlTokens, Piece, PieceEncoder, strings_of
from tests.data.tiny_tokenizers import tiny_tokenizer

TEXTS = st.lists(st.sampled_from(["</s>", "<|im_end|>", "dogs", " ", "\n", "\ue000"]) | st.text(max_size=5)).map(
    "".join
)


@pytest.mark.parametrize("kind", ["regex", "no_regex", "adds_bos", "soft_end", "eats_space"])
@settings(max_examples=30, deadline=None)
@given(text=TEXTS)
def test_pieces_of_a_text_join_to_it_and_hold_no_control_token(kind: str, text: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    control = ControlTokens(tokenizer, ["<|im_end|>"])
    pieces = control.pieces_of(text, after=False)
    assert "".join(piece.text for piece in pieces) == text
    found = PieceEncoder(tokenizer).encode(pieces)
    ids = [one for piece in pieces for one in found[piece]]
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.convert_tokens_to_ids(token) for token in control.texts} & set(ids)


@settings(max_examples=50, deadline=None)
@given(before=TEXTS, text=TEXTS)
def test_marked_text_shows_which_control_tokens_are_the_templates_own(before: str, text: str) -> None:
    tokenizer = tiny_tokenizer()
    control = ControlTokens(tokenizer)
    rendered = "<|im_start|>" + control.marked(text.replace("\ue000", ""), "\ue000\ue001") + "<|im_end|>"
    pieces = control.pieces_of(rendered, after=False, marks="\ue000\ue001")
    found = PieceEncoder(tokenizer).encode(pieces)
    ids = [one for piece in pieces for one in found[piece]]
    own = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    control_ids = set(tokenizer.convert_tokens_to_ids(list(control.texts)))
    assert [one for one in ids if one in control_ids] == own


def test_equal_pieces_are_encoded_once_and_pieces_never_merge() -> None:
    encoder = PieceEncoder(tiny_tokenizer("no_regex"))
    pieces = [Piece("un"), Piece("believable"), Piece("un"), Piece("")]
    found = encoder.encode(pieces)
    assert len(found) == 3
    assert found[Piece("")] == []
    assert found[Piece("un")] + found[Piece("believable")] != encoder.ids("unbelievable")


def test_a_piece_after_others_gets_no_space_in_front() -> None:
    encoder = PieceEncoder(tiny_tokenizer("metaspace"))
    alone, after = Piece("dogs"), Piece("dogs", after=True)
    found = encoder.encode([alone, after])
    names = encoder.tokenizer.convert_ids_to_tokens
    assert names(found[alone]) == ["\u2581dogs"]
    assert names(found[after]) == ["dogs"]


def test_truncation_and_padding_of_the_tokenizer_file_do_not_apply() -> None:
    tokenizer = tiny_tokenizer.__wrapped__("regex")
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert PieceEncoder(tokenizer).ids("dogs and dogs") == tiny_tokenizer()("dogs and dogs")["input_ids"]


def test_roles_are_no_texts_and_everything_else_is() -> None:
    message = {"role": "user", "content": "</s>", "tool_calls": [{"function": {"name": "a", "arguments": {"b": 1}}}]}
    assert list(strings_of([message])) == ["content", "</s>", "tool_calls", "function", "name", "a", "arguments", "b"]
    control = ControlTokens(tiny_tokenizer())
    assert control.any_in([message])
    assert control.quoted_in(message) == ["</s>"]
    assert not control.any_in({"role": "</s>", "content": "<s"})
