from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.units import BYTES_OF_UNIT, format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("  8GiB ", 8 * 2**30),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("0B", 0),
        ("0.5KiB", 512),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["24GBB", "24", "GiB", "", "-1GiB", "1,5GB", "1e3MB", "1.GiB", "24 G", "inf GiB", "٣GiB"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size\. Write a number and a unit, for example 24GiB") as caught:
        parse_bytes(text)
    assert f'"{text}"' in str(caught.value)


@given(st.integers(0, 2**13), st.sampled_from(sorted(BYTES_OF_UNIT)))
def test_whole_numbers_of_a_unit_are_exact(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}") == count * BYTES_OF_UNIT[unit]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.37 * 2**30, "1.37 GiB"),
        (96.2 * 2**20, "96.2 MiB"),
        (512 * 2**20, "512 MiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-2 * 2**30, "-2.00 GiB"),
    ],
)
def test_sizes_are_printed_in_binary_units_and_three_figures(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 2**50))
def test_a_printed_size_reads_back_within_its_figures(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.006)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (12345, "12,345"),
        (99_999, "99,999"),
        (100_000, "100 k"),
        (4_884_480, "4.88 M"),
        (134_515_008, "135 M"),
        (8.03e9, "8.03 G"),
        (2e15, "2000 T"),
        (-250_000, "-250 k"),
    ],
)
def test_counts_for_people(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (42.4, "42 s"),
        (59.6, "1 min 00 s"),
        (425, "7 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7980, "2 h 13 min"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
