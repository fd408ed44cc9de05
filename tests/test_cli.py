"""The `lowmem-ft` command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from lowmem_ft import __version__, cli
from tests.export.trained import trained_in
from tests.flow.recipes import write_run


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_check_audits_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path / "work")
    (tmp_path / "work" / "model" / "model.safetensors").write_bytes(b"no weights")
    assert cli.main(["check", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "data.train: 12 records read, 12 kept, 0 left out" in out
    assert "[[there 0<|im_end|>]]" in out


def test_errors_are_printed_without_a_trace_and_set_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert cli.main(["generate", str(tmp_path), "hello"]) == 4
    assert "holds no run, adapter or model" in capsys.readouterr().err


def test_overrides_and_options_may_come_in_any_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--accept-changes", "train.lr=1"],
        ["train.lr=1", "--accept-changes"],
        ["a=1", "--accept-changes", "b=2"],
    ):
        assert cli.main(["resume", str(tmp_path / "none"), *arguments]) == 2
        assert "there is no such folder" in capsys.readouterr().err
    for arguments in (["resume", "x", "--nothing"], ["schema", "train.lr=1"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert "unrecognized arguments" in capsys.readouterr().err


def test_train_is_the_main_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(write_run(tmp_path / "work")), "--dry-run"]) == 0
    assert "dry run" in capsys.readouterr().out


def test_schema_and_reference_come_from_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["required"]) == {"model", "data"}
    assert cli.main(["reference"]) == 0
    assert "micro_batch_tokens" in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_merge_and_verify_prove_or_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = str(trained_in(tmp_path))
    assert cli.main(["merge", adapter, "out", "--base", "trained", "--dtype", "float32", "--shard-size", "100KiB"]) == 0
    assert "it loses 0.00% of what training changed" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert cli.main(["verify", adapter, "out"]) == 0
    assert "written answers equal" in capsys.readouterr().out
    assert cli.main(["verify", adapter, "base"]) == 7
    assert "of what training changed is lost" in capsys.readouterr().err
    assert cli.main(["verify", adapter, "base", "--force"]) == 0
    assert cli.main(["merge", adapter, "two", "--max-lost", "1e-9", "--dtype", "bfloat16"]) == 7
    assert not (tmp_path / "two").exists()
    assert cli.main(["merge", adapter, "two", "--shard-size", "much"]) == 2
    assert '--shard-size: "much" is not a size' in capsys.readouterr().err


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
