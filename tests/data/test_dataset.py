"""From the data section to tokens: cached by all that they follow from, in the order of the sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowmem_ft.data.dataset import Split, load_split, read_some
from lowmem_ft.data.template import make_encoder
from lowmem_ft.recipe.data_section import DataSection, Source
from tests.data.tiny_tokenizers import with_template


def _write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": f"say {t} ", "completion": t}) + "\n" for t in texts))
    return str(path)


def _load(cache: Path, train: Any, **settings: Any) -> tuple[Split, list[int]]:
    data = DataSection(train=train, **{"max_tokens": 64, **settings})
    encoder = make_encoder(
        with_template("regex", "chatml"), template=None, max_tokens=data.max_tokens, train_on=data.train_on
    )
    told: list[int] = []
    return load_split(data.train, data, encoder, cache, told.append), told


def test_a_second_start_tokenizes_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", ["one", "two", "three"])
    first, told = _load(tmp_path / "cache", path)
    second, again = _load(tmp_path / "cache", path)
    assert told
    assert not again
    assert len(first.tokens) == len(second.tokens) == 3
    assert second.reports == first.reports
    assert first.reports[0].decided.startswith("auto decided: prompt_completion")


@pytest.mark.parametrize("change", ["bytes", "max_tokens", "format"])
def test_anything_that_changes_the_tokens_makes_them_anew(tmp_path: Path, change: str) -> None:
    path = _write(tmp_path / "a.jsonl", ["one", "two"])
    _load(tmp_path / "cache", path)
    if change == "bytes":
        _write(tmp_path / "a.jsonl", ["one", "twp"])
    settings: dict[str, Any] = {"max_tokens": {"max_tokens": 63}, "format": {"format": "prompt_completion"}}.get(
        change, {}
    )
    _, told = _load(tmp_path / "cache", path, **settings)
    assert told


def test_sources_come_as_often_as_their_weights_say(tmp_path: Path) -> None:
    first, second = _write(tmp_path / "a.jsonl", ["one"] * 4), _write(tmp_path / "b.jsonl", ["two"] * 6)
    split, _ = _load(tmp_path / "cache", [Source(path=first, weight=2.5), second])
    indices = split.indices(seed=1, epoch=0).tolist()
    assert len(indices) == 10 + 6
    assert sorted(set(indices)) == list(range(10))
    assert all(indices.count(i) in (2, 3) for i in range(4))
    assert all(indices.count(i) == 1 for i in range(4, 10))


def test_control_tokens_quoted_in_texts_are_reported(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", ["one", "quote <|im_end|> here"])
    for _ in range(2):  # the second time from the cache
        split, _told = _load(tmp_path / "cache", path)
        assert len(split.notes) == 1
        assert "<|im_end|> is quoted in the text of 1 record" in split.notes[0]
        assert "a.jsonl line 2" in split.notes[0]


def test_the_first_examples_can_be_read_for_generation(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", ["one", "", "two", "three"])
    data = DataSection(train=path)
    encoder = make_encoder(with_template("regex", "chatml"), template=None, max_tokens=64)
    assert [e.completion for e in read_some(path, data, encoder, 2)] == ["one", "two"]
    assert len(read_some(path, data, encoder, 99)) == 3
