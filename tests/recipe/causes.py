"""Our own error inside pydantic's."""

from __future__ import annotations

from pydantic import ValidationError

from lowmem_ft.recipe.section import SettingError


def cause(error: ValidationError) -> SettingError:
    found = error.errors()[0]["ctx"]["error"]
    assert isinstance(found, SettingError)
    return found
