"""Every command runs in a folder and with a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWMEM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
