"""Decides which of two arms is slower, from launches that alternate between them.

Pure functions, data in and decision out: no clock, no disk, no random numbers. Must not import torch, pytest,
numpy or scipy.

Arms A and B are launched in the order A B B A A B B A ... Neighbouring launches form pairs, (1, 2), (3, 4),
..., so that what the machine does to both launches of a pair cancels in their ratio. All arithmetic is on
logarithms of costs (seconds per step, bytes; lower is better). `decide` looks at the pairs so far and returns
one of

    slower        B is significantly slower than A; a slowdown by the tolerance is not excluded
    faster        the same for a speed-up
    same          a change by the tolerance is excluded, in both directions
    undecided     launch one more pair
    inconclusive  `max_pairs` are used up, or more of them would hardly decide

Neither a baseline nor a noise known from elsewhere is needed: the noise is estimated from the ratios of the
pairs, and from neighbouring launches of one arm (2 and 3, 4 and 5, ...), which differ by noise alone.

That is too small an estimate on a machine that has two speeds, as where some launches get the better cores:
all launches of A may be fast and all of B slow by chance, and each arm agrees with itself. If each launch
has either speed with probability 1/2, the launches of n pairs do so with probability 2 / 4^n. A change is
therefore called from `MIN_CHANGED` pairs on, and nearly all pairs must show it (`_is_shown_by_all`).

Sources:
- Paired differences: Student, Biometrika 6 (1908) 1. Clipped means and variances: Huber, Robust Statistics
  (1981). Student's t by the normal: Wallace, Annals of Mathematical Statistics 30 (1959) 1121.
- The constants were chosen by simulation with `perfsuite.verdict.paired_power`; test_paired_power.py checks
  what they achieve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perfsuite.verdict.robust import (
    SCALE_EFFICIENCY,
    Z_99,
    clipped_variance,
    location,
    relative,
    sorted_logs,
    squares,
    t_quantile,
)
from perfsuite.verdict.sequential import SIGMA_FLOOR

PairedOutcome = Literal["slower", "faster", "same", "inconclusive", "undecided"]

MAX_PAIRS = 12
"""Most pairs of a comparison. The thresholds below were chosen for it: more looks would raise more false
alarms."""
MIN_PAIRS = 3
"""Fewest pairs that can decide anything: with two, one slow launch would decide."""
MIN_CHANGED = 5
"""Fewest pairs that can tell a change: 2 / 4^5 is 0.2 %."""

_PAIR_FLOOR = SIGMA_FLOOR * math.sqrt(2)
"""Smallest noise of a pair that is believed: that of two launches."""
_EFFICIENCY = SCALE_EFFICIENCY / 1.5
"""Degrees of freedom for each difference beyond the first pair. Differences of neighbours share a launch, and
so tell less than independent ones: hence 1.5."""

# Thresholds in standard errors, tuned by simulation.
_Z_CHANGE = 2.6  # slower, faster
_Z_KEPT = 2.6  # the same without the pair that is most in favour of it
_Z_SAME = 2.3  # same
_Z_HOPELESS = 2.5  # stop if only a shift of the mean by more than this would still decide
_Z_POWER = 3.0  # 1.645 for a power of 95 %, the rest for clipping and early looks
_SHOWN = 0.4  # of the change, by a pair that shows it


@dataclass(frozen=True, kw_only=True)
class PairedDecision:
    """The outcome after the pairs so far. Changes are those of the cost: +0.03 is B 3 % slower than A."""

    outcome: PairedOutcome
    change: float
    """Estimated relative change from A to B."""
    interval: tuple[float, float]
    """99 % confidence interval of `change` at this look."""
    tolerance: float
    pairs: int
    pair_sigma: float
    """Estimated standard deviation of the logarithm of a pair's ratio."""
    minimum_detectable: float
    """`minimum_detectable_difference` with this noise and the pairs that are allowed."""


def order(pair: int) -> tuple[Literal["a", "b"], Literal["a", "b"]]:
    """Return in which order the arms of a pair, counted from 0, are launched: A B, B A, A B, ..."""
    return ("b", "a") if pair % 2 else ("a", "b")


def decide(
    a: Sequence[float], b: Sequence[float], *, tolerance: float, max_pairs: int = MAX_PAIRS
) -> PairedDecision:
    """Compare the pairs so far; `a[k]` and `b[k]` are the costs of pair k, in one unit, in `order(k)`.

    Call it after each pair with all pairs so far, until the outcome is not "undecided". `tolerance` is the
    relative change that matters: 0.03 is 3 %. Raises ValueError for a value out of range.
    """
    _check(a, b, tolerance, max_pairs)
    pairs, neighbours = _differences(a, b)
    count = len(pairs)
    ordered = sorted(pairs)
    spare = count - 1 + len(neighbours)
    variance = clipped_variance(squares(ordered) + [value**2 for value in neighbours], spare)
    sigma = max(math.sqrt(variance), _PAIR_FLOOR)
    degrees = max(_EFFICIENCY * spare, 0.5)
    error = sigma / math.sqrt(count)
    change = location(ordered, sigma)
    reach = t_quantile(Z_99, degrees) * error
    return PairedDecision(
        outcome=_outcome(ordered, change, sigma, degrees, math.log1p(tolerance), max_pairs),
        change=relative(change),
        interval=(relative(change - reach), relative(change + reach)),
        tolerance=tolerance,
        pairs=count,
        pair_sigma=sigma,
        minimum_detectable=minimum_detectable_difference(sigma, max_pairs),
    )


