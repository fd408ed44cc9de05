"""`lowmem-ft generate` and `lowmem-ft chat`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from lowmem_ft import cli
from tests.export.trained import trained_in


def test_generate_answers_a_prompt_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = str(trained_in(tmp_path))
    assert cli.main(["generate", adapter, "hello", "--max-new-tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("trained: ")
    assert "\nbase:    " in said
    (tmp_path / "p.txt").write_text("hello\n")
    asked = ["generate", adapter, "--prompts", "p.txt", "--out", "a.jsonl", "--max-new-tokens", "3", "--with-base"]
    assert cli.main(asked) == 0
    assert "a.jsonl: 1 answers" in capsys.readouterr().out
    line = json.loads((tmp_path / "a.jsonl").read_text())
    assert said == f"trained: {line['answer']}\nbase:    {line['base']}\n"
    assert cli.main(asked) == 7
    for wrong in ([], ["hello", "--prompts", "p.txt"], ["--prompts", "p.txt"], ["hello", "--out", "a.jsonl"]):
        assert cli.main(["generate", adapter, *wrong]) == 2
    with pytest.raises(SystemExit):
        cli.main(["generate", adapter, "hello", "--max-new-tokens", "0"])


def test_chat_reads_lines_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = str(trained_in(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/base\n/quit\n"))
    assert cli.main(["chat", adapter, "--max-new-tokens", "3"]) == 0
    chatted = capsys.readouterr().out
    assert cli.main(["generate", adapter, "hello", "--max-new-tokens", "3"]) == 0
    trained, base = capsys.readouterr().out.removeprefix("trained: ").split("\nbase:    ")
    assert chatted == f"{trained}\n[the base answers too]\nbase:  {base}"
    assert cli.main(["chat", adapter, "--top-p", "0"]) == 2
