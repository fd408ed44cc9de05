"""From a conversation to the pieces of its training sequences, with the weight of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.data.messages import Message
from lowmem_ft.data.pieces import ControlTokens, Piece, PieceEncoder, strings_of
from lowmem_ft.data.turns import (
    Answer,
    ChatTemplate,
    Conversation,
    Part,
    TemplateRefusal,
    parts_of,
)
from lowmem_ft.data.unseen import not_rendered, unseen_extras, unseen_tools

EMPTY_ANSWER = "empty answer"
NOTHING_TO_TRAIN = "nothing to train"
QUOTED_CONTROL = "quotes a control token in a text that the chat template rewrites"


@dataclass(slots=True)
class Chat:
    """A conversation and what of it is trained.

    Attributes:
        messages: as in the record.
        tools: as in the record.
        weights: weight of each trained assistant message, by its index.
        conversation: what the template renders: `messages`, with marks around control tokens that they quote.
        marks: the two characters used as marks; "" where nothing is quoted.
    """

    messages: list[Message]
    tools: Sequence[dict[str, Any]] | None
    weights: dict[int, float]
    conversation: Conversation | None = None
    marks: str = ""


@dataclass(slots=True)
class Stretch:
    """Consecutive ids of one weight: those of `pieces`, less `skip` at their front, then `ids`."""

    weight: float
    pieces: list[Piece] = field(default_factory=list)
    skip: int = 0
    ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """One training sequence before it is encoded; `chat` is what it was made from, None if it was no conversation."""

    stretches: list[Stretch]
    chat: Chat | None = None

    def pieces(self) -> Iterable[Piece]:
        """All pieces to be encoded."""
        for stretch in self.stretches:
            yield from stretch.pieces


def assembled(draft: Draft, found: Mapping[Piece, list[int]]) -> tuple[list[int], list[float]]:
    """Ids and weights of a draft, from the ids of its pieces."""
    ids: list[int] = []
    weights: list[float] = []
    for stretch in draft.stretches:
        start = len(ids)
        for piece in stretch.pieces:
            ids += found[piece]
        if stretch.skip:
            del ids[start : start + stretch.skip]
        ids += stretch.ids
        weights += [stretch.weight] * (len(ids) - start)
    return ids, weights


class ChatReader:
    """Turns conversations into drafts with one chat template.

    Args:
        template: the template.
        control: the control tokens.
        pieces: the encoder, to learn how end tokens are encoded.
        eos: the tokenizer's end-of-sequence id, which ends answers where the template has no end token.
    """

    def __init__(self, template: ChatTemplate, control: ControlTokens, pieces: PieceEncoder, eos: int | None) -> None:
        self.template = template
        self._control = control
        self._pieces = pieces
        self._eos = eos
        self._ends: dict[str, tuple[list[int], bool]] = {}

    def _end(self, text: str) -> tuple[list[int], bool]:
        """Ids of an end token, and whether text after it can be encoded together with it, as tokenizers expect."""
        if text not in self._ends:
            ids = self._pieces.ids(text) if text else []
            if not text and self._eos is None:
                raise TemplateRefusal("neither the chat template nor the tokenizer has a token that ends an answer")
            together = bool(text) and self._pieces.ids(text + "\nx")[: len(ids)] == ids
            self._ends[text] = (ids if text else [self._eos or 0], together)
        return self._ends[text]

    def _conversation(self, chat: Chat) -> Conversation:
        if chat.conversation is None:
            messages: list[Message] = [
                {key: value for key, value in message.items() if key != "weight"} if "weight" in message else message
                for message in chat.messages
            ]
            chat.conversation = Conversation(messages, chat.tools)
            texts = [message["content"] if _only_content(message) else message for message in messages]
            if any(self._control.any_in(text) for text in texts) or self._control.any_in(chat.tools or ()):
                chat.marks = _unused_marks([messages, chat.tools])
                chat.conversation = Conversation(
                    self._control.marked(messages, chat.marks),
                    None if chat.tools is None else self._control.marked(chat.tools, chat.marks),
                )
        return chat.conversation

    def render(self, chats: Iterable[Chat]) -> None:
        """Renders what `read` will need of many conversations at once."""
        wanted = []
        for chat in chats:
            conversation = self._conversation(chat)
            wanted.append((conversation, len(conversation.messages), False))
            if self.template.header and self._is_plain(chat):
                continue
            wanted += [(conversation, index, True) for index in conversation.assistants() if index]
        self.template.render_all(wanted)

    def read(self, chat: Chat) -> tuple[list[Draft], list[str]]:
        """Drafts of a conversation, and why it, or a part of it, is left out.

        Raises:
            TemplateRefusal: the template does not render it, or its answers cannot be located.
        """
        conversation = self._conversation(chat)
        whole = self._whole(conversation)
        if chat.marks and not self._marks_pass(chat, whole):
            return [], [QUOTED_CONTROL]
        lost = not_rendered(conversation.messages, whole)
        if lost:
            raise TemplateRefusal(f"{lost}. Remove the turn, or name another template in data.template")
        if self._is_plain(chat):
            parts = self.template.parts_at_headers(chat.messages, whole)
            if parts:
                return [self._draft(parts, chat, chat.weights)], []
        reasons = (
            ["tool schemas that the chat template does not render"] if unseen_tools(conversation.tools, whole) else []
        )
        answers, trained, more = self._answers(chat, conversation)
        reasons += more
        if not trained:
            return [], more or [NOTHING_TO_TRAIN]
        weights = {answer.message: chat.weights[answer.message] for answer in trained}
        parts = parts_of(whole, answers)
        if weights.keys() <= {part.message for part in parts}:
            return [self._draft(parts, chat, weights)], reasons
        drafts = []
        for answer in trained:
            before = parts_of(answer.prefix, [other for other in answers if other.message < answer.message])
            own_weights = {answer.message: weights[answer.message]}
            own = Chat(chat.messages[: answer.message + 1], chat.tools, own_weights, None, chat.marks)
            drafts.append(self._draft([*before, Part(answer.text, answer.message, answer.end)], own, own_weights))
        return drafts, reasons

    def _is_plain(self, chat: Chat) -> bool:
        """Whether headers are enough to find the answers, see `ChatTemplate.parts_at_headers`."""
        if chat.marks or chat.tools or not chat.weights or not all(map(_only_content, chat.messages)):
            return False
        return all(chat.messages[index]["content"].strip() for index in chat.weights)

    def _whole(self, conversation: Conversation) -> str:
        count = len(conversation.messages)
        try:
            return self.template.rendered(conversation, count, generation=False)
        except TemplateRefusal as refusal:
            # The shortest beginning that is refused in the same words ends with the turn that is to blame.
            for shorter in range(1, count + 1):
                try:
                    self.template.rendered(conversation, shorter, generation=False)
                except TemplateRefusal as same:
                    if str(same) == str(refusal):
                        turn = f"turn {shorter} ({conversation.messages[shorter - 1]['role']})"
                        raise TemplateRefusal(f"the chat template refuses {turn}: {refusal}") from refusal
            raise

    def _marks_pass(self, chat: Chat, whole: str) -> bool:
        """Whether the text with marks is the text without them, but for the marks."""
        unmarked = Conversation(chat.messages, chat.tools)
        text = self.template.rendered(unmarked, len(chat.messages), generation=False)
        return without_marks(whole, chat.marks) == text

    def _answers(self, chat: Chat, conversation: Conversation) -> tuple[list[Answer], list[Answer], list[str]]:
        """All assistant turns that can be located, those that are trained, and why others that should be are not."""
        answers, trained, reasons, empty = [], [], [], 0
        for index in conversation.assistants():
            wanted = chat.weights.get(index, 0.0) > 0
            message = conversation.messages[index]
            content = str(message.get("content") or "").strip()
            try:
                answer = self.template.answer_at(conversation, index)
            except TemplateRefusal:
                if wanted and (content or message.get("tool_calls")):
                    raise
                continue
            answers.append(answer)
            if not wanted:
                continue
            unseen = unseen_extras(message, answer.text)
            reasons += unseen
            if content or (message.get("tool_calls") and not unseen):
                trained.append(answer)
            elif not unseen:
                empty += 1
        if empty:
            reasons.append(EMPTY_ANSWER)
        return answers, trained, reasons

    def _draft(self, parts: Sequence[Part], chat: Chat, weights: Mapping[int, float]) -> Draft:
        """The parts up to the last one with a weight; all of them if there are no weights."""
        last = max((index for index, part in enumerate(parts) if part.message in weights), default=len(parts) - 1)
        stretches = []
        end = ""
        for part in parts[: last + 1]:
            stretches.append(self._stretch(part, end, chat.marks, weights.get(part.message, 0.0)))
            end = part.end
        return Draft(stretches, chat)

    def _stretch(self, part: Part, end_before: str, marks: str, weight: float) -> Stretch:
        if part.message >= 0:
            return Stretch(weight, self._pieces_of(part.text, True, marks), ids=self._end(part.end)[0])
        if end_before:
            ids, together = self._end(end_before)
            if together:
                return Stretch(0.0, self._pieces_of(end_before + part.text, False, marks), skip=len(ids))
        return Stretch(0.0, self._pieces_of(part.text, bool(end_before), marks))

    def _pieces_of(self, text: str, after: bool, marks: str) -> list[Piece]:
        return self._control.pieces_of(text, after=after, marks=marks) if marks else [Piece(text, False, after)]

    def prompt(self, messages: list[Message], tools: Sequence[dict[str, Any]] | None, index: int) -> Draft:
        """What precedes the answer at message `index`, which may be the one after the last: one draft, nothing trained.

        Raises:
            TemplateRefusal: the template does not render it, or quoted control tokens cannot be told from its own.
        """
        chat = Chat(messages, tools, {})
        conversation = self._conversation(chat)
        full = self.template.rendered(conversation, index + 1, generation=False) if index < len(messages) else None
        prefix = self.template.prefix_of(conversation, index, full)
        if chat.marks:
            plain = Conversation(messages, tools)
            full = self.template.rendered(plain, index + 1, generation=False) if index < len(messages) else None
            if without_marks(prefix, chat.marks) != self.template.prefix_of(plain, index, full):
                raise TemplateRefusal(QUOTED_CONTROL)
        return self._draft(parts_of(prefix, self.template.answers_before(conversation, index)), chat, {})

    def answer(self, messages: list[Message], tools: Sequence[dict[str, Any]] | None, index: int) -> str:
        """The answer at message `index` as the template renders it, without its end token.

        Raises:
            TemplateRefusal: the template does not render it, or it cannot be located.
        """
        chat = Chat(messages[: index + 1], tools, {})
        return without_marks(self.template.answer_at(self._conversation(chat), index).text, chat.marks)


def _only_content(message: Message) -> bool:
    return len(message) == 2 and isinstance(message.get("content"), str)


def without_marks(text: str, marks: str) -> str:
    """`text` without the characters of `marks`."""
    return text.translate({ord(mark): None for mark in marks})


def _unused_marks(value: Any) -> str:
    """Two private-use characters that no string of `value` holds."""
    used = set().union(*strings_of(value))
    free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
    return next(free) + next(free)
