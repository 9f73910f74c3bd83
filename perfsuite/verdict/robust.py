"""Robust estimates, on which one outlying launch has little effect, and quantiles of Student's t.

Location and scale are estimated from logarithms of seconds. Clipping follows Huber, Robust Statistics (1981).
The location is a one-step estimate that starts at the median. Student's t follows Wallace, Annals of
Mathematical Statistics 30 (1959) 1121.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, median

Z_99 = round(NormalDist().inv_cdf(0.995), 3)
"""Half width of a two-sided 99% interval of a normal distribution, in standard errors: 2.576. It is rounded
to three digits, because all published tables were simulated with this value."""
Z_95_ONE_SIDED = round(NormalDist().inv_cdf(0.95), 3)  # one-sided 95% quantile of a normal distribution
LOCATION_CLIP = 2.0  # in sigmas; for normal data, 99% as efficient as the mean
SCALE_CLIP = 1.5  # in sigmas; tolerates one outlier among five launches
SCALE_EFFICIENCY = 0.8  # efficiency of the clipped variance relative to the plain variance, by simulation
_SCALE_CLIPPED_SQUARE = 0.7784655  # E[min(z^2, SCALE_CLIP^2)] of a standard normal z


def sorted_logs(seconds: Sequence[float]) -> list[float]:
    """Return the logarithms in ascending order. There must be at least one value; all must be positive."""
    return sorted(map(math.log, seconds))


def location(logs: list[float], sigma: float) -> float:
    """Return the mean of sorted values, each clipped to within `LOCATION_CLIP` sigmas of their median."""
    centre = median(logs)
    low = centre - LOCATION_CLIP * sigma
    high = centre + LOCATION_CLIP * sigma
    # pragma: no mutate <: at the bound, both values are the bound
    # pragma: no mutate >: at the bound, both values are the bound
    return sum([low if x < low else high if x > high else x for x in logs]) / len(logs)


def squares(logs: list[float]) -> list[float]:
    """Return the squared distance of each value from the median. The values must be sorted."""
    centre = median(logs)
    return [(x - centre) ** 2 for x in logs]


def clipped_variance(
    squares: list[float], degrees: float, prior: float = 0.0, prior_degrees: float = 0.0
) -> float:
    """Estimate a variance from clipped squared residuals, averaged with a prior variance.

    Residuals are clipped at `SCALE_CLIP` sigmas. `degrees` and `prior_degrees` are degrees of freedom, used
    as weights; if both are 0, the result is 0. The iteration starts at the plain variance and falls to the
    largest fixed point. Therefore, if there are as many outliers as good launches, the variance is large: the
    outliers count as noise.
    """
    weight = degrees + prior_degrees
    if not weight:
        return 0.0
    variance = (prior_degrees * prior + sum(squares)) / weight
    # With one outlier in five, two rounds halve the distance of the variance from its final value.
    # pragma: no mutate 100: the iteration ends long before
    for _ in range(100):
        top = SCALE_CLIP**2 * variance
        # pragma: no mutate <: at the bound, both values are the bound
        clipped = sum([q if q < top else top for q in squares]) / _SCALE_CLIPPED_SQUARE
        lower = (prior_degrees * prior + clipped) / weight
        if lower >= 0.999 * variance:
            break
        variance = lower
    return variance


def t_quantile(z: float, degrees: float) -> float:
    """Return the quantile of Student's t at the tail probability of the normal quantile `z`.

    This is Wallace's formula, solved for t. For z up to 3.2 and at least 6 degrees of freedom, the result is
    within 1.2% of the exact value. With fewer degrees of freedom, the result is too large (by 8% at 3 and 28%
    at 2), which causes fewer false alarms.
    """
    exponent = (z * (8 * degrees + 3) / (8 * degrees + 1)) ** 2 / degrees
    # pragma: no mutate < 700: floats end at 709
    return math.sqrt(degrees * math.expm1(exponent)) if exponent < 700 else math.inf


def relative(logarithm: float) -> float:
    """Convert a difference of logarithms to a relative change; infinite if it overflows."""
    # pragma: no mutate < 700: floats end at 709
    return math.expm1(logarithm) if logarithm < 700 else math.inf
