"""The rows of `perfsuite doctor` and `selftest`: a check, its result, and advice."""

from collections.abc import Iterable
from typing import Literal

from perfsuite.documents import Data

Status = Literal["pass", "fail", "unknown"]
EXIT: dict[Status, int] = {"pass": 0, "unknown": 3, "fail": 1}
"""Exit status of a command, by the worst status among its rows. The best status comes first."""


class Row(Data):
    """The result of one check."""

    check: str
    status: Status
    found: str
    advice: str | None = None  # what to do if the check did not pass


def passed(check: str, observed: str) -> Row:
    """Return the row of a check that passed."""
    return Row(check=check, status="pass", found=observed)


def failed(check: str, observed: str, advice: str | None = None) -> Row:
    """Return the row of a check that failed."""
    return Row(check=check, status="fail", found=observed, advice=advice)


def unknown(check: str, observed: str, advice: str | None = None) -> Row:
    """Return the row of a check without a result."""
    return Row(check=check, status="unknown", found=observed, advice=advice)


def checked(check: str, observed: str, *, ok: bool, advice: str) -> Row:
    """Return the row of a check. If `ok`, the check passed. Otherwise it failed, and the row has advice."""
    return passed(check, observed) if ok else failed(check, observed, advice)


def worst(rows: Iterable[Row]) -> Status:
    """Return the worst status of these rows."""
    return max((row.status for row in rows), key=[*EXIT].index, default="pass")
