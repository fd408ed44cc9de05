"""Bytes, counts and durations, from text and for people. Bytes are stored as int and printed in binary units."""

from __future__ import annotations

import re
from decimal import Decimal

BYTES_OF_UNIT = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `"24GiB"`, `"1.5 GB"` or `"512MiB"`; decimal and binary units are told apart.

    Raises:
        ValueError: the text is not a number with a unit.
    """
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): size for unit, size in BYTES_OF_UNIT.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f'"{text}" is not a size. Write a number and a unit, for example 24GiB')
    return int(Decimal(match[1]) * units[match[2].lower()])


def format_bytes(size_bytes: float) -> str:
    """A size for people, in binary units and three figures: `1.37 GiB`, `96.2 MiB`, `512 B`."""
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{sign}{size:.{digits}f} {units[0]}"


def format_count(count: float) -> str:
    """A count for people: `135 M`, `4.88 M`, `12,345`."""
    if abs(count) < 100_000:
        return f"{count:,.0f}"
    units = ["", "k", "M", "G", "T"]
    while abs(count) >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    digits = 0 if abs(count) >= 100 else 1 if abs(count) >= 10 else 2
    return f"{count:.{digits}f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """A duration for people: `42 s`, `7 min 05 s`, `2 h 13 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
