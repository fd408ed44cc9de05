from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowmem_ft.recipe.data_section import DataSection
from tests.recipe.causes import cause


@pytest.mark.parametrize("turn", ["0", "01", "-1", "first", ""])
def test_turns_are_numbered_from_1(turn: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataSection(train="x/y", train_on={turn: 1.0})
    assert cause(caught.value).keys == ("data.train_on",)
    assert DataSection(train="x/y", train_on={"1": 0.5, "12": 0.0, "last": 1.0}).train_on
