"""Prompts from a file: text, a prompt a line, or records with messages or a prompt, with or without their answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.data.files import kind_of, read_file
from lowmem_ft.data.formats import Example
from lowmem_ft.data.json_text import Bad
from lowmem_ft.data.messages import BadRecordError, Message, check_messages, check_tools
from lowmem_ft.data.template import Encoder
from lowmem_ft.errors import DataError, Problem

GENERAL = (
    "What is the capital of France?",
    "Write one sentence about rain.",
    "List three fruits.",
    "Explain in two sentences what a bridge is for.",
    "Translate to French: good morning.",
    "How many days has a week?",
    "Give a name to a small grey cat.",
    "My parcel came late and one cup is broken. What should I do?",
)
"""What is asked where nothing else is known of a model."""


@dataclass(frozen=True)
class Prompt:
    """A question, and the answer that a file has for it.

    Attributes:
        where: file and line.
        messages: a conversation that ends before the answer; empty where `text` is the prompt.
        text: what comes before the answer, as it is, in no template.
        reference: the answer of the file; None without one.
        tools: tool schemas beside messages.
    """

    where: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    reference: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None

    def ids(self, encoder: Encoder) -> list[int]:
        """Exactly as in training before an answer. Messages where there is no template are joined as text.

        Raises:
            DataError: the template refuses them.
        """
        if self.messages and encoder.template_text:
            return encoder.encode_prompt(self.messages, self.tools)
        text = self.text or "\n".join(str(message["content"] or "") for message in self.messages)
        return encoder.encode_prompt(Example("completion", self.where, 0, prompt=text))


def user_prompts(texts: Sequence[str], where: str, system: str | None = None) -> list[Prompt]:
    """A conversation of one question for each text.

    Args:
        texts: what the user says.
        where: for messages about them.
        system: a system message before each.
    """
    before: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
    return [Prompt(where, (*before, {"role": "user", "content": text})) for text in texts]


def read_prompts(path: Path, system: str | None = None) -> list[Prompt]:
    """The prompts of a file.

    A line of text is what a user says. A record, in JSONL, JSON, CSV or Parquet, has `messages`, whose last turn of
    the assistant is the reference, or `prompt` with or without `completion`: a list of messages, or a text that stands
    before the answer as it is.

    Args:
        path: of the file.
        system: a system message for those that have none.

    Raises:
        DataError: with every line that cannot be read.
    """
    if not path.is_file():
        raise DataError(Problem(str(path), "there is no such file", "Name a text file, or JSONL with messages"))
    if kind_of(path) is None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(Problem(str(path), f"cannot be read as text: {error}", "Save it as UTF-8")) from error
        found = [user_prompts([line], f"{path} line {n}", system)[0] for n, line in enumerate(lines, 1) if line.strip()]
    else:
        found = _records(path, system)
    if not found:
        raise DataError(Problem(str(path), "has no prompt", "Write a prompt a line"))
    return found


def _records(path: Path, system: str | None) -> list[Prompt]:
    found, problems = [], []
    for line, record in read_file(path):
        where = f"{path} line {line}"
        if isinstance(record, Bad):
            problems.append(Problem(where, record.what, record.instead))
            continue
        try:
            found.append(_prompt(record, where, system))
        except BadRecordError as error:
            problems.append(Problem(where, str(error)))
    if problems:
        raise DataError(problems)
    return found


def _prompt(record: dict[str, Any], where: str, system: str | None) -> Prompt:
    asked = record.get("messages", record.get("prompt"))
    if isinstance(asked, str):
        reference = record.get("completion")
        if system:
            return Prompt(where, user_prompts([asked], where, system)[0].messages, reference=reference)
        return Prompt(where, text=asked, reference=reference)
    if asked is None:
        names = ", ".join(sorted(map(str, record))[:6]) or "nothing"
        raise BadRecordError(f"has neither messages nor prompt, only: {names}", 'Write {"messages": [...]}')
    messages = check_messages(asked, "messages" if "messages" in record else "prompt")
    reference = record.get("completion") if isinstance(record.get("completion"), str) else None
    if messages[-1]["role"] == "assistant":
        messages, reference = messages[:-1], messages[-1]["content"]
    if not messages:
        raise BadRecordError("has an answer and no question", "Write a turn of the user before it")
    if system and messages[0]["role"] not in ("system", "developer"):
        messages = ({"role": "system", "content": system}, *messages)
    return Prompt(where, messages, reference=reference, tools=check_tools(record))
