"""A conversation rendered by a chat template, with every assistant turn located in the text.

A turn is found by rendering twice: up to the generation prompt, and with the answer. What the second text adds is the
answer, its end token and the template's tail. Nothing is searched for by role names or markers, so no text that quotes
them can move a border, and what comes before an answer is what a model sees when it is asked for that answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.data.messages import Message
from lowmem_ft.data.unseen import squeezed

_SENTINEL = "Zq7AnswerGoesHere7qZ"


class TemplateRefusal(Exception):  # noqa: N818  it is the template's or our refusal, shown with file and line by the caller
    """A conversation that the template does not render, or renders so that its answers cannot be located."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One assistant turn in a rendered text: `prefix + text + end` is how the text begins.

    Attributes:
        message: index of the turn's message.
        prefix: all that comes before, as when the model is asked for this answer.
        text: what the model has to write: content and tool calls as the template renders them.
        end: the token, or tokens in a row, that end the turn; "" where the template has none.
    """

    message: int
    prefix: str
    text: str
    end: str


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a rendered text that is encoded by itself.

    Attributes:
        text: the stretch, without `end`.
        message: index of the assistant message that it is the answer of, or -1.
        end: the end token after an answer.
    """

    text: str
    message: int = -1
    end: str = ""


@dataclass(slots=True)
class Conversation:
    """Messages and what the template made of them so far.

    Attributes:
        messages: OpenAI-form dicts; None values are taken as missing, as transformers does.
        tools: tool schemas or None.
        texts: rendered texts by (number of messages, with generation prompt); a refusal is kept as such.
    """

    messages: list[Message]
    tools: Sequence[dict[str, Any]] | None = None
    texts: dict[tuple[int, bool], str | TemplateRefusal] = field(default_factory=dict)

    def assistants(self) -> list[int]:
        """Indexes of the assistant messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]


class ChatTemplate:
    """A chat template and what it does around an answer, learned once from two small conversations.

    Args:
        text: jinja text.
        variables: special tokens by the names templates use (`bos_token`, `eos_token`).
        special: special tokens, which may end a turn.
        added: other added tokens, which end a turn only where no special one does.

    Attributes:
        text: jinja text.
        end: what ends a turn, "" where the template has nothing that is a token.
        has_prompt: there is a generation prompt, and answers follow it.
        header: the generation prompt of a template whose answers are that, the content and `end`; "" of any other.
        shown: a question and an answer as rendered; "" if the template rendered none of those tried.
        unfollowed_prompt: the end of a generation prompt that answers do not follow; "" if they do.

    Raises:
        TemplateRefusal: the text is not a jinja template.
    """

    def __init__(self, text: str, variables: dict[str, str], special: Sequence[str], added: Iterable[str]) -> None:
        self.text = text
        self._variables = variables
        self._special_run = _trailing_run(special)
        self._added_run = _trailing_run(added)
        self._control = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.has_prompt = True
        self.end = ""
        self._tail = ""
        self.header = ""
        self.shown = ""
        self.unfollowed_prompt = ""
        self._learn()

    def _learn(self) -> None:
        turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _SENTINEL}]
        headers = set()
        for start in ([], [{"role": "system", "content": "System"}]):
            probe = Conversation([*start, *turns, *turns])
            try:
                full = self.rendered(probe, len(start) + 2, generation=False)
                asked = self.rendered(probe, len(start) + 1, generation=True)
                unasked = self.rendered(probe, len(start) + 1, generation=False)
            except TemplateRefusal as refusal:
                if type(refusal.__cause__).__name__ == "TemplateSyntaxError":
                    raise
                continue  # it may refuse system turns, or want one
            if not self.shown:
                self.shown = full
                self.has_prompt = asked != unasked and full.startswith(asked)
                self._tail = full.rpartition(_SENTINEL)[2]
                match = self._special_run.search(self._tail) or self._added_run.search(self._tail)
                self.end = match["run"] if match else ""
                if asked != unasked and not self.has_prompt:
                    self.unfollowed_prompt = asked[_shared_length(asked, full) :]
            headers.add(self._header_of(probe, full, asked, unasked))
        self.header = headers.pop() if len(headers) == 1 else ""

    def _header_of(self, probe: Conversation, full: str, asked: str, unasked: str) -> str:
        """The generation prompt, if both answers of the probe are that, the content and the end token."""
        header = asked[len(unasked) :] if asked.startswith(unasked) else ""
        plain = header and self.end and self._tail.startswith(self.end) and full == asked + _SENTINEL + self._tail
        if not plain or not self._control.search(header):
            return ""
        count = len(probe.messages)
        try:
            twice = self.rendered(probe, count, generation=False)
            asked_twice = self.rendered(probe, count - 1, generation=True)
        except TemplateRefusal:
            return ""
        first = asked + _SENTINEL + self.end
        alike = asked_twice.startswith(first) and twice == asked_twice + _SENTINEL + self._tail
        return header if alike and twice.count(header) == 2 else ""

    def parts_at_headers(self, messages: Sequence[Message], text: str) -> list[Part] | None:
        """The parts of a rendered conversation, up to its last answer, found with no further rendering.

        The k-th header must be followed by the k-th answer as written and the end token. A header holds a control
        token, so if no message quotes one, all headers are the template's own, and this finds what `answer_at` finds.

        Args:
            messages: with role and content only, quoting no control token.
            text: what the template makes of them.

        Returns:
            The parts, or None if that does not hold, or the template is not known to be so simple.
        """
        if not self.header:
            return None
        pieces = text.split(self.header)
        parts = []
        before = pieces[0]
        turn = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                turn += 1
                if turn >= len(pieces):
                    return None
                content, piece = message["content"], pieces[turn]
                if not piece.startswith(content + self.end):
                    content = content.strip()
                    if not piece.startswith(content + self.end):
                        return None
                parts.append(Part(before + self.header))
                parts.append(Part(content, index, self.end))
                before = piece[len(content) + len(self.end) :]
        return parts if turn == len(pieces) - 1 else None

    def render_all(self, wanted: Iterable[tuple[Conversation, int, bool]]) -> None:
        """Renders many texts in one call, which takes half the time of one call each. Refusals are kept, not raised.

        Args:
            wanted: (conversation, number of its messages, with generation prompt).
        """
        groups: dict[bool, list[tuple[Conversation, int]]] = {False: [], True: []}
        for conversation, count, generation in wanted:
            if conversation.tools is None:
                groups[generation].append((conversation, count))
        for generation, group in groups.items():
            try:
                texts = self._render([_plain(one.messages[:count]) for one, count in group], None, generation)
            except Exception:
                continue  # found again, one by one, by `rendered`
            for (conversation, count), text in zip(group, texts, strict=True):
                conversation.texts[count, generation] = text

    def _render(self, conversations: list[list[Message]], tools: Any, generation: bool) -> list[str]:
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = {**self._variables, "add_generation_prompt": generation}
        rendered = render_jinja_template(conversations, list(tools) if tools else None, None, self.text, **variables)
        return list(rendered[0])

    def rendered(self, conversation: Conversation, count: int, *, generation: bool) -> str:
        """The text of the first `count` messages.

        Raises:
            TemplateRefusal: in the template's own words.
        """
        text = conversation.texts.get((count, generation))
        if text is None:
            for messages in _forms(conversation.messages[:count]):
                try:
                    text = self._render_or_refuse(messages, conversation.tools, generation)
                    break
                except TemplateRefusal as refusal:
                    text = text or refusal
            assert text is not None
            conversation.texts[count, generation] = text
        if isinstance(text, TemplateRefusal):
            raise text
        return text

    def _render_or_refuse(self, messages: list[Message], tools: Any, generation: bool) -> str:
        try:
            return self._render([messages], tools, generation)[0]
        except Exception as error:  # a template is a program: it can fail in any way
            words = str(error) if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"
            raise TemplateRefusal(words) from error

    def _has_text(self, conversation: Conversation, count: int, generation: bool) -> str | None:
        try:
            return self.rendered(conversation, count, generation=generation)
        except TemplateRefusal:
            return None

    def prefix_of(self, conversation: Conversation, index: int, full: str | None = None) -> str:
        """All that comes before the answer at message `index`, which may be the one after the last.

        Args:
            conversation: what is rendered.
            index: index of the answer's message.
            full: the text with the answer, where there is one.

        Raises:
            TemplateRefusal: the template does not show where the answer begins.
        """
        asked = self._has_text(conversation, index, True)
        if asked and index > 0 and (self.has_prompt if full is None else full.startswith(asked)):
            # Some templates ask for an answer only after a question: then the text is as without asking.
            after_question = self.has_prompt and conversation.messages[index - 1]["role"] == "user"
            if after_question or asked != self._has_text(conversation, index, False):
                return asked
        # No generation prompt, or not one that the answer follows: what stands before an answer that is known.
        stand_in = Conversation(
            [*conversation.messages[:index], {"role": "assistant", "content": _SENTINEL}], conversation.tools
        )
        with_stand_in = self.rendered(stand_in, index + 1, generation=False)
        before = with_stand_in.rpartition(_SENTINEL)[0]
        if _SENTINEL not in with_stand_in or (full is not None and not full.startswith(before)):
            asks = f": it asks with {asked[-30:]!r}, and does not show this answer so" if asked else ""
            raise TemplateRefusal(f"the chat template does not show where the answer of turn {index + 1} begins{asks}")
        if asked and index > 0 and before.startswith(asked) and not before[len(asked) :].strip():
            return asked
        return before

    def answer_at(self, conversation: Conversation, index: int) -> Answer:
        """Where the answer at message `index` is.

        Raises:
            TemplateRefusal: the template refuses, or changes the answer, or does not show where it begins.
        """
        message = conversation.messages[index]
        content = message.get("content") or ""
        full = self.rendered(conversation, index + 1, generation=False)
        prefix = self.prefix_of(conversation, index, full)
        text, end = self._split_end(full[len(prefix) :], content)
        if content and content not in text and not _ends_in(content, prefix, text):
            shown = text if len(text) < 80 else text[:77] + "..."
            raise TemplateRefusal(f"the chat template changes the answer of turn {index + 1}: it renders {shown!r}")
        return Answer(index, prefix, text, end)

    def _split_end(self, body: str, content: str) -> tuple[str, str]:
        if self.end and body.endswith(self._tail):
            cut = len(body) - len(self._tail) + self._tail.index(self.end)
            return body[:cut], self.end
        match = self._special_run.search(body)
        if match:
            return body[: match.start()], match["run"]
        if self._tail and body.endswith(self._tail):
            return body[: -len(self._tail)], ""
        after_content = body.rfind(content) + len(content)
        if content and after_content >= len(content):
            return body[:after_content], ""
        return body.rstrip(), ""

    def answers_before(self, conversation: Conversation, index: int) -> list[Answer]:
        """The assistant turns before message `index` that can be located; the others are no borders."""
        found = []
        for message in conversation.assistants():
            if message < index:
                try:
                    found.append(self.answer_at(conversation, message))
                except TemplateRefusal:
                    continue
        return found


def parts_of(text: str, answers: Sequence[Answer]) -> list[Part]:
    """`text` cut at every answer that stands in it as it was asked for; those that it shows otherwise are no borders.

    Joined, texts and ends of the parts are `text`.
    """
    parts: list[Part] = []
    position = 0
    for answer in answers:
        start = len(answer.prefix)
        stands = answer.end and start >= position and text.startswith(answer.prefix)
        if stands and text.startswith(answer.text + answer.end, start):
            parts.append(Part(text[position:start]))
            parts.append(Part(answer.text, answer.message, answer.end))
            position = start + len(answer.text) + len(answer.end)
    parts.append(Part(text[position:]))
    return parts


def _plain(messages: Sequence[Message]) -> list[Message]:
    return [
        {key: value for key, value in message.items() if value is not None} if None in message.values() else message
        for message in messages
    ]


def _forms(messages: Sequence[Message]) -> Iterable[list[Message]]:
    """The messages, and then in the forms that templates need which do not know what the record holds.

    Some read content without asking whether it is there, beside tool calls, and some take arguments as JSON text.
    """
    plain = _plain(messages)
    yield plain
    if any(message.get("tool_calls") for message in plain):
        filled = [{"content": "", **message} for message in plain]
        yield filled
        for form in (plain, filled):
            yield [
                {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
                if message.get("tool_calls")
                else message
                for message in form
            ]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments", ""), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _ends_in(content: str, prefix: str, text: str) -> bool:
    """Whether an answer's content is in `text`, but for white space, or begins in a prompt such as `<think>`."""
    before, wanted = squeezed(prefix[-len(content) :]), squeezed(content)
    joined = before + squeezed(text)
    return wanted in joined and joined.rfind(wanted) + len(wanted) > len(before)


def _trailing_run(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches a text's end from its first token on, if only tokens and space follow; `run` is the tokens in a row."""
    any_token = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token.strip()) or "(?!)"
    return re.compile(rf"(?P<run>(?:{any_token})+)\s*(?:(?:{any_token})\s*)*\Z")


def _shared_length(one: str, other: str) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
