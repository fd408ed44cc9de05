from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.recipe.numerals import LARGEST, NotANumberError, read_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("-3", -3), ("+5", 5), ("0", 0), ("8.0", 8), ("1e3", 1000), ("2E+1", 20), ("0x1F", 31), ("0o17", 15)],
)
def test_whole_numbers(text: str, number: int) -> None:
    found = read_number(text, whole=True)
    assert found == number
    assert type(found) is int


@pytest.mark.parametrize(
    ("text", "number"), [("2e-4", 2e-4), (".5", 0.5), ("1.", 1.0), ("-0.0", 0.0), ("32", 32.0), ("9" * 40, 1e40)]
)
def test_numbers(text: str, number: float) -> None:
    found = read_number(text, whole=False)
    assert found == number
    assert type(found) is float


@pytest.mark.parametrize(
    ("text", "why", "better"),
    [
        ("010", "8 for YAML 1.1 (octal) and 10 for YAML 1.2", "10"),
        ("-007", "octal", "-7"),
        ("00.5", "0", "0.5"),
        ("1:30", "base 60", ""),
        ("1_000", "separators", "1000"),
        ("1,000", "separators", "1000"),
        ("0,03", "separators", ""),
        (".inf", "finite", ""),
        ("-.INF", "finite", ""),
        (".nan", "finite", ""),
        ("1e999", "finite", ""),
        ("8.5", "fraction", ""),
        ("1e17", "exact", ""),
        (str(LARGEST + 1), "large", ""),
        ("9" * 5000, "finite", ""),
        ("", "", ""),
        ("abc", "", ""),
        ("0b1", "", ""),
        ("1e", "", ""),
        ("٣", "", ""),
        ("0x", "", ""),
    ],
)
def test_refused_with_the_reason_and_the_better_form(text: str, why: str, better: str) -> None:
    with pytest.raises(NotANumberError) as caught:
        read_number(text, whole=True)
    assert why in caught.value.why
    assert bool(why) == bool(caught.value.why)
    assert caught.value.better == better


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_exactly(number: float) -> None:
    assert read_number(repr(number), whole=False) == number


@given(st.integers(-LARGEST, LARGEST))
def test_every_int_is_read_exactly(number: int) -> None:
    assert read_number(str(number), whole=True) == number


@given(st.text("0123456789.+-eExo_:, infa", max_size=12), st.booleans())
def test_any_text_is_a_number_or_refused(text: str, whole: bool) -> None:
    try:
        number = read_number(text, whole)
    except NotANumberError:
        return
    assert abs(number) < float("inf")
