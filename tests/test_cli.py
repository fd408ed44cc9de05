"""The `lowmem-ft` command."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_ft import __version__, cli
from tests.flow.recipes import write_run


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


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


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out
