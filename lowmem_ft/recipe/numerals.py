"""Numbers as they are written, exactly or not at all.

YAML 1.2 forms: `12`, `-3`, `2e-4`, `.5`, `0x1F`, `0o17`. Refused with the reason: what YAML versions read differently
(`010`, `1:30`, `1_000`), separators, and numbers that are not finite.
"""

from __future__ import annotations

import math
import re

LARGEST = 2**63 - 1
_EXACT = 2**53
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"([-+]?)0+([0-9][0-9.]*)([eE][-+]?[0-9]+)?")


class NotANumberError(ValueError):
    """The text is no number, or not one for every reader.

    Attributes:
        why: the reason; empty where it does not even look like a number.
        better: how the number that was probably meant is written; may be empty.
    """

    def __init__(self, why: str = "", better: str = "") -> None:
        super().__init__(why)
        self.why, self.better = why, better


def read_number(text: str, whole: bool) -> int | float:
    """The number that a text is.

    Args:
        text: as written, for example `2e-4`.
        whole: whether an int is wanted; `8.0` and `1e3` are whole numbers, `8.5` is not.

    Raises:
        NotANumberError: it is none, or not exactly.
    """
    number = _number(text)
    if isinstance(number, float) and not math.isfinite(number):
        raise NotANumberError("it is not finite")
    if not whole:
        return float(number)
    if abs(number) > LARGEST:
        raise NotANumberError("it is too large")
    if isinstance(number, float):
        if not number.is_integer():
            raise NotANumberError("it has a fraction")
        if abs(number) > _EXACT:
            raise NotANumberError("it is too large to be exact in this form")
    return int(number)


def _number(text: str) -> int | float:
    if re.fullmatch("0[xX][0-9a-fA-F]{1,20}", text):
        return int(text, 16)
    if re.fullmatch("0o[0-7]{1,30}", text):
        return int(text, 8)
    zero = _LEADING_ZERO.fullmatch(text)
    if zero:
        raise NotANumberError(
            _why_zero(text), zero[1] + re.sub("^(?=[.]|$)", "0", zero[2].lstrip("0")) + (zero[3] or "")
        )
    if re.fullmatch("[-+]?[0-9]+", text):
        return int(text) if len(text) < 30 else float(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    if re.fullmatch(r"[-+]?\.?(inf|nan|infinity)", text.lower()):
        raise NotANumberError("it is not finite")
    if re.fullmatch(r"[-+]?[0-9]+(:[0-9]+)+(\.[0-9]*)?", text):
        raise NotANumberError("YAML 1.1 reads it in base 60, YAML 1.2 as a text")
    if re.fullmatch(r"[-+]?[0-9][0-9_,' ]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?", text):
        bare = re.sub("[_,' ]", "", text)
        thousands = re.fullmatch(r"[-+]?[0-9]{1,3}([_,' ][0-9]{3})+(\.[0-9]*)?", text)
        raise NotANumberError("a number has no separators", bare if thousands or "_" in text else "")
    raise NotANumberError


def _why_zero(text: str) -> str:
    digits = text.lstrip("+-")
    if re.fullmatch("[0-7]+", digits) and len(digits) < 20:
        return f"with a 0 in front it is {int(digits, 8)} for YAML 1.1 (octal) and {int(digits)} for YAML 1.2"
    return "a number does not begin with a 0 that means nothing"
