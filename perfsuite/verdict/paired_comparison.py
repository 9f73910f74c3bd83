"""Decide which of two arms is slower, from launches that alternate between them. Pure functions.

Arms A and B are launched in the order A B B A A B B A ... Neighbouring launches form pairs: (1, 2), (3, 4),
... Effects of the machine on both launches of a pair cancel in their ratio. Between the pairs, neighbouring
launches are of the same arm: (2, 3), (4, 5), ... These differ only by noise. Both kinds of neighbours show
the noise, so no baseline is needed. All arithmetic is on logarithms of costs (lower is better). The decision
after each pair has one of the outcomes of `verdict.sequential`. The outcome is `passed` if a change by the
tolerance is excluded in both directions.

On a machine with two speeds, all launches of one arm can be fast and all of the other slow by chance. For n
pairs, the probability of this is 2 / 4^n. A change is therefore reported only after `MIN_CHANGED` pairs or
more, and nearly all pairs must show it.

Drift can be too fast to cancel within pairs. If a probe follows the drift (`verdict.noise`), the drift is
corrected, at the cost of degrees of freedom and a stricter threshold. There is no correction if the probe
clearly differs between the arms. If the probe might differ, a decision must hold with and without the
correction.

Source of paired differences: Student, Biometrika 6 (1908) 1; for other sources see `robust`. The constants
were chosen by simulation: tests/verdict/test_simulated_pairs.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from perfsuite.verdict.noise import shrunk_slope
from perfsuite.verdict.robust import (
    SCALE_EFFICIENCY,
    Z_99,
    clipped_variance,
    location,
    relative,
    squares,
    t_quantile,
)
from perfsuite.verdict.sequential import SIGMA_FLOOR, Outcome

# Maximum number of pairs. The thresholds are tuned to this number; more pairs would mean more false alarms.
MAX_PAIRS = 12
MIN_PAIRS = 3  # minimum number of pairs for a decision: with two, one slow launch would decide
MIN_CHANGED = 5  # minimum number of pairs for reporting a change: 2 / 4^5 is 0.2%

_PAIR_FLOOR = SIGMA_FLOOR * math.sqrt(2)  # lower limit of the noise of a pair, which has two launches
_SHARED_LAUNCH = 1.5
"""Number of consecutive differences that carry as much information as one independent difference.
Neighbouring differences share a launch and have a correlation of -1/2, and 1 + 2 (1/2)^2 is 1.5."""
_EFFICIENCY = SCALE_EFFICIENCY / _SHARED_LAUNCH  # degrees of freedom that each difference but the first adds

# Thresholds in standard errors, tuned by simulation.
_Z_CHANGE = 2.6  # regressed, improved
_Z_CORRECTED = 2.8  # regressed, improved, if an exponent was estimated from the same launches
_Z_PASS = 2.3  # passed
_Z_HOPELESS = 2.5  # stop if a decision would need a shift of the mean by more than this
_Z_POWER = 3.0  # 1.645 for a power of 95%, the rest for clipping and early decisions
_Z_PROBE_MAY_DIFFER = 1.6  # the probe might differ between the arms
_Z_PROBE_DIFFERS = 4.0  # the probe clearly differs between the arms
_LIKELY_PASS = 0.6  # if the uncorrected change is below this share of the tolerance, `passed` is likely
_SHOWN = 0.4  # a pair shows the change if its own difference is at least this share of the change


@dataclass(frozen=True, kw_only=True)
class PairedDecision:
    """The outcome after the pairs so far. Changes are of the cost: +0.03 means that B is 3% slower than A."""

    outcome: Outcome
    change: float  # estimated relative change from A to B
    interval: tuple[float, float]  # 99% confidence interval of `change` after these pairs
    pairs: int
    pair_sigma: float  # estimated standard deviation of the logarithm of a pair's ratio
    # `minimum_detectable_difference` for this noise and the maximum number of pairs
    minimum_detectable: float
    exponent: float  # exponent of the correction by the probe (`verdict.noise`); 0: not corrected
    # The outcomes without and with the correction, if they must agree but differ after the last pair.
    disputed: tuple[Outcome, Outcome] | None = None


class Differences(NamedTuple):
    """Differences of logarithms between neighbouring launches, in the order of the launches."""

    pairs: list[float]  # log(B / A) of each pair
    neighbours: list[float]  # log(later / earlier) of neighbours of one arm: one value fewer than `pairs`


class _Evidence(NamedTuple):
    """The evidence from the pairs so far: the sorted differences, their location, and the noise."""

    ordered: list[float]
    change: float
    sigma: float  # estimated noise of a pair
    # Standard error of `change`, as a multiple of the standard error of a plain mean: above 1 with a fitted
    # exponent.
    error: float
    degrees: float  # degrees of freedom of `sigma`
    z: float  # threshold for a change


def order(pair: int) -> tuple[Literal["a", "b"], Literal["a", "b"]]:
    """Return the launch order of the arms in pair number `pair`: A B in pair 0, B A in pair 1, and so on."""
    return ("b", "a") if pair % 2 else ("a", "b")


def pair_differences(a: Sequence[float], b: Sequence[float]) -> Differences:
    """Return the differences between launches. Costs `a[k]` and `b[k]` are of pair k, run in `order(k)`."""
    pairs = [math.log(after) - math.log(before) for before, after in zip(a, b, strict=True)]
    last = [b if order(pair)[1] == "b" else a for pair in range(len(pairs) - 1)]
    neighbours = [math.log(arm[pair + 1]) - math.log(arm[pair]) for pair, arm in enumerate(last)]
    return Differences(pairs, neighbours)


def paired_exponent(costs: Differences, probes: Differences) -> float:
    """Estimate the exponent e in cost ~ probe**e, from 0 to 1. It is fitted to differences of logarithms."""
    x, y = (
        [value - fmean(differences.pairs) for value in differences.pairs] + differences.neighbours
        for differences in (probes, costs)
    )
    return shrunk_slope(x, y, (len(y) - 2) / _SHARED_LAUNCH)


def decided(
    a: Sequence[float],
    b: Sequence[float],
    *,
    tolerance: float,
    max_pairs: int = MAX_PAIRS,
    probes: tuple[Sequence[float], Sequence[float]] | None = None,
) -> PairedDecision:
    """Compare the pairs so far. `a[k]` and `b[k]` are the costs of pair k in one unit, run in `order(k)`.

    Returns the first decision whose outcome is not "undecided", or the last decision if there is none. While
    the outcome is "undecided", call this again after one more pair. `tolerance` is the relative change that
    matters: 0.03 is 3%. `probes` are the probe's seconds in the launches of A and of B. Give them only if the
    probe uses the same software in both arms. Raises ValueError if the tolerance is out of range.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is {tolerance!r}, expected a fraction between 0 and 1: 0.03 for 3%")
    for pairs in range(1, len(a) + 1):
        probe = None if probes is None else pair_differences(*(arm[:pairs] for arm in probes))
        decision = _look(pair_differences(a[:pairs], b[:pairs]), probe, tolerance, max_pairs)
        if decision.outcome != "undecided":
            break
    return decision


