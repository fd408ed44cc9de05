"""The tokenizer beside a model, or what to do where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_ft.errors import ModelError
from lowmem_ft.model.find import FoundModel
from lowmem_ft.model.tokenizer import load_tokenizer
from tests.tiny import save_tiny_model


def test_it_comes_with_its_chat_template(tmp_path: Path) -> None:
    found = FoundModel(str(save_tiny_model(tmp_path / "m")), None, "")
    assert "<|im_start|>" in load_tokenizer(found).chat_template


def test_a_folder_without_one_says_which_files_are_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"has no tokenizer that can be read.*Copy tokenizer\.json"):
        load_tokenizer(FoundModel(str(tmp_path), None, ""))
