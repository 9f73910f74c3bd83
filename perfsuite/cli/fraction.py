"""Reads a share that an option gives: `1%` or `0.01`. Imports neither torch nor pytest."""

from __future__ import annotations

import math

from perfsuite.errors import CaseError

HIGHEST = 0.5


def fraction(option: str, text: str) -> float:
    """Read `1%` or `0.01`, above 0 and up to `HIGHEST`. Raises `CaseError` naming the option."""
    number = text.strip()
    percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 < value <= HIGHEST:
        raise CaseError(
            f"{option} is {text!r}, expected above 0% and up to {HIGHEST:.0%}, in percent or "
            "as a fraction: 1% or 0.01"
        )
    return value
