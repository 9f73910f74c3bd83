"""Compare loss curves and gradient norms with those of a baseline or of another arm. Pure."""

import math
from collections.abc import Sequence
from statistics import fmean, median, median_low

from perfsuite.results.baseline import Baseline, BaselineLaunch, from_runs, values_of
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.run import Run
from perfsuite.verdict.robust import t_quantile

# Number of standard deviations by which a tenth of a loss curve may differ from the baseline's mean. In a
# normal distribution, 1 in 60,000 values differs by more.
LOSS_SIGMAS = 4.3
# Degrees of freedom that a launch adds, found by simulation. They are fewer than ten, because the ten parts
# of a loss curve are correlated.
LOSS_DEGREES = 3
LOSS_FLOOR = 0.02  # relative difference that a loss curve may always have, because summation order matters
CANCELLED = 1e-4
"""A loss may always differ by this share of the largest loss of its curve. A much smaller loss, as in GRPO,
is a sum of larger terms that cancel each other, so its relative difference means nothing."""
UNCLIPPED = "unclipped_norm"
# Field of `Figures` -> name of a gradient norm. The first is preferred, because clipping does not affect it.
NORMS = {
    UNCLIPPED: f"the norm of the gradients before clipping in step {COUNTED_STEP}",
    "gradient_norm": f"the norm of the gradients after clipping in step {COUNTED_STEP}",
}
NORM_DEGREES = 1  # a launch has only one value of a norm, and so one degree of freedom
FEWEST = 3  # minimum number of launches needed to estimate the scatter and to find an outlier
MOST_SCATTER = 0.2  # norms that differ by more than this share are never called equal, even if they scatter
Launches = Sequence[BaselineLaunch]
Curve = Sequence[float]
CLEAR = 30
"""Two sides are reported as different only if they differ by more than this multiple of the largest
difference within a side. With two launches on each side, and gradients that scatter, this happens by chance
in 1 of 3,000 cases."""


def loss_differs(runs: Sequence[Run], baseline: Baseline, whose: str = "the baseline") -> str | None:
    """Return why runs differ from the baseline in loss or gradients, or None if they agree.

    There are three possible reasons: (1) the losses of all steps differ by a common factor; (2) in one of the
    ten parts of a run, the mean loss differs by more than is allowed; (3) a gradient norm differs. After a
    spike in the baseline's loss, a loss is reported as different only if it is above the spike. In the
    message, the text `whose` refers to the baseline.
    """
    then = baseline.launches
    now = from_runs(runs).launches
    usual = _usual_loss(then)
    scale = _scale(now, usual)
    if scale is not None:
        return _scaled_computation(scale, then, now, whose) or _gradients_differ(then, now, whose)
    spike = _spike(then)
    for launch in now:
        for position, (value, (mean, allowed)) in enumerate(zip(launch.loss, usual, strict=False)):
            share = f"the loss between {10 * position}% and {10 * position + 10}% of the steps is {value:.4f}"
            if position >= spike:
                highest, above = usual[spike]
                if not value <= highest + above:
                    return f"{share}, but at most {highest:.4f} + {above:.4f} in {whose}"
            elif not abs(value - mean) <= allowed:
                return f"{share}, but {mean:.4f} +- {allowed:.4f} in {whose}"
    return _gradients_differ(then, now, whose)


def _scaled_computation(scale: float, then: Launches, now: Launches, whose: str) -> str | None:
    """Explain a loss that differs by the factor `scale` in every step; None if the gradients are the same.

    If a library computes the mean over micro-batches after backward instead of before, it reports a
    different loss with the same gradients. Only the norm before clipping can show that the gradients are the
    same, because clipping makes all norms equal.
    """
    factor = f"x {_times(scale)} in every step, compared with {whose}"
    norms = {figure: [values_of(side, figure) for side in (then, now)] for figure in NORMS}
    ratios = {figure: _ratio(*sides) for figure, sides in norms.items() if all(map(_is_size, sides))}
    for figure, (ratio, near) in ratios.items():
        if figure == UNCLIPPED and abs(ratio - 1) <= near:
            return None
        if abs(ratio / scale - 1) <= near:
            read = f"{NORMS[figure]} is x {_times(ratio)}"
            return f"loss and gradients {factor}: is gradient accumulation averaged? ({read})"
    if UNCLIPPED in ratios:
        return f"loss {factor}, and {NORMS[UNCLIPPED]} is x {_times(ratios[UNCLIPPED][0])}"
    before, today = norms[UNCLIPPED]
    if before or today:
        unknown = f"{whose if today else 'this side'} did not record"
    else:
        unknown = "neither side recorded"
    return f"loss {factor}: is gradient accumulation averaged? (unknown: {unknown} {NORMS[UNCLIPPED]})"


