"""Drafts hold every part of a conversation once, with the weight of each answer."""

from __future__ import annotations

from lowmem_ft.data.drafts import Chat, ChatReader, Draft, Stretch, assembled, without_marks
from lowmem_ft.data.pieces import ControlTokens, Piece, PieceEncoder
from lowmem_ft.data.turns import ChatTemplate
from tests.data.tiny_tokenizers import TEMPLATES, tiny_tokenizer


def reader(name: str) -> ChatReader:
    tokenizer = tiny_tokenizer()
    control = ControlTokens(tokenizer)
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}, control.texts, ())
    return ChatReader(template, control, PieceEncoder(tokenizer), tokenizer.eos_token_id)


def test_skipped_ids_and_literal_ids_count_as_their_stretch() -> None:
    piece = Piece("x")
    draft = Draft([Stretch(0.0, [piece], skip=1), Stretch(0.5, [piece], ids=[9])])
    assert assembled(draft, {piece: [7, 8]}) == ([8, 7, 8, 9], [0.0, 0.5, 0.5, 0.5])


def test_one_draft_holds_all_turns_with_their_weights_and_ends_with_the_last() -> None:
    turns = [("user", "a"), ("assistant", "dogs"), ("user", "b"), ("assistant", "there"), ("user", "c")]
    chat = Chat([{"role": role, "content": text} for role, text in turns], None, {1: 0.5, 3: 2.0})
    for name in ("chatml", "words_only"):
        (draft,), reasons = reader(name).read(chat)
        assert reasons == []
        assert [stretch.weight for stretch in draft.stretches] == [0.0, 0.5, 0.0, 2.0]
        assert draft.stretches[-1].pieces[0].text == "there"
        chat.conversation = None


def test_the_openai_weight_of_a_message_is_not_shown_to_the_template() -> None:
    chat = Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}], None, {1: 1.0})
    made = reader("chatml")
    made.read(chat)
    assert chat.conversation is not None
    assert all("weight" not in message for message in chat.conversation.messages)


def test_marks_are_letters_that_the_record_does_not_hold() -> None:
    chat = Chat(
        [{"role": "user", "content": "\ue000</s>\ue002"}, {"role": "assistant", "content": "b"}], None, {1: 1.0}
    )
    made = reader("chatml")
    drafts, reasons = made.read(chat)
    assert (len(drafts), reasons, chat.marks) == (1, [], "\ue001\ue003")
    assert without_marks("a\ue001b\ue003", chat.marks) == "ab"
    assert "".join(piece.text for piece in drafts[0].stretches[0].pieces) == (
        "<|im_start|>user\n\ue000</s>\ue002<|im_end|>\n<|im_start|>assistant\n"
    )
