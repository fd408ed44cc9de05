"""Prompts come from text and from records, as they would stand before an answer in training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from lowmem_ft.data.template import make_encoder
from lowmem_ft.errors import DataError
from lowmem_ft.export.prompts import Prompt, read_prompts, user_prompts
from tests.data.tiny_tokenizers import with_template


def written(folder: Path, *records: Any, name: str = "p.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / name


def test_a_line_of_text_is_what_a_user_says(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n two \n")
    prompts = read_prompts(tmp_path / "p.txt", system="be brief")
    assert [prompt.messages[-1] for prompt in prompts] == [
        {"role": "user", "content": "one"},
        {"role": "user", "content": " two "},
    ]
    assert prompts[1].where.endswith("p.txt line 3")
    assert all(prompt.messages[0] == {"role": "system", "content": "be brief"} for prompt in prompts)


def test_the_last_turn_of_the_assistant_is_the_reference(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "one"}]
    file = written(
        tmp_path,
        {"messages": [*asked, {"role": "assistant", "content": "1"}]},
        {"messages": asked},
        {"prompt": asked, "completion": "2"},
        {"prompt": "raw", "completion": "3"},
        {"prompt": "raw"},
    )
    prompts = read_prompts(file)
    assert [prompt.reference for prompt in prompts] == ["1", None, "2", "3", None]
    assert [len(prompt.messages) for prompt in prompts] == [1, 1, 1, 0, 0]
    assert prompts[3].text == "raw"


def test_ids_are_those_of_training() -> None:
    encoder = make_encoder(with_template("regex", "chatml"), template=None, max_tokens=100)
    (prompt,) = user_prompts(["hello"], "here", "be kind")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert prompt.ids(encoder) == encoder.encode_prompt(messages)
    assert encoder.decode(Prompt("here", text="hello").ids(encoder)) == "hello"


def test_without_a_template_what_a_user_says_is_text() -> None:
    tokenizer = copy.deepcopy(with_template("regex", "chatml"))
    tokenizer.chat_template = None
    encoder = make_encoder(tokenizer, template=None, max_tokens=100)
    assert encoder.decode(user_prompts(["hello"], "here", "be kind")[0].ids(encoder)) == "be kind\nhello"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "line 1: has neither messages nor prompt, only: text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 1: has an answer and no question"),
        ({"messages": []}, 'line 1: "messages" is empty'),
        ({"messages": "x", "prompt": 3}, "line 1"),
        ([1], "line 1"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(tmp_path: Path, record: Any, message: str) -> None:
    file = written(tmp_path, record)
    if message.endswith("line 1") and isinstance(record, dict):
        assert read_prompts(file)[0].text == "x"
        return
    with pytest.raises(DataError, match=message):
        read_prompts(file)


def test_files_that_are_not_there_or_empty_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "p.txt").write_text("\n")
    with pytest.raises(DataError, match="has no prompt"):
        read_prompts(tmp_path / "p.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as text"):
        read_prompts(tmp_path / "b.txt")