def minimum_detectable_difference(
    pair_sigma: float, max_pairs: int = MAX_PAIRS, z: float = _Z_CHANGE
) -> float:
    """Return the smallest relative change that is detected 95 times in 100: 0.03 is 3%.

    `pair_sigma` is the standard deviation of log(B / A) between pairs. On a machine without drift, that is
    sqrt(2) times the standard deviation between launches. The formula is (T + 3.0) sigma / sqrt(N), where T
    is the quantile of Student's t at which a change is reported. With 8 pairs or more, the result is up to
    10% too small. With fewer pairs, it is less accurate, because single launches matter more.
    """
    final = _EFFICIENCY * 2 * (max_pairs - 1)
    return relative((t_quantile(z, final) + _Z_POWER) * pair_sigma / math.sqrt(max_pairs))


def _look(costs: Differences, probe: Differences | None, tolerance: float, max_pairs: int) -> PairedDecision:
    plain = _decision(costs, tolerance, max_pairs)
    exponent = None if probe is None else paired_exponent(costs, probe)
    if probe is None or not exponent:
        return plain
    corrected = _decision(costs, tolerance, max_pairs, probe, exponent)
    if corrected.pair_sigma >= plain.pair_sigma or _differs(probe, _Z_PROBE_DIFFERS):
        return plain
    is_likely = corrected.outcome != "passed" or abs(plain.change) < _LIKELY_PASS * tolerance
    if corrected.outcome == plain.outcome or (is_likely and not _differs(probe, _Z_PROBE_MAY_DIFFER)):
        return corrected
    if len(costs.pairs) < max_pairs:
        return replace(corrected, outcome="undecided")
    return replace(corrected, outcome="inconclusive", disputed=(plain.outcome, corrected.outcome))


def _decision(
    costs: Differences,
    tolerance: float,
    max_pairs: int,
    probe: Differences | None = None,
    exponent: float = 0.0,
) -> PairedDecision:
    if probe is not None:
        both = zip(costs, probe, strict=True)
        costs = Differences(*([x - exponent * y for x, y in zip(*pair, strict=True)] for pair in both))
    seen = _evidence(costs, probe, _Z_CHANGE if probe is None else _Z_CORRECTED)
    reach = t_quantile(Z_99, seen.degrees) * seen.sigma * seen.error / math.sqrt(len(costs.pairs))
    return PairedDecision(
        outcome=_outcome(seen, math.log1p(tolerance), max_pairs),
        change=relative(seen.change),
        interval=(relative(seen.change - reach), relative(seen.change + reach)),
        pairs=len(costs.pairs),
        pair_sigma=seen.sigma,
        minimum_detectable=minimum_detectable_difference(seen.sigma, max_pairs, seen.z),
        exponent=exponent,
    )


