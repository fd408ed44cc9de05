"""A conversation with a model, its base beside it where it has one. Reads lines, writes text: a terminal or a test."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_ft.data.messages import Message
from lowmem_ft.export.opened import Opened

COMMANDS = {
    "/base": "answer as the base alone too, or no longer",
    "/system": "what follows is the system message, of a new conversation; without a text there is none",
    "/reset": "begin a new conversation",
    "/help": "these lines",
    "/quit": "end",
}


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        max_new_tokens: longest answer.
        temperature: 0 takes the most likely token; else probabilities are divided by it before one is drawn.
        top_p: draw only among the most likely tokens that make up this much.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0

    def options(self) -> dict[str, Any]:
        """For `generate` of transformers."""
        if self.temperature == 0:
            return {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {**drawn, "max_new_tokens": self.max_new_tokens}


@dataclass
class Chat:
    """A conversation.

    Attributes:
        opened: who answers.
        write: gets text as it is written, line ends included.
        sampling: how.
        system: the system message.
        turns: what was said, without the system message.
        with_base: the base answers each question too; its answers are not part of the conversation.
    """

    opened: Opened
    write: Callable[[str], None]
    sampling: Sampling = Sampling()
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    with_base: bool = False

    def run(self, lines: Iterable[str]) -> None:
        """Answer each line until `/quit` or the end. A line that ends in a backslash goes on in the next.

        Raises:
            DataError: there is no chat template, or it refuses the conversation.
        """
        waiting = ""
        for line in lines:
            waiting += line.rstrip("\n")
            if waiting.endswith("\\"):
                waiting = waiting[:-1] + "\n"
                continue
            said, waiting = waiting.strip(), ""
            if said.startswith("/") and not said.startswith("//"):
                if not self.command(said):
                    return
            elif said:
                self.ask(said.removeprefix("/") if said.startswith("//") else said)

    def ask(self, question: str) -> None:
        """Answer a question, as the model and, where that was asked for, as its base."""
        self.turns.append({"role": "user", "content": question})
        names = self.with_base
        answer = self._answer(name="model: " if names else "")
        if names:
            self._answer(name="base:  ", adapter=False)
        self.turns.append({"role": "assistant", "content": answer})

    def command(self, line: str) -> bool:
        """Do what a line that begins with a slash says.

        Returns:
            Whether the conversation goes on.
        """
        name, _, text = line.partition(" ")
        if name == "/quit":
            return False
        if name == "/reset":
            self.turns.clear()
            self._note("a new conversation")
        elif name == "/system":
            self.system = text.strip() or None
            self.turns.clear()
            self._note("a new conversation, " + ("with that system message" if self.system else "no system message"))
        elif name == "/base":
            self._switch_base()
        else:
            if name != "/help":
                near = difflib.get_close_matches(name, COMMANDS, n=1)
                self._note(f"{name} is no command" + (f"; did you mean {near[0]}?" if near else ""))
            for command, meaning in COMMANDS.items():
                self.write(f"  {command:8} {meaning}\n")
        return True

    def _switch_base(self) -> None:
        if not self.opened.has_adapter:
            self._note("this is a model without an adapter: there is no base to compare with")
            return
        self.with_base = not self.with_base
        self._note("the base answers too" if self.with_base else "the base no longer answers")
        if self.with_base and self.turns:
            self._answer(name="base:  ", adapter=False, turns=self.turns[:-1])

    def _answer(self, *, name: str, adapter: bool = True, turns: Sequence[Message] | None = None) -> str:
        ids = self._prompt(self.turns if turns is None else turns)
        self.write(name)
        stream = _Stream(self.opened, self.write)
        try:
            with self.opened.running(adapter):
                self.opened.model.generate(
                    input_ids=torch.tensor([ids], device=self.opened.device),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self.opened.device),
                    eos_token_id=list(self.opened.encoder.stop_token_ids),
                    pad_token_id=self.opened.encoder.stop_token_ids[0],
                    streamer=stream,
                    **self.sampling.options(),
                )
        except KeyboardInterrupt:
            self.write(" [broken off]")
        self.write("\n")
        return stream.text

    def _prompt(self, turns: Sequence[Message]) -> list[int]:
        """Ids of the conversation. Where it has become too long for the model, the oldest exchanges are left out."""
        before: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        longest = getattr(self.opened.model.config, "max_position_embeddings", None)
        turns = list(turns)
        while True:
            ids = self.opened.encoder.encode_prompt([*before, *turns])
            room = (longest or len(ids) + self.sampling.max_new_tokens) - self.sampling.max_new_tokens
            if len(ids) <= room or len(turns) < 3:
                return ids
            turns = turns[2:]
            if self.turns[: len(self.turns) - len(turns)]:
                del self.turns[: len(self.turns) - len(turns)]
                self._note("the conversation is too long for the model: its oldest question and answer are left out")

    def _note(self, text: str) -> None:
        self.write(f"[{text}]\n")


def read_lines() -> Iterator[str]:
    """Lines of standard input; at a terminal with a prompt, editing and history."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() has arrows and history where it is there
    print("/help lists the commands, /quit ends")
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def write_now(text: str) -> None:
    """To standard output, at once."""
    print(text, end="", flush=True)


class _Stream:
    """Takes tokens as `generate` makes them, and writes the text that they have become.

    Letters of several tokens wait until they are whole.
    """

    def __init__(self, opened: Opened, write: Callable[[str], None]) -> None:
        self.opened, self.write_text = opened, write
        self.ids: list[int] = []
        self.text = ""
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then a token at a time."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        new = value.reshape(-1).tolist()
        if new[0] in self.opened.encoder.stop_token_ids:
            return
        self.ids += new
        self._show(self.opened.encoder.decode(self.ids).rstrip("\ufffd"))

    def end(self) -> None:
        """Write what is left."""
        self._show(self.opened.encoder.decode(self.ids))

    def _show(self, text: str) -> None:
        if len(text) > len(self.text):
            self.write_text(text[len(self.text) :])
            self.text = text