def _ratio(before: Sequence[float], today: Sequence[float]) -> tuple[float, float]:
    """Return today's norm as a multiple of the earlier norm, and how far scatter can move this multiple.

    The second number is a relative difference.
    """
    near = max(LOSS_FLOOR, _spread(before), _spread(today))
    return median(today) / median(before), min(near, MOST_SCATTER)


def _times(factor: float) -> str:
    return f"{factor:.3f}" if 0.01 <= factor < 1000 else f"{factor:.4g}"


def _is_size(values: Sequence[float]) -> bool:
    return bool(values) and median(values) > 0


def _spread(values: Sequence[float]) -> float:
    """Return half of the relative range of the values."""
    return (max(values) - min(values)) / (2 * median(values))


def _gradients_differ(then: Launches, now: Launches, whose: str) -> str | None:
    """Describe a gradient norm that differs from the baseline's.

    Gradient norms are compared as well, because the loss might begin to differ only much later.
    """
    for figure, said in NORMS.items():
        usual = values_of(then, figure)
        values = values_of(now, figure)
        # Too few launches to estimate the scatter: compare them directly, if each side has at least two.
        if len(usual) < FEWEST:
            sides = [(usual, values)]
            if _is_apart(sides, 0):
                change = f"{usual[0]:.4g} in {whose} -> {values[0]:.4g}"
                return f"{said}: {change}{_limit(_allowed(sides, 0), usual[0])}"
            continue
        ((mean, allowed),) = _usual(_limited([(norm,) for norm in usual], NORM_DEGREES), NORM_DEGREES)
        for value in values:
            if not abs(value - mean) <= allowed:
                return f"{said} is {value:.4g}, but {mean:.4g} +- {allowed:.2g} in {whose}"
    return None


def may_differ(then: Launches, now: Launches) -> str | None:
    """Describe a difference, larger than rounding, between the first launches of two sides, or return None.

    A missing seed can also be the cause. Only more launches can show this (`steadily_differ`).
    """
    before = then[0]
    today = now[0]
    for figure, said in NORMS.items():
        norm_before = before.figures.get(figure)
        norm = today.figures.get(figure)
        if norm_before is None or norm is None:
            continue
        allowed = LOSS_FLOOR * norm_before
        if not abs(norm - norm_before) <= allowed:  # true for NaN
            return f"{said}: {norm_before:.4g} -> {norm:.4g}{_limit(allowed, norm_before)}"
    if _harmless_factor(then, now) is not None:
        return None
    for position, (loss_before, loss) in enumerate(zip(before.loss, today.loss, strict=False)):
        allowed = _floor(loss_before, before.loss)
        if not abs(loss - loss_before) <= allowed:
            return _loss_change(position, loss_before, loss, allowed)
    return None


def _loss_change(position: int, before: float, now: float, allowed: float) -> str:
    change = f"{_as_text(before)} -> {_as_text(now)}"
    return f"the loss {part_of_steps(position, 10)}: {change}{_limit(allowed, before)}"


def _as_text(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) >= 0.01 or not loss else f"{loss:.4g}"


def _floor(value: float, curve: Curve) -> float:
    """Return the difference that is always allowed for one value of a loss curve, even without scatter."""
    largest = max((abs(loss) for loss in curve if math.isfinite(loss)), default=0.0)
    return max(LOSS_FLOOR * abs(value), CANCELLED * largest)


def part_of_steps(part: int, parts: int) -> str:
    """Name one of `parts` equal parts of the steps, numbered from 0: `between 50% and 60% of the steps`."""
    return f"between {100 * part // parts}% and {100 * (part + 1) // parts}% of the steps"


def _limit(allowed: float, before: float) -> str:
    """Describe the allowed difference as a share of the earlier value; empty if it is not finite."""
    if not math.isfinite(allowed):
        return ""
    limit = f"{allowed / abs(before):.1%}" if before else f"{allowed:.4g}"
    return f" (at most {limit} is allowed)"