def _evidence(differences: Differences, fitted: Differences | None, z: float) -> _Evidence:
    """Estimate change and noise. `fitted` has the probe's differences if an exponent was estimated from them.

    The exponent costs degrees of freedom. In addition, the error of the exponent increases the error of the
    change. The increase is larger if the mean m of the probe's differences over n pairs is further from 0.
    The factor is sqrt(1 + 1.5 n m^2 / S), where S is the sum of squares from which the exponent was
    estimated, and 1.5 is `_SHARED_LAUNCH`.
    """
    ordered = sorted(differences.pairs)
    count = len(differences.pairs)
    spare = count - 1 + len(differences.neighbours) - (0 if fitted is None else _SHARED_LAUNCH)
    variance = clipped_variance(squares(ordered) + [value**2 for value in differences.neighbours], spare)
    sigma = max(math.sqrt(variance), _PAIR_FLOOR)
    error = 1.0
    if fitted is not None:
        mean = fmean(fitted.pairs)
        spread = sum((x - mean) ** 2 for x in fitted.pairs) + sum(x**2 for x in fitted.neighbours)
        error = math.sqrt(1 + _SHARED_LAUNCH * count * mean**2 / spread)
    return _Evidence(ordered, location(ordered, sigma), sigma, error, max(_EFFICIENCY * spare, 0.5), z)


def _differs(probe: Differences, z: float) -> bool:
    seen = _evidence(probe, None, z)
    return abs(seen.change) > t_quantile(z, seen.degrees) * seen.sigma / math.sqrt(len(probe.pairs))


def _outcome(seen: _Evidence, slow: float, max_pairs: int) -> Outcome:
    count = len(seen.ordered)
    if count < MIN_PAIRS:
        return "undecided"
    error = seen.sigma * seen.error / math.sqrt(count)
    size = abs(seen.change)
    toward = seen.ordered if seen.change >= 0 else [-value for value in reversed(seen.ordered)]
    # pragma: no mutate size > to size >=: no estimate is exactly the bound
    is_sure = size > t_quantile(seen.z, seen.degrees) * error and _without_the_most(toward, seen)
    # pragma: no mutate >= to >: no estimate is exactly the bound
    if is_sure and _is_shown_by_all(toward, size) and size + t_quantile(Z_99, seen.degrees) * error >= slow:
        # pragma: no mutate > to >=: the change is beyond the tolerance, so it is not 0
        return "regressed" if seen.change > 0 else "improved"
    # pragma: no mutate < to <=: no estimate is exactly the bound
    if size + t_quantile(_Z_PASS, seen.degrees) * error < slow:
        return "passed"
    if count == max_pairs or _hopeless(size, slow, seen, max_pairs):
        return "inconclusive"
    return "undecided"


def _without_the_most(toward: list[float], seen: _Evidence) -> bool:
    """Return whether the change is significant even without the pair that supports it most."""
    kept = toward[:-1]
    mean = sum(kept) / len(kept)
    spread = math.sqrt(sum([(value - mean) ** 2 for value in kept]) / (len(kept) - 1))
    error = max(seen.sigma * seen.error, spread / 2) / math.sqrt(len(kept))
    return location(kept, seen.sigma) > t_quantile(seen.z, seen.degrees) * error


def _is_shown_by_all(toward: list[float], size: float) -> bool:
    """Return whether nearly all pairs show the change. At most 1 of 8, 2 of 10, or 3 of 12 may lack it."""
    count = len(toward)
    missing = sum(value < _SHOWN * size for value in toward)
    return count >= MIN_CHANGED and missing <= max(0, (count - 6) // 2)


def _hopeless(size: float, slow: float, seen: _Evidence, max_pairs: int) -> bool:
    """Return whether the remaining pairs would almost certainly not decide (see `sequential`)."""
    count = len(seen.ordered)
    final = seen.degrees + _EFFICIENCY * 2 * (max_pairs - count)
    error = seen.sigma / math.sqrt(max_pairs)
    shift = _Z_HOPELESS * seen.sigma * math.sqrt(1 / count - 1 / max_pairs)
    changes = size + shift > t_quantile(seen.z, final) * error
    # pragma: no mutate < to <=: no estimate is exactly the bound
    passes = size - shift + t_quantile(_Z_PASS, final) * error < slow
    return not (changes or passes)