def decided(
    a: Sequence[float], b: Sequence[float], *, tolerance: float, max_pairs: int = MAX_PAIRS
) -> PairedDecision:
    """Return what the first of all looks that decides says, or the last look if none does.

    For a quantity that is decided while pairs are still made for another one: what is simulated of `decide`
    holds for a comparison that ends with the first decision. Arguments and errors are those of `decide`.
    """
    _check(a, b, tolerance, max_pairs)
    for pairs in range(1, len(a) + 1):
        decision = decide(a[:pairs], b[:pairs], tolerance=tolerance, max_pairs=max_pairs)
        if decision.outcome != "undecided":
            break
    return decision


def minimum_detectable_difference(pair_sigma: float, max_pairs: int = MAX_PAIRS) -> float:
    """Return the smallest change that is found 95 times in 100, relative: 0.03 is 3 %.

    `pair_sigma` is the standard deviation of log(B / A) between pairs: sqrt(2) times that between launches,
    where the machine does not drift. The formula (T + 3.0) sigma / sqrt(N), T the quantile of Student's t
    that calls a change, is up to 10 % optimistic from 8 pairs on; below, it depends on single disturbed
    launches.
    """
    final = _EFFICIENCY * 2 * (max_pairs - 1)
    return relative((t_quantile(_Z_CHANGE, final) + _Z_POWER) * pair_sigma / math.sqrt(max_pairs))


def _check(a: Sequence[float], b: Sequence[float], tolerance: float, max_pairs: int) -> None:
    """Raise ValueError for pairs, a tolerance or a number of pairs out of range."""
    for name, costs in (("arm A", a), ("arm B", b)):
        sorted_logs(name, costs)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is {tolerance!r}, expected a fraction above 0: 0.03 for 3 %")
    if not MIN_CHANGED <= max_pairs <= MAX_PAIRS:
        raise ValueError(f"max_pairs is {max_pairs}, expected {MIN_CHANGED} to {MAX_PAIRS}")
    if len(a) != len(b):
        raise ValueError(f"{len(a)} launches of arm A and {len(b)} of arm B, expected one of each in a pair")
    if len(a) > max_pairs:
        raise ValueError(f"{len(a)} pairs, more than max_pairs {max_pairs}")


def _differences(a: Sequence[float], b: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return log(B / A) of each pair, and log differences of neighbouring launches of one arm."""
    pairs = [math.log(after) - math.log(before) for before, after in zip(a, b, strict=True)]
    last = [b if order(pair)[1] == "b" else a for pair in range(len(pairs) - 1)]
    neighbours = [math.log(arm[pair + 1]) - math.log(arm[pair]) for pair, arm in enumerate(last)]
    return pairs, neighbours


def _outcome(
    ordered: list[float], change: float, sigma: float, degrees: float, slow: float, max_pairs: int
) -> PairedOutcome:
    """Return the outcome from the sorted log ratios, their location, and the noise of a pair."""
    count = len(ordered)
    if count < MIN_PAIRS:
        return "undecided"
    error = sigma / math.sqrt(count)
    size = abs(change)
    toward = ordered if change >= 0 else [-value for value in reversed(ordered)]
    is_sure = (
        size > t_quantile(_Z_CHANGE, degrees) * error
        and _without_the_most(toward, sigma, degrees)
        and _is_shown_by_all(toward, size)
    )
    if is_sure and size + t_quantile(Z_99, degrees) * error >= slow:
        return "slower" if change > 0 else "faster"
    if size + t_quantile(_Z_SAME, degrees) * error < slow:
        return "same"
    if count == max_pairs or _hopeless(size, slow, sigma, degrees, count, max_pairs):
        return "inconclusive"
    return "undecided"


def _without_the_most(toward: list[float], sigma: float, degrees: float) -> bool:
    """Tell whether the change is sure without the pair most in favour of it, the last of the sorted ones."""
    kept = toward[:-1]
    mean = sum(kept) / len(kept)
    spread = math.sqrt(sum([(value - mean) ** 2 for value in kept]) / (len(kept) - 1))
    error = max(sigma, spread / 2) / math.sqrt(len(kept))
    return location(kept, sigma) > t_quantile(_Z_KEPT, degrees) * error


def _is_shown_by_all(toward: list[float], size: float) -> bool:
    """Tell whether so many pairs show the change that a machine with two speeds hardly makes it by chance.

    From 8 pairs on one may not show it, from 10 on two, at 12 three.
    """
    count = len(toward)
    missing = sum(value < _SHOWN * size for value in toward)
    return count >= MIN_CHANGED and missing <= max(0, (count - 6) // 2)


def _hopeless(size: float, slow: float, sigma: float, degrees: float, count: int, max_pairs: int) -> bool:
    """Tell whether all pairs still allowed would almost surely lead to no decision.

    The mean may still shift by `_Z_HOPELESS` standard deviations of the difference between the mean of
    `count` pairs and that of `max_pairs`.
    """
    final = degrees + _EFFICIENCY * 2 * (max_pairs - count)
    error = sigma / math.sqrt(max_pairs)
    shift = _Z_HOPELESS * sigma * math.sqrt(1 / count - 1 / max_pairs)
    changes = size + shift > t_quantile(_Z_CHANGE, final) * error
    is_same = size - shift + t_quantile(_Z_SAME, final) * error < slow
    return not (changes or is_same)
