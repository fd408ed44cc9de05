from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowmem_ft.recipe.schema import ModelSection
from lowmem_ft.recipe.section import SettingError


def test_nothing_changes_after_it_was_checked() -> None:
    with pytest.raises(ValidationError):
        ModelSection(path="owner/name").path = "other"


def test_an_error_says_what_and_instead() -> None:
    assert str(SettingError(("a.b",), "no good", "Write c")) == "no good. Write c"
