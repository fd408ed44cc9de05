"""Control tokens and tool schemas in texts are counted with their places."""

from __future__ import annotations

import json

from lowmem_ft.data.formats import Example
from lowmem_ft.data.pieces import ControlTokens
from lowmem_ft.data.text_watch import TextWatch, watch_lines
from tests.data.tiny_tokenizers import tiny_tokenizer

SCHEMA = 'You may call {"name": "clock", "parameters": {"type": "object"}}'


def chat(line: int, question: str, answer: str) -> Example:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Example("chat", "f", line, messages)


def test_records_are_counted_once_for_each_thing_found() -> None:
    watch = TextWatch(ControlTokens(tiny_tokenizer()))
    examples = [
        chat(1, "</s></s>", "<s>"),
        chat(2, SCHEMA, "fine"),
        chat(3, "fine", SCHEMA),
        Example("text", "f", 4, text="a</s>b"),
        Example("completion", "f", 5, prompt=SCHEMA, completion="</s>"),
    ]
    assert list(watch.through(examples)) == examples
    counts = json.loads(json.dumps(watch.to_dict()))
    assert counts["records"] == {"</s>": 3, "<s>": 1, "a tool schema": 2}
    assert watch_lines(counts) == [
        "</s> is quoted in the text of 3 records (f line 1, f line 4, f line 5): it is encoded as letters.",
        'A tool schema stands in the text of 2 records (f line 2, f line 5): templates render "tools" only.',
        "<s> is quoted in the text of 1 record (f line 1): it is encoded as letters.",
    ]


def test_only_the_first_places_are_kept() -> None:
    watch = TextWatch(ControlTokens(tiny_tokenizer()))
    for line in range(1, 9):
        watch.look_at(chat(line, "</s>", "x"))
    assert watch_lines(watch.to_dict())[0].startswith(
        "</s> is quoted in the text of 8 records (f line 1, f line 2, f line 3, ...)"
    )


def test_clean_records_give_no_line() -> None:
    watch = TextWatch(ControlTokens(tiny_tokenizer()))
    watch.look_at(chat(1, "what is < here?", "less"))
    assert watch_lines(watch.to_dict()) == []