def steadily_differ(then: Launches, now: Launches) -> str | None:
    """Describe a clear difference between two sides with a few launches each, or return None.

    Without a seed, the launches of one side differ from each other. The two sides must therefore differ by
    `CLEAR` times the largest difference within a side. One outlier among three or more launches of `then` is
    left out.
    """
    for figure, said in NORMS.items():
        before, today = (values_of(side, figure) for side in (then, now))
        if len(before) < len(then) or len(today) < len(now):
            continue
        before = [norm for (norm,) in _agreeing([(norm,) for norm in before], NORM_DEGREES)]
        if _is_apart([(before, today)], 0):
            limit = _limit(_allowed([(before, today)], 0), before[0])
            return f"{said}: {before[0]:.4g} -> {today[0]:.4g}{limit}"
    if _harmless_factor(then, now) is not None:
        return None
    curves = _agreeing([launch.loss for launch in then], LOSS_DEGREES), [launch.loss for launch in now]
    tenths = [
        ([curve[place] for curve in curves[0]], [curve[place] for curve in curves[1]])
        for place in range(min(len(curve) for side in curves for curve in side))
    ]
    for position, (before, today) in enumerate(tenths):
        if _is_apart(tenths, position):
            return _loss_change(position, before[0], today[0], _allowed(tenths, position))
    if not tenths:
        return None
    # The mean loss of all steps scatters less than the mean loss of one tenth of the steps.
    means = [[fmean(curve) for curve in side] for side in curves]
    sides = [(means[0], means[1])]
    if not _is_apart(sides, 0):
        return None
    factor = f" (x {_times(means[1][0] / means[0][0])})" if means[0][0] > 0 < means[1][0] else ""
    change = f"{means[0][0]:.4f} -> {means[1][0]:.4f}{factor}"
    return f"the mean loss of all steps: {change}{_limit(_allowed(sides, 0), means[0][0])}"


def _allowed(sides: Sequence[tuple[Sequence[float], Sequence[float]]], place: int) -> float:
    """Return the allowed difference at a place: rounding, or `CLEAR` times the largest scatter of a side."""
    within = max(max(side) - min(side) for both in sides for side in both)
    return max(CLEAR * within, _floor(sides[place][0][0], [before[0] for before, _ in sides]))


def _is_apart(sides: Sequence[tuple[Sequence[float], Sequence[float]]], place: int) -> bool:
    """Return whether two sides differ at a place by more than `_allowed`.

    If a side has only one launch, its scatter is unknown and the result is False.
    """
    if any(len(side) < 2 for side in sides[place]):
        return False
    before, today = sides[place]
    apart = max(min(before) - max(today), min(today) - max(before))
    return apart > _allowed(sides, place) or not all(map(math.isfinite, today))


def common_factor(then: Launches, now: Launches, whose: str) -> str | None:
    """Explain a loss that is the same multiple of the other side's loss in every step.

    Returns None if there is no such factor, or if it is harmless. In messages, the text `whose` refers to the
    other side. One launch on each side is enough, because scatter would not be the same in every step.
    """
    scale = _scale(now, _usual_loss(then))
    return None if scale is None else _scaled_computation(scale, then, now, whose)


def few_differ(runs: Sequence[Run], before: Sequence[Run], whose: str) -> str | None:
    """Return why two arms differ in loss or gradients, or None if they agree.

    Use this instead of `loss_differs` if there are too few launches to estimate the scatter.
    """
    then = from_runs(before).launches
    now = from_runs(runs).launches
    factor = common_factor(then, now, whose)
    if factor is not None:
        return factor
    difference = steadily_differ(then, now)
    if difference is not None:
        return f"{difference}, in {len(now)} launches of each arm"
    return None


def are_compared(then: Launches, now: Launches) -> bool:
    """Return whether both sides have values that can be compared: losses, or unclipped gradient norms."""
    both = (then, now)
    return all(any(launch.loss for launch in side) for side in both) or all(
        values_of(side, UNCLIPPED) for side in both
    )


def _spike(launches: Launches) -> int:
    """Return the place of the median curve's peak if it is a spike, and otherwise the number of places.

    A peak is a spike if it exceeds the value at the first place by more than `LOSS_FLOOR`.
    """
    curve = [median_low(values) for values in _by_place([launch.loss for launch in launches])]
    # After a loss spike, training follows a different curve, which depends on how sums were rounded.
    if not curve or not max(curve) - curve[0] > LOSS_FLOOR * abs(curve[0]):
        return len(curve)
    return curve.index(max(curve))


def _scale(launches: Launches, usual: Sequence[tuple[float, float]]) -> float | None:
    """Return the factor between a loss and the usual loss; None unless all steps have the same factor.

    The factor must be an integer of at least 2, or the inverse of such an integer.
    """
    tenths = (zip(launch.loss, usual, strict=False) for launch in launches)
    both = [(now, then, allowed) for tenth in tenths for now, (then, allowed) in tenth]
    ratios = [now / then for now, then, _ in both if then]
    if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
        return None
    scale = median(ratios)
    times = max(scale, 1 / scale)
    is_whole = round(times) >= 2 and abs(times / round(times) - 1) <= LOSS_FLOOR
    is_same = all(abs(now / scale - then) <= allowed for now, then, allowed in both)
    return scale if is_whole and is_same else None


