"""A list of turns, checked against the form that OpenAI's API and chat templates share.

Contents become one text each, tool calls get their arguments as an object, and keys that are null go: templates then
see one form, whatever the file had. Roles are taken exactly as written; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowmem_ft.data.json_text import Bad, describe, parse_json
from lowmem_ft.errors import nearest

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRecordError(ValueError):
    """A record is not in the form of its format.

    Args:
        what: what was found, with the value.
        instead: what to write.
    """

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what}. {instead}")
        self.what, self.instead = what, instead


class MissingColumnError(BadRecordError):
    """A record lacks a column that its format needs."""


def check_turns(turns: Any, column: str, example: str) -> None:
    """Refuses what is no list, and an empty one.

    Raises:
        BadRecordError: naming `column`, with `example` as what to write.
    """
    if not isinstance(turns, list):
        raise BadRecordError(f'"{column}" is {describe(turns)}, and a list is wanted', f'Write "{column}": {example}')
    if not turns:
        raise BadRecordError(f'"{column}" is empty', f'Write "{column}": {example}, or remove the record.')


def check_messages(turns: Any, column: str) -> tuple[Message, ...]:
    """Checks a list of messages and brings it to one form.

    Args:
        turns: the value of the column.
        column: its name, for errors.

    Returns:
        Messages with `role` and `content` (a text, or None beside `tool_calls`); further keys, such as `name`,
        `tool_call_id` or `reasoning_content`, are kept for the template where they are not null.

    Raises:
        BadRecordError: a turn is not in that form.
    """
    check_turns(turns, column, '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]')
    return tuple(_check_message(turn, f'turn {number} of "{column}"') for number, turn in enumerate(turns, 1))


def _check_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise BadRecordError(f"{where} is {describe(turn)}", 'Write {"role": "user", "content": "..."}')
    role = turn.get("role")
    if role not in ROLES:
        raise _bad_role(turn, where)
    if len(turn) == 2 and type(turn.get("content")) is str:
        return turn  # nearly all turns, and nothing more to check: a fifth off the time of reading
    message = {key: value for key, value in turn.items() if value is not None}
    if "function_call" in message:
        raise BadRecordError(
            f'{where} has "function_call", the old form of a tool call',
            'Write "tool_calls": [{"type": "function", "function": {"name": "...", "arguments": {...}}}]',
        )
    weight = message.get("weight", 1)
    if weight not in (0, 1) or (weight == 0 and role != "assistant"):
        raise BadRecordError(
            f'{where}: "weight" is {describe(weight)}', "Write 0 or 1, on assistant turns; for others: data.train_on"
        )
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if "tool_calls" in message:
        if role != "assistant":
            raise BadRecordError(f'{where}: "tool_calls" on a turn of {role}', "Move them to a turn of assistant.")
        message["tool_calls"] = _check_calls(message["tool_calls"], where)
    message["content"] = _check_content(turn, role, where, "tool_calls" in message)
    return message


def _bad_role(turn: dict[str, Any], where: str) -> BadRecordError:
    role, known = turn.get("role"), ", ".join(ROLES)
    if "role" not in turn and "from" in turn:
        return BadRecordError(
            f'{where} has "from" and "value", as sharegpt has',
            "In the recipe: format: sharegpt, map: {conversations: messages}",
        )
    if "role" not in turn:
        return BadRecordError(f'{where} has no "role"', f"Write one of {known}.")
    close = nearest(role.lower(), ROLES) if isinstance(role, str) else None
    instead = f'Write "role": "{close}"' if close else f"Write one of {known}."
    return BadRecordError(f'{where}: "role" is {describe(role)}, and no known role', instead)


def _check_content(turn: dict[str, Any], role: str, where: str, has_calls: bool) -> str | None:
    content = turn.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if has_calls:
            return None
        found = '"content" is null' if "content" in turn else 'no "content"'
        calls = ", unless it has tool_calls" if role == "assistant" else ""
        raise BadRecordError(f"{where} ({role}): {found}", f'Write "content": "..."{calls}')
    if not isinstance(content, list):
        raise BadRecordError(
            f'{where} ({role}): "content" is {describe(content)}, and a text is wanted', 'Write "content": "..."'
        )
    return "".join(_check_part(part, f"{where} ({role})") for part in content)


def _check_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if isinstance(kind, str) and kind != "text":
        name = next((name for name in ("image", "audio", "video", "file") if name in kind), "such")
        raise BadRecordError(
            f'{where}: a part of type "{kind}"; {name} parts are not supported, only text', "Remove the record."
        )
    raise BadRecordError(f"{where}: a part is {describe(part)}", 'Write {"type": "text", "text": "..."}')


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    form = 'Write {"type": "function", "function": {"name": "...", "arguments": {...}}}'
    if not isinstance(calls, list):
        raise BadRecordError(f'{where}: "tool_calls" is {describe(calls)}, and a list is wanted', form)
    checked = []
    for number, call in enumerate(calls, 1):
        at = f"{where}, tool call {number}"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise BadRecordError(f'{at} is {describe(call)}, without a "function" object', form)
        if call.get("type", "function") != "function":
            raise BadRecordError(f'{at}: "type" is {describe(call["type"])}', form)
        function = call["function"]
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRecordError(f'{at}: "name" is {describe(function.get("name"))}, and a text is wanted', form)
        checked.append({**call, "function": {**function, "arguments": _check_arguments(function, at)}})
    return checked


def _check_arguments(function: dict[str, Any], where: str) -> dict[str, Any]:
    if "arguments" not in function:
        raise BadRecordError(f'{where}: "arguments" is missing', 'Write "arguments": {} where there are none.')
    arguments = function["arguments"]
    if isinstance(arguments, str):  # the form of the API; one form for the template, else it escapes the text again
        parsed = parse_json(arguments)
        if isinstance(parsed, Bad):
            raise BadRecordError(f'{where}: "arguments" is {describe(arguments)}: {parsed.what}', parsed.instead)
        arguments = parsed
    if not isinstance(arguments, dict):
        raise BadRecordError(
            f'{where}: "arguments" is {describe(function["arguments"])}, and an object is wanted',
            'Write "arguments": {"name": value}',
        )
    return arguments


def check_tools(record: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """The tool schemas of a record, from a list or from JSON text of one; None where there are none.

    Raises:
        BadRecordError: the column is there and is not a list of schemas with a name.
    """
    tools = record.get("tools")
    if tools is None or tools in ([], ""):
        return None
    form = 'Write "tools": [{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
    if isinstance(tools, str):
        parsed = parse_json(tools)
        if isinstance(parsed, Bad):
            raise BadRecordError(f'"tools" is {describe(tools)}: {parsed.what}', form)
        tools = parsed
    if not isinstance(tools, list):
        raise BadRecordError(f'"tools" is {describe(tools)}, and a list is wanted', form)
    for number, tool in enumerate(tools, 1):
        schema = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            raise BadRecordError(f'tool {number} of "tools" is {describe(tool)}, without a name', form)
    return tuple(tools) or None
