"""Compares loss curves with those of a baseline. Pure."""

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

from perfsuite.results.baseline import Baseline, loss_curve
from perfsuite.results.run import Run
from perfsuite.verdict.robust import t_quantile

LOSS_SIGMAS = 4.3  # standard deviations by which a tenth of a curve may differ: 1 in 60,000, if normal
LOSS_DEGREES = 3  # of one launch for the estimated spread: under ten, as tenths correlate (by simulation)
LOSS_FLOOR = 0.02  # relative difference of a loss curve, always allowed: sums in another order drift
CLEAR = 30
"""Times the largest difference within two sides, of two launches each, by which they must differ: by chance
they do in 1 of 3,000 cases, where gradients scatter at all."""


def loss_differs(runs: Sequence[Run], baseline: Baseline, whose: str = "the baseline") -> str | None:
    """The first tenth of the steps where a run's loss differs from the baseline's by more than is allowed.

    None if there is none, or if it is the same curve at another `loss_scale`. From a spike of the baseline
    on, it differs only where it is higher than that. `whose` names the baseline in the message.
    """
    usual = _usual_loss(baseline)
    scale, spike = _scale(runs, usual) or 1, _spike([mean for mean, _ in usual])
    for run in runs:
        for position, (now, (then, allowed)) in enumerate(zip(loss_curve(run.loss), usual, strict=False)):
            share = f"the loss over {10 * position} to {10 * position + 10} % of the steps is {now:.4f}"
            if position >= spike:
                highest, above = usual[spike]
                if not now / scale <= highest + above:
                    return f"{share}, {whose}'s highest {highest:.4f} + {above:.4f}"
            elif not abs(now / scale - then) <= allowed:
                return f"{share}, {whose}'s {then:.4f} +- {allowed:.4f}"
    return _gradients_differ(runs, baseline, whose, scale)


def _gradients_differ(runs: Sequence[Run], baseline: Baseline, whose: str, scale: float) -> str | None:
    """The norm of a run's gradients if it is not the baseline's: a wrong one may long have an equal loss."""
    usual = baseline.values("gradient_norm")
    if len(usual) < 3:
        return None
    then, sigmas = fmean(usual), t_quantile(LOSS_SIGMAS, len(usual) - 1) * math.sqrt(1 + 1 / len(usual))
    allowed = max(LOSS_FLOOR * then, sigmas * stdev(usual))
    for run in runs:
        now = run.figures.gradient_norm
        if now is not None and not min(abs(now - then), abs(now / scale - then)) <= allowed:
            return (
                f"the norm of the gradients before step 4 is {now:.4g}, {whose}'s {then:.4g} +- {allowed:.2g}"
            )
    return None


def other_gradients(before: Run, now: Run) -> str | None:
    """That two launches of the same start have gradients of another norm; None if not, or if unknown."""
    then, today = before.figures.gradient_norm, now.figures.gradient_norm
    if then is None or today is None or abs(today - then) <= LOSS_FLOOR * then:
        return None
    return f"the norm of the gradients before step 4: {then:.4g} -> {today:.4g}"


def steadily_other_gradients(before: Sequence[Run], now: Sequence[Run], scale: float) -> str | None:
    """`other_gradients` of several launches of each side, where each side agrees with itself.

    Without a seed it does not: the sides must lie `CLEAR` times as far apart as launches of one of them.
    `scale`: how many times the loss of `before` that of `now` is, by which gradients may differ, too.
    """
    first, second = (
        [norm for run in runs if (norm := run.figures.gradient_norm) is not None] for runs in (before, now)
    )
    if len(first) < len(before) or len(second) < len(now):
        return None
    within = max(max(side) - min(side) for side in (first, second))
    apart = max(min(first) - max(second), min(second) - max(first))
    is_scaled = abs(second[0] / scale - first[0]) <= LOSS_FLOOR * first[0]
    return other_gradients(before[0], now[0]) if apart > CLEAR * within and not is_scaled else None


def _spike(curve: Sequence[float]) -> int:
    """The place of the highest mean, if above the first by more than `LOSS_FLOOR`; else their number."""
    # A training that throws itself back goes on by how its sums were rounded, along another curve.
    if not curve or not max(curve) - curve[0] > LOSS_FLOOR * abs(curve[0]):
        return len(curve)
    return curve.index(max(curve))


def loss_scale(runs: Sequence[Run], baseline: Baseline) -> float | None:
    """How many times the baseline's loss the runs' is, or one part of so many, in each step; else None."""
    return _scale(runs, _usual_loss(baseline))


def _scale(runs: Sequence[Run], usual: Sequence[tuple[float, float]]) -> float | None:
    tenths = (zip(loss_curve(run.loss), usual, strict=False) for run in runs)
    both = [(now, then, allowed) for tenth in tenths for now, (then, allowed) in tenth]
    ratios = [now / then for now, then, _ in both if then]
    if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
        return None
    scale = median(ratios)
    times = max(scale, 1 / scale)
    is_whole = round(times) >= 2 and abs(times / round(times) - 1) <= LOSS_FLOOR
    is_same = all(abs(now / scale - then) <= allowed for now, then, allowed in both)
    return scale if is_whole and is_same else None


def scaled(runs: Sequence[Run], baseline: Baseline) -> list[str]:
    """That the loss is a multiple of the baseline's, in words; nothing where it is not."""
    scale = loss_scale(runs, baseline)
    return [] if scale is None else [f"the loss is x {scale:.3g} in every step: scaled elsewhere"]


def _usual_loss(baseline: Baseline) -> list[tuple[float, float]]:
    """The baseline's mean loss over each tenth of the steps, and the difference from it that is allowed.

    That is the largest of: Student's t quantile times the spread of that tenth with its neighbours; the same
    times the median relative spread of all tenths, times the mean; `LOSS_FLOOR` times the mean. The quantile
    is for a new launch against an estimated mean, hence sqrt(1 + 1 / launches).
    """
    curves = [launch.loss for launch in baseline.launches if launch.loss]
    count, longest = len(curves), max(map(len, curves), default=0)
    tenths = [[curve[place] for curve in curves if len(curve) > place] for place in range(longest)]
    means = [fmean(tenth) for tenth in tenths]
    if count < 3:
        return [(mean, LOSS_FLOOR * abs(mean)) for mean in means]
    spreads = [stdev(tenth) if len(tenth) > 1 else 0.0 for tenth in tenths]
    typical = median(spread / abs(mean) if mean else 0.0 for spread, mean in zip(spreads, means, strict=True))
    sigmas = t_quantile(LOSS_SIGMAS, LOSS_DEGREES * (count - 1)) * math.sqrt(1 + 1 / count)
    return [
        (mean, max(sigmas * _near(spreads, tenth), max(sigmas * typical, LOSS_FLOOR) * abs(mean)))
        for tenth, mean in enumerate(means)
    ]


def _near(spreads: Sequence[float], tenth: int) -> float:
    """The spread of a tenth, or the root mean square of it and its neighbours' spreads if that is larger."""
    neighbours = spreads[max(0, tenth - 1) : tenth + 2]
    return max(spreads[tenth], math.sqrt(fmean(spread * spread for spread in neighbours)))
