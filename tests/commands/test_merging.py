"""`lowmem-ft merge` and `lowmem-ft verify`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_ft import cli
from tests.export.trained import trained_in


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
