"""What a record holds and its rendered text does not show: templates leave out what they have no place for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lowmem_ft.data.messages import Message

_REASONING = ("reasoning_content", "thinking", "reasoning")


def not_rendered(messages: Sequence[Message], text: str) -> str | None:
    """Says which turn that is not an answer is missing in `text`, or stands before an earlier one; None if none is.

    A system turn at the start may stand anywhere: some templates show it beside the last question.
    """
    position = 0
    for index, message in enumerate(messages):
        content = str(message.get("content") or "").strip()
        if message["role"] == "assistant" or not content:
            continue
        first_system = index == 0 and message["role"] in ("system", "developer")
        start = text.find(content, 0 if first_system else position)
        if start >= 0:
            position = position if first_system else start + len(content)
        elif content in text:
            return f"the chat template moves turn {index + 1} ({message['role']}) before an earlier one"
        elif not _shown_otherwise(content, text):
            return f"the chat template does not render turn {index + 1} ({message['role']})"
    return None


def unseen_extras(message: Message, answer: str) -> list[str]:
    """What an assistant message holds beside its content and the template leaves out of the answer, as reasons."""
    reasons = []
    for call in message.get("tool_calls") or ():
        if str((call.get("function") or call).get("name", "")) not in answer:
            reasons.append("tool call that the chat template does not render")
            break
    thought = next((message[key] for key in _REASONING if message.get(key)), None)
    if isinstance(thought, str) and squeezed(thought) not in squeezed(answer):
        reasons.append("reasoning that the chat template does not render")
    return reasons


def unseen_tools(tools: Sequence[Mapping[str, Any]] | None, text: str) -> bool:
    """Whether there are tool schemas and the template shows none of them."""
    names = [str((tool.get("function") or tool).get("name", "")) for tool in tools or ()]
    return bool(names) and not any(name and name in text for name in names)


def squeezed(text: str) -> str:
    """`text` without white space, to compare what templates trim or fold."""
    return "".join(text.split())


def _shown_otherwise(content: str, text: str) -> bool:
    escaped = (json.dumps(content, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    return squeezed(content) in squeezed(text) or any(form in text for form in escaped)
