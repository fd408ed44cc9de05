from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowmem_ft.recipe.adapter_section import AdapterSection
from tests.recipe.causes import cause


def test_a_kind_of_adapter_takes_only_settings_that_it_has() -> None:
    with pytest.raises(ValidationError) as caught:
        AdapterSection(kind="ia3", rank=4, alpha_pattern={"q_proj": 1.0})
    assert cause(caught.value).keys == ("adapter.rank", "adapter.alpha_pattern")
    with pytest.raises(ValidationError) as caught:
        AdapterSection(kind="vera", trainable_tokens=[1])
    assert str(cause(caught.value)) == "vera has no trainable_tokens. Remove trainable_tokens, or write kind: lora"
    assert AdapterSection(kind="vera", rank=256).rank == 256
    assert AdapterSection(kind="dora", alpha=4.0, trainable_tokens=[1], rank_pattern={"/q/": 2}).kind == "dora"


def test_a_regular_expression_is_read_where_it_is_written() -> None:
    with pytest.raises(ValidationError) as caught:
        AdapterSection(targets=["q_proj", "/(q|k/"])
    assert cause(caught.value).keys == ("adapter.targets",)
    assert "/(q|k/ is no regular expression: missing )" in str(cause(caught.value))
    with pytest.raises(ValidationError) as caught:
        AdapterSection(rank_pattern={"/[/": 2})
    assert cause(caught.value).keys == ("adapter.rank_pattern",)
