"""`lowmem-ft schema` and `lowmem-ft reference`."""

from __future__ import annotations

import json

import pytest

from lowmem_ft import cli


def test_schema_and_reference_come_from_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["required"]) == {"model", "data"}
    assert cli.main(["reference"]) == 0
    assert "micro_batch_tokens" in capsys.readouterr().out
