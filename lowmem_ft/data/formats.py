"""A raw record becomes an example, checked against the form that its format means.

    messages            messages [, tools]                     -> chat
    sharegpt            conversations [, system, tools]        -> chat
    alpaca              instruction, output [, input, system]  -> chat
    prompt_completion   prompt, completion [, tools]           -> completion; both lists of messages: chat
    text                text                                   -> text
    preference          chosen, rejected [, prompt]            -> preference

Texts stay as they are in the file. What is not in the form is a `BadRecordError` that says what to write; other columns
than those above are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lowmem_ft.data.json_text import describe, name_keys
from lowmem_ft.data.messages import (
    BadRecordError,
    Message,
    MissingColumnError,
    check_messages,
    check_tools,
    check_turns,
)
from lowmem_ft.errors import nearest


@dataclass(frozen=True)
class Example:
    """One record of the data, in the form its format means.

    Attributes:
        kind: which of the fields below are set.
        file: the file as printed to the user.
        line: physical line from 1 on which the record starts; for Parquet and hub data the row from 1.
        messages: chat: dicts with role (system, developer, user, assistant, tool) and content (a text, or None beside
            tool_calls); arguments of tool calls are parsed where they were JSON text.
        tools: chat: tool schemas, None where the record has none.
        prompt: completion and preference: what comes before, not trained.
        completion: completion: what is trained.
        text: text: a document.
        chosen: preference: the better answer.
        rejected: preference: the worse answer.
        untrained: chat: indices of assistant messages that are context and never trained: those of a prompt that is
            a list of messages, and those with OpenAI's `weight: 0`.
        source: index of the source in the recipe's list, from 0.
    """

    kind: Literal["chat", "completion", "text", "preference"]
    file: str
    line: int
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[Message, ...] = ""
    completion: str = ""
    text: str = ""
    chosen: str | tuple[Message, ...] = ""
    rejected: str | tuple[Message, ...] = ""
    untrained: tuple[int, ...] = ()
    source: int = 0

    def where(self) -> str:
        """The place of the record, as in "data/train.jsonl line 14"."""
        return f"{self.file} line {self.line}"


@dataclass(frozen=True)
class TokenizedExample:
    """One example as token ids.

    Attributes:
        input_ids: token ids; from the cache a numpy int32 array, while tokenizing any sequence of ints.
        weights: as long as `input_ids`: 0.0 where the position is not trained, else its weight (1.0). float32.
        file: as in `Example`.
        line: as in `Example`.
    """

    input_ids: Sequence[int] | np.ndarray
    weights: Sequence[float] | np.ndarray
    file: str
    line: int


@dataclass(frozen=True)
class LeftOut:
    """An example that cannot be trained; the audit counts these by reason.

    Attributes:
        reason: short and the same text for the same cause, e.g. "longer than max_tokens".
        file: as in `Example`.
        line: as in `Example`.
        tokens: length in tokens where it is known, else 0.
    """

    reason: str
    file: str
    line: int
    tokens: int = 0


@dataclass(frozen=True)
class Format:
    """The columns of one format.

    Attributes:
        required: columns that every record has; they are what `auto` looks for.
        optional: columns that are read where they are there.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), ("tools",)),
    "sharegpt": Format(("conversations",), ("system", "tools")),
    "alpaca": Format(("instruction", "output"), ("input", "system")),
    "prompt_completion": Format(("prompt", "completion"), ("tools",)),
    "text": Format(("text",)),
    "preference": Format(("chosen", "rejected"), ("prompt",)),
}

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "observation": "tool",
}  # fmt: skip
# Columns of related forms that change what is learned: reading past them would drop data without a word.
_NOT_READ = {
    "functions": 'the old form of tools. Write "tools": [{"type": "function", "function": {...}}]',
    "history": 'earlier turns, which alpaca has no place for. Write the record as {"messages": [...]}',
}


def make_example(record: Mapping[str, Any], format: str, file: str, line: int, source: int = 0) -> Example:
    """Makes one example of a record.

    Args:
        record: the record with the column names of `FORMATS`.
        format: a key of `FORMATS`.
        file: the file as printed to the user.
        line: physical line from 1.
        source: index of the source from 0.

    Raises:
        BadRecordError: the record is not in that form.
    """
    try:
        kind, fields = _MAKERS[format](record)
    except RecursionError:
        raise BadRecordError("it is nested too deep", "Flatten it.") from None
    return Example(kind, file, line, source=source, **fields)


_Made = tuple[Literal["chat", "completion", "text", "preference"], dict[str, Any]]


def _required(record: Mapping[str, Any], key: str, format: str) -> Any:
    if key in record and record[key] is not None:
        return record[key]
    if key in record:
        raise BadRecordError(f'"{key}" is null', f'Write a value, or remove the record: {format} needs "{key}".')
    keys = f"the keys there are {name_keys(record)}" if record else "the record is empty"
    raise MissingColumnError(f'"{key}" is missing; {keys}', _missing_help(record, key, format))


def _missing_help(record: Mapping[str, Any], key: str, format: str) -> str:
    close = nearest(key, [str(name) for name in record])
    if close:
        return f'Write "{key}", or in the recipe map: {{{key}: {close}}}'
    fitting = [name for name in FORMATS if all(column in record for column in FORMATS[name].required)]
    if fitting:
        return f"It is in the form of {fitting[0]}, the file in that of {format}: give each form a file of its own."
    return "Write " + ", ".join(f'"{column}"' for column in FORMATS[format].required) + " in each record."


