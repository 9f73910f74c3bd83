"""Faults that can be injected into a run to test the gate, as data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Self

from perfsuite.documents import Data
from perfsuite.errors import CaseError

if TYPE_CHECKING:
    pass


AT_STEP = 5


_WITH_PERCENT = ("slowdown", "leak")


_PLAIN = ("nan", "loss", "missing-metric", "missing-rank", "crash", "exit", "oom", "hang")


class Fault(Data):
    """One fault and its size: a share (0.3 for 30 %), or for `stall` a number of steps."""

    kind: str
    size: float = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the text of `--perf-inject`. Raises `CaseError` naming what is allowed."""
        if match := re.fullmatch(rf"({'|'.join(_WITH_PERCENT)})=(\d+(?:\.\d+)?)%", text):
            return cls(kind=match[1], size=float(match[2]) / 100)
        if match := re.fullmatch(r"stall=([1-9]\d*)", text):
            return cls(kind="stall", size=float(match[1]))
        if text in _PLAIN:
            return cls(kind=text)
        raise CaseError(
            f"--perf-inject {text!r}: give slowdown=P%, leak=P%, stall=N, or one of {', '.join(_PLAIN)}"
        )
