"""The order in which two arms are launched, and the differences between neighbouring launches.

Pure, standard library only. Must not import torch, pytest, numpy or scipy.

Arms A and B are launched in the order A B B A A B B A ... Neighbouring launches form pairs, (1, 2), (3, 4),
..., so that what the machine does to both launches of a pair cancels in their ratio. Between the pairs there
are neighbours of one arm, (2, 3), (4, 5), ..., which differ by noise alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SHARED_LAUNCH = 1.5
"""How many differences of launches in a row tell as much as one that shares no launch with another: two
neighbouring ones correlate by -1/2, and 1 + 2 (1/2)^2 is 1.5."""


def order(pair: int) -> tuple[Literal["a", "b"], Literal["a", "b"]]:
    """Return in which order the arms of a pair, counted from 0, are launched: A B, B A, A B, ..."""
    return ("b", "a") if pair % 2 else ("a", "b")


@dataclass(frozen=True)
class Differences:
    """Differences of logarithms between neighbouring launches, in the order of the launches."""

    pairs: list[float]
    """log(B / A) of each pair."""
    neighbours: list[float]
    """log(later / earlier) of two neighbouring launches of one arm: one fewer than pairs."""

    def without(self, others: "Differences", exponent: float) -> "Differences":
        """Return what is left of each after `exponent` times that of `others` is taken out."""
        pairs, neighbours = (
            [mine - exponent * other for mine, other in zip(ours, theirs, strict=True)]
            for ours, theirs in ((self.pairs, others.pairs), (self.neighbours, others.neighbours))
        )
        return Differences(pairs, neighbours)


def pair_differences(a: Sequence[float], b: Sequence[float]) -> Differences:
    """Return the differences between launches of which `a[k]` and `b[k]` are pair k, in `order(k)`.

    `a` and `b` are costs above 0, in one unit.
    """
    pairs = [math.log(after) - math.log(before) for before, after in zip(a, b, strict=True)]
    last = [b if order(pair)[1] == "b" else a for pair in range(len(pairs) - 1)]
    neighbours = [math.log(arm[pair + 1]) - math.log(arm[pair]) for pair, arm in enumerate(last)]
    return Differences(pairs, neighbours)