def _harmless_factor(then: Launches, now: Launches) -> float | None:
    """Return the factor by which the losses of the two sides differ in all steps.

    Returns None if there is no such factor, or if the gradients are not known to be the same.
    """
    scale = _scale(now, _usual_loss(then))
    is_harmless = scale is not None and _scaled_computation(scale, then, now, "") is None
    return scale if is_harmless else None


def scaled(runs: Sequence[Run], baseline: Baseline) -> list[str]:
    """Return a sentence if a loss is a multiple of the baseline's although the gradients are equal."""
    scale = _harmless_factor(baseline.launches, from_runs(runs).launches)
    if scale is None:
        return []
    return [
        f"the loss is x {_times(scale)} in every step, but the gradients are the same: only the loss has "
        "another scale"
    ]


def _usual_loss(launches: Launches) -> list[tuple[float, float]]:
    """Return the baseline's mean loss in each tenth of the steps, and the allowed difference from it."""
    return _usual(_limited([launch.loss for launch in launches if launch.loss], LOSS_DEGREES), LOSS_DEGREES)


def _limited(curves: Sequence[Curve], degrees: int) -> Sequence[Curve]:
    """Return the curves, with each value limited to the range that follows from the other curves.

    This way, one outlying launch, or one outlying number in a launch, has only a limited effect on the
    scatter and on the mean. The method is winsorising (Tukey 1962). As with deleted residuals, the limits for
    a value are computed without the value itself. If there are only two curves, they are returned unchanged,
    because they do not show which of them is the outlier.
    """
    if len(curves) < FEWEST:
        return curves
    limited = []
    for place, curve in enumerate(curves):
        others = _usual([*curves[:place], *curves[place + 1 :]], degrees, fewest=2)
        within = (
            min(max(value, mean - allowed), mean + allowed)
            for value, (mean, allowed) in zip(curve, others, strict=False)
        )
        limited.append((*within, *curve[len(others) :]))
    return limited


def _agreeing(curves: Sequence[Curve], degrees: int) -> list[Curve]:
    """Return the curves that stay within the range that follows from the other curves."""
    limited = _limited(curves, degrees)
    return [curve for curve, within in zip(curves, limited, strict=True) if tuple(curve) == tuple(within)]


def _usual(curves: Sequence[Curve], degrees: int, fewest: int = FEWEST) -> list[tuple[float, float]]:
    """Return the mean of the curves at each place, and the difference from it that a new launch may have.

    The allowed difference is the largest of these three:

    - Student's t quantile times the spread at that place and its neighbours
    - the quantile times the median relative spread of all places, times the mean
    - `LOSS_FLOOR` times the mean, or `CANCELLED` times the largest mean

    The quantile includes the factor sqrt(1 + 1 / launches), because the mean is only estimated. With fewer
    than `fewest` curves, the allowed difference is `LOSS_FLOOR` times the mean. Each launch except the first
    adds `degrees` degrees of freedom.
    """
    count = len(curves)
    places = _by_place(curves)
    means = [fmean(values) for values in places]
    if count < fewest:
        return [(mean, _floor(mean, means)) for mean in means]
    spreads = [_deviation(values, mean) for values, mean in zip(places, means, strict=True)]
    # pragma: no mutate True: both have one entry for each place
    # pragma: no mutate 0.0 to -1.0: -1 is sorted like 0, and the floor is larger than both
    typical = median(spread / abs(mean) if mean else 0.0 for spread, mean in zip(spreads, means, strict=True))
    sigmas = t_quantile(LOSS_SIGMAS, degrees * (count - 1)) * math.sqrt(1 + 1 / count)
    return [
        (mean, max(sigmas * _near(spreads, place), sigmas * typical * abs(mean), _floor(mean, means)))
        for place, mean in enumerate(means)
    ]


def _by_place(curves: Sequence[Curve]) -> list[list[float]]:
    """Return the values of all curves at each place, up to the end of the longest curve."""
    longest = max(map(len, curves), default=0)  # pragma: no mutate 0 to -1: range(-1) is as empty as range(0)
    return [[curve[place] for curve in curves if len(curve) > place] for place in range(longest)]


def _deviation(values: Sequence[float], mean: float) -> float:
    """Return the standard deviation of a sample; 0 for a single value."""
    # `statistics.stdev` computes with fractions, which takes a hundred times as long.
    degrees = max(1, len(values) - 1)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(degrees)


def _near(spreads: Sequence[float], tenth: int) -> float:
    """Return the spread in one tenth of the steps, or the spread in its neighbourhood if that is larger.

    The spread in the neighbourhood is the root mean square of the spreads in this tenth, in the tenth before
    it and in the tenth after it.
    """
    neighbours = spreads[max(0, tenth - 1) : tenth + 2]
    return max(spreads[tenth], math.sqrt(fmean(spread * spread for spread in neighbours)))
