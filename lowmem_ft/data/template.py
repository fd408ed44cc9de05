"""An example becomes ids and a weight per position: what is trained is exactly the answers and their end tokens.

Decisions, each held by a test:

- Prompt, answer and what follows are encoded apart and joined, so no token spans a border and the trained ids decode to
  the answer and its end token. What precedes an answer is encoded the same way by `Encoder.encode_prompt`.
- A record's text is text: special tokens quoted in it are encoded as letters. A record whose quotes cannot be told from
  the template's own tokens, because the template rewrites the text, is left out and counted.
- Where a template shows earlier turns otherwise than it asked for them (drops reasoning, for example), or has no end
  token, every trained turn is a sequence of its own, behind the prompt that asks for it.
- Positions after the last trained one change no loss and are left away. Position 0 has nothing before it and is never
  trained.
- If the tokenizer adds a beginning-of-sequence token and the template does not, the template gets it, so that whoever
  uses the saved template gets the ids that were trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from lowmem_ft.data.builtin_templates import template_text, usable_templates
from lowmem_ft.data.drafts import EMPTY_ANSWER, Chat, ChatReader, Draft, Stretch, assembled
from lowmem_ft.data.formats import Example, LeftOut, TokenizedExample
from lowmem_ft.data.messages import Message
from lowmem_ft.data.pieces import ControlTokens, Piece, PieceEncoder
from lowmem_ft.data.too_long import (
    cut_answer,
    cut_front,
    leading_system,
    split_document,
    without_first_exchange,
    without_messages,
)
from lowmem_ft.data.train_on import TrainOn, checked_train_on, turn_weights
from lowmem_ft.data.turns import ChatTemplate, TemplateRefusal
from lowmem_ft.errors import DataError, ModelError, Problem, RecipeError

TooLong = Literal["error", "drop", "cut_prompt", "cut_answer"]
Result = TokenizedExample | LeftOut | list[TokenizedExample | LeftOut]

TOO_LONG = "longer than max_tokens"
ANSWER_TOO_LONG = "answer longer than max_tokens"
PROMPT_TOO_LONG = "prompt longer than max_tokens"
PROMPT_CUT = "prompt cut to max_tokens"
ANSWER_CUT = "answer cut to max_tokens"
# Begins the reason of a `LeftOut` beside a sequence of the same record: the record is kept, a part of it is not.
IN_PART = "in part: "


def make_encoder(
    tokenizer: Any, *, template: str | None, max_tokens: int, too_long: TooLong = "drop", train_on: TrainOn = "all"
) -> Encoder:
    """An encoder for a tokenizer and the data settings of a recipe.

    Args:
        tokenizer: a `transformers` tokenizer.
        template: name of a built-in chat template, or path of a jinja file; None: the tokenizer's own.
        max_tokens: longest sequence in tokens, at least 2.
        too_long: what happens to longer ones.
        train_on: "all", "last", or weights by number of the assistant turn from 1, e.g. {"1": 0.5, "last": 1}; turns
            that are not named are not trained.

    Raises:
        RecipeError: the template does not exist, is not jinja, or needs tokens that the tokenizer lacks; or `train_on`
            names something that is no turn.
        ModelError: the tokenizer has no end-of-sequence token and the template no end token.
    """
    return Encoder(tokenizer, template_text(tokenizer, template), max_tokens, too_long, checked_train_on(train_on))


class Encoder:
    """Encodes examples for training, and prompts for generation, the same way. Made by `make_encoder`; can be pickled.

    Attributes:
        template_text: the chat template in use, "" if there is none. Part of the cache key, saved with the adapter.
        end_token_id: what ends an answer: the template's end token, or the tokenizer's end-of-sequence token.
        stop_token_ids: ids at which generation ends: `end_token_id` and the tokenizer's end-of-sequence token.
        control: the control tokens, for reports.
        notes: what a user should know about the template, a sentence each.
    """

    def __init__(
        self, tokenizer: Any, template_text: str, max_tokens: int, too_long: TooLong, train_on: TrainOn
    ) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.too_long = too_long
        self.train_on = train_on
        self.notes: tuple[str, ...] = ()
        self.control = ControlTokens(tokenizer)
        self._pieces = PieceEncoder(tokenizer)
        self._lead_ids = _added_in_front(tokenizer)
        self._reader: ChatReader | None = None
        eos = tokenizer.eos_token_id
        self._eos_ids = [] if eos is None else [eos]
        end_ids = self._eos_ids
        if template_text:
            template = self._learned(template_text)
            self.control = ControlTokens(tokenizer, [template.end] if template.end else [])
            self._reader = ChatReader(template, self.control, self._pieces, eos)
            end_ids = self._pieces.ids(template.end) or end_ids
        if not end_ids:
            raise ModelError(
                Problem("", "the tokenizer names no end-of-sequence token", "Set eos_token in tokenizer_config.json")
            )
        self.template_text = self._reader.template.text if self._reader else ""
        self.end_token_id: int = end_ids[-1]
        self.stop_token_ids: list[int] = list(dict.fromkeys([end_ids[-1], *self._eos_ids]))

    def _learned(self, text: str) -> ChatTemplate:
        tokenizer = self.tokenizer
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if not token.special]
        variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        try:
            template = ChatTemplate(text, variables, self.control.texts, added)
        except TemplateRefusal as refusal:
            raise RecipeError(
                Problem("data.template", f"the chat template is not jinja: {refusal}", "Mend it, or name another.")
            ) from refusal
        bos = tokenizer.bos_token
        has_bos = bool(bos) and (bos in template.shown or (not template.shown and "bos_token" in text))
        if bos and not has_bos and self._lead_ids == [tokenizer.bos_token_id]:
            template = ChatTemplate("{{ bos_token }}" + text, variables, self.control.texts, added)
            self.notes += (f"The tokenizer adds {bos} and the chat template did not: it now stands in the template.",)
        if template.unfollowed_prompt:
            self.notes += (
                f"The template's generation prompt ends in {template.unfollowed_prompt!r}, which its answers do not "
                "follow: they are trained, and generated here, without it.",
            )
        return template

    def encode(self, example: Example) -> Result:
        """`encode_batch` of one example."""
        return self.encode_batch([example])[0]

    def encode_batch(self, examples: Sequence[Example], *, skip_bad: bool = False) -> list[Result]:
        """Encodes examples; a call for hundreds is several times as fast as a call for each.

        Args:
            examples: of any kind but preference.
            skip_bad: an example that is an error becomes `LeftOut` with the error's text as the reason.

        Returns:
            For each example: one sequence; or why it is left out; or a list, if it became several sequences (a long
            document, a template that rewrites history) or if parts of it are left out (their reasons begin with
            `IN_PART`).

        Raises:
            DataError: a problem for each bad example, with file and line: the template refuses it, changes its answer
                or loses a turn; it is too long and `too_long` is "error"; its form cannot be trained.
        """
        problems: list[Problem] = []
        chats = self._chats(examples)
        read: list[tuple[list[Draft], list[str]]] = []
        for index, example in enumerate(examples):
            try:
                read.append(self._drafts(example, chats.get(index)))
            except TemplateRefusal as refusal:
                problems.append(Problem(example.where(), str(refusal)))
                read.append(([], [str(refusal)]))
        found = self._pieces.encode(piece for drafts, _ in read for draft in drafts for piece in draft.pieces())
        results: list[Result] = []
        for example, (drafts, reasons) in zip(examples, read, strict=True):
            try:
                results.append(self._finished(example, drafts, reasons, found))
            except TemplateRefusal as refusal:
                problems.append(Problem(example.where(), str(refusal)))
                results.append(LeftOut(str(refusal), example.file, example.line))
        if problems and not skip_bad:
            raise DataError(problems)
        return results

    def _chats(self, examples: Sequence[Example]) -> dict[int, Chat]:
        chats = {
            index: Chat(list(example.messages), example.tools, self._weights(example))
            for index, example in enumerate(examples)
            if example.kind == "chat"
        }
        if chats:
            self._reader_or_error(examples[min(chats)].where()).render(chats.values())
        return chats

    def _drafts(self, example: Example, chat: Chat | None) -> tuple[list[Draft], list[str]]:
        if chat is not None and self._reader is not None:
            return self._reader.read(chat)
        lead, eos = Stretch(0.0, ids=self._lead_ids), self._eos_ids
        if example.kind == "completion":
            if not example.completion.strip():
                return [], [EMPTY_ANSWER]
            prompt = Stretch(0.0, self.control.pieces_of(str(example.prompt), after=False))
            answer = Stretch(1.0, self.control.pieces_of(example.completion, after=bool(example.prompt)), ids=eos)
            return [Draft([lead, prompt, answer])], []
        if example.kind == "text":
            if not example.text.strip():
                return [], ["empty text"]
            return [Draft([lead, Stretch(1.0, self.control.pieces_of(example.text, after=False), ids=eos)])], []
        raise TemplateRefusal(
            "a preference pair can be read but not trained yet. Use messages or prompt and completion"
        )

    def _finished(
        self, example: Example, drafts: list[Draft], reasons: Iterable[str], found: Mapping[Piece, list[int]]
    ) -> Result:
        outcome: list[TokenizedExample | LeftOut] = []
        for draft in drafts:
            ids, weights = assembled(draft, found)
            if len(ids) > self.max_tokens:
                outcome.extend(self._fitted(example, draft, ids, weights))
            else:
                outcome.append(self._trained(example, ids, weights))
        outcome.extend(LeftOut(reason, example.file, example.line) for reason in reasons)
        if len(outcome) == 1 or all(isinstance(part, LeftOut) for part in outcome):
            return outcome[0]
        return [replace(part, reason=IN_PART + part.reason) if isinstance(part, LeftOut) else part for part in outcome]

    def _trained(self, example: Example, ids: list[int], weights: list[float]) -> TokenizedExample | LeftOut:
        weights[0] = 0.0
        if not any(weights):
            return LeftOut("a single token, which nothing precedes", example.file, example.line, len(ids))
        return TokenizedExample(ids, weights, example.file, example.line)

    # Longer than max_tokens

    def _fitted(
        self, example: Example, draft: Draft, ids: list[int], weights: list[float]
    ) -> list[TokenizedExample | LeftOut]:
        def out(reason: str) -> LeftOut:
            return LeftOut(reason, example.file, example.line, len(ids))

        if example.kind == "text":
            spans = split_document(len(ids), self.max_tokens)
            return [self._trained(example, ids[s.start : s.stop], weights[s.start : s.stop]) for s in spans]
        if self.too_long == "error":
            raise TemplateRefusal(
                f"{len(ids)} tokens, and data.max_tokens is {self.max_tokens}. "
                f"Write max_tokens: {len(ids)}, or too_long: drop"
            )
        if self.too_long == "cut_answer":
            cut_ids, cut_weights = cut_answer(ids, weights, self.max_tokens, self.decode)
            return (
                [self._trained(example, cut_ids, cut_weights), out(ANSWER_CUT)] if cut_ids else [out(PROMPT_TOO_LONG)]
            )
        if self.too_long == "cut_prompt":
            if draft.chat is None:
                cut = cut_front(ids, weights, self.max_tokens, len(self._lead_ids), self.decode)
            else:
                cut = self._with_shorter_prompt(draft.chat, len(ids))
            return [self._trained(example, *cut), out(PROMPT_CUT)] if cut else [out(ANSWER_TOO_LONG)]
        return [out(TOO_LONG)]

    def _with_shorter_prompt(self, chat: Chat, length: int) -> tuple[list[int], list[float]] | None:
        """Whole exchanges go first, from the front; then the front of the remaining question; then the system turn."""
        while (shorter := without_first_exchange(chat.messages, chat.weights)) is not None:
            chat = Chat(shorter[0], chat.tools, shorter[1])
            ids, weights = self._one_sequence(chat)
            if len(ids) <= self.max_tokens:
                return ids, weights
            length = len(ids)
        systems = leading_system(chat.messages)
        cut = self._with_shorter_question(chat, length, systems)
        if cut is None and systems:
            messages, weights_left = without_messages(chat.messages, chat.weights, 0, systems)
            chat = Chat(messages, chat.tools, weights_left)
            ids, weights = self._one_sequence(chat)
            cut = (ids, weights) if len(ids) <= self.max_tokens else self._with_shorter_question(chat, len(ids), 0)
        return cut

    def _with_shorter_question(self, chat: Chat, length: int, index: int) -> tuple[list[int], list[float]] | None:
        message = chat.messages[index]
        if message["role"] != "user":
            return None
        question = self._pieces.ids(message["content"])
        start = length - self.max_tokens
        while 0 < start < len(question):
            content = self.decode(question[start:]).lstrip("\ufffd")
            messages = [*chat.messages[:index], {**message, "content": content}, *chat.messages[index + 1 :]]
            ids, weights = self._one_sequence(Chat(messages, chat.tools, chat.weights))
            if len(ids) <= self.max_tokens:
                return ids, weights
            start += len(ids) - self.max_tokens
        return None

    def _one_sequence(self, chat: Chat) -> tuple[list[int], list[float]]:
        assert self._reader is not None
        drafts, _ = self._reader.read(chat)
        if len(drafts) != 1:
            raise TemplateRefusal("cannot be shortened with this chat template. Write too_long: drop")
        return assembled(drafts[0], self._pieces.encode(drafts[0].pieces()))

    # What generation and evaluation need

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens shown."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode_prompt(
        self, prompt: Example | Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The ids that come before an answer: of an example its last trained one, as long as it is, never cut.

        Args:
            prompt: an example, or messages; if the last of these is an assistant turn, that turn is the answer.
            tools: tool schemas beside messages.

        Raises:
            DataError: the template refuses the messages, or there is no template.
        """
        if isinstance(prompt, Example) and prompt.kind != "chat":
            pieces = self.control.pieces_of(str(prompt.prompt), after=False)
            draft = Draft([Stretch(0.0, ids=self._lead_ids), Stretch(0.0, pieces)])
            return assembled(draft, self._pieces.encode(pieces))[0]
        where = prompt.where() if isinstance(prompt, Example) else "prompt"
        messages, tools, index = self._answer_place(prompt, tools)
        try:
            draft = self._reader_or_error(where).prompt(messages, tools, index)
        except TemplateRefusal as refusal:
            raise DataError(Problem(where, str(refusal))) from refusal
        return assembled(draft, self._pieces.encode(draft.pieces()))[0]

    def reference_answer(self, example: Example) -> str:
        """Text of the last trained answer as the template renders it, without the end token; "" if there is none.

        Raises:
            DataError: the template refuses the messages, or there is no template.
        """
        if example.kind != "chat":
            return example.completion
        messages, tools, index = self._answer_place(example, None)
        if index == len(messages):
            return ""
        try:
            return self._reader_or_error(example.where()).answer(messages, tools, index)
        except TemplateRefusal as refusal:
            raise DataError(Problem(example.where(), str(refusal))) from refusal

    def _answer_place(
        self, prompt: Example | Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[list[Message], Sequence[dict[str, Any]] | None, int]:
        """Messages, tools and the index of the answer's message, which may be the one after the last."""
        if isinstance(prompt, Example):
            messages = list(prompt.messages)
            weights = self._weights(prompt)
            assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            return messages, prompt.tools, max(weights, default=max(assistants, default=len(messages)))
        messages = list(prompt)
        return messages, tools, len(messages) - (bool(messages) and messages[-1]["role"] == "assistant")

    def _weights(self, example: Example) -> dict[int, float]:
        return turn_weights(example.messages, self.train_on, example.untrained)

    def _reader_or_error(self, where: str) -> ChatReader:
        if self._reader is None:
            usable = ", ".join(usable_templates(self.tokenizer.get_vocab()))
            raise DataError(
                Problem(
                    where,
                    "this is a conversation, and the tokenizer has no chat template",
                    f"Write data.template: with one that this tokenizer's tokens allow ({usable}), or a path",
                )
            )
        return self._reader


def _added_in_front(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text, such as the beginning-of-sequence token."""
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    whole = tokenizer("x")["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return list(whole[:start])
    return []