def _text(record: Mapping[str, Any], key: str, format: str) -> str:
    value = _required(record, key, format)
    if isinstance(value, str):
        return value
    raise BadRecordError(f'"{key}" is {describe(value)}, and a text is wanted', f'Write "{key}": "..."')


def _optional_text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise BadRecordError(f'"{key}" is {describe(value)}, and a text or null is wanted', f'Write "{key}": "..."')


def _refuse_unread(record: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if record.get(key):
            raise BadRecordError(
                f'"{key}" holds {_NOT_READ[key].partition(". ")[0]}', _NOT_READ[key].partition(". ")[2]
            )


def _from_messages(record: Mapping[str, Any]) -> _Made:
    _refuse_unread(record, "functions")
    messages = check_messages(_required(record, "messages", "messages"), "messages")
    return "chat", {"messages": messages, "tools": check_tools(record), "untrained": _weighted_out(messages)}


def _from_sharegpt(record: Mapping[str, Any]) -> _Made:
    turns = _required(record, "conversations", "sharegpt")
    check_turns(turns, "conversations", '[{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]')
    system = _optional_text(record, "system")
    messages = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns, 1):
        where = f'turn {number} of "conversations"'
        if not isinstance(turn, dict):
            raise BadRecordError(f"{where} is {describe(turn)}", 'Write {"from": "human", "value": "..."}')
        if "role" in turn and "from" not in turn:
            raise BadRecordError(
                f'{where} has "role" and "content", as messages have', "In the recipe: map: {messages: conversations}"
            )
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise BadRecordError(f'{where}: "from" is {describe(speaker)}, and no known role', f"Write one of {known}.")
        if not isinstance(turn.get("value"), str):
            found = describe(turn["value"]) if "value" in turn else "missing"
            raise BadRecordError(
                f'{where} ({speaker}): "value" is {found}, and a text is wanted', 'Write "value": "..."'
            )
        if speaker == "system" and system:
            raise BadRecordError(f'{where} is a system turn beside the column "system"', "Keep one of them.")
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": turn["value"]})
    return "chat", {"messages": tuple(messages), "tools": check_tools(record)}


def _from_alpaca(record: Mapping[str, Any]) -> _Made:
    _refuse_unread(record, "history")
    instruction, given = _text(record, "instruction", "alpaca"), _optional_text(record, "input")
    system, answer = _optional_text(record, "system"), _text(record, "output", "alpaca")
    asked = "\n\n".join(part for part in (instruction, given) if part)
    if not asked:
        raise BadRecordError('"instruction" and "input" are both empty', 'Write "instruction": "..."')
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return "chat", {"messages": tuple(messages)}


def _from_prompt_completion(record: Mapping[str, Any]) -> _Made:
    prompt = _required(record, "prompt", "prompt_completion")
    completion = _required(record, "completion", "prompt_completion")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return "completion", {
            "prompt": _text(record, "prompt", "prompt_completion"),
            "completion": _text(record, "completion", "prompt_completion"),
        }
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise BadRecordError(
            f'"prompt" is {describe(prompt)} and "completion" is {describe(completion)}',
            "Write both as texts, or both as lists of messages.",
        )
    before, after = check_messages(prompt, "prompt"), check_messages(completion, "completion")
    context = tuple(index for index, message in enumerate(before) if message["role"] == "assistant")
    untrained = context + tuple(len(before) + index for index in _weighted_out(after))
    return "chat", {"messages": before + after, "tools": check_tools(record), "untrained": untrained}


def _from_text(record: Mapping[str, Any]) -> _Made:
    return "text", {"text": _text(record, "text", "text")}


def _from_preference(record: Mapping[str, Any]) -> _Made:
    sides: dict[str, str | tuple[Message, ...]] = {}
    for key in ("chosen", "rejected"):
        value = _required(record, key, "preference")
        sides[key] = check_messages(value, key) if isinstance(value, list) else _text(record, key, "preference")
        if not sides[key]:
            raise BadRecordError(f'"{key}" is empty', f'Write "{key}": "..."')
    chosen, rejected = sides["chosen"], sides["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRecordError('of "chosen" and "rejected" one is a text and one a list', "Write both in one form.")
    if chosen == rejected:
        raise BadRecordError('"chosen" and "rejected" are the same', "Write two answers, or remove the record.")
    prompt = record.get("prompt")
    if prompt is None and isinstance(chosen, tuple) and isinstance(rejected, tuple):
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        return "preference", {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    if isinstance(prompt, list) and isinstance(chosen, tuple):
        return "preference", {"prompt": check_messages(prompt, "prompt"), "chosen": chosen, "rejected": rejected}
    return "preference", {"prompt": _text(record, "prompt", "preference"), "chosen": chosen, "rejected": rejected}


def _weighted_out(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(index for index, message in enumerate(messages) if message.get("weight") == 0)


_MAKERS: dict[str, Callable[[Mapping[str, Any]], _Made]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt_completion,
    "text": _from_text,
    "preference": _from_preference,
}
