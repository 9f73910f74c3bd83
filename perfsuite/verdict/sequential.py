"""Decide whether a case is slower than its baseline, with a sequential test on whole launches. Pure.

A launch is one observation: its seconds per step (lower is better). All arithmetic is on logarithms, so
changes are relative. `decide` judges the launches so far and returns one of

    regressed     significantly slower than the baseline, possibly by the tolerance or more
    improved      significantly faster than the baseline, possibly by the tolerance or more
    passed        a slowdown by the tolerance is excluded
    undecided     launch once more
    inconclusive  `max_launches` are used up, or further launches are unlikely to decide

The test follows Wald, Sequential Analysis (1947). The mean of n launches minus the mean of K baseline
launches has variance sigma^2 (1/K + 1/n). As a function of 1/variance, this difference is a Brownian motion,
so Wald's boundary holds although the baseline is uncertain. Sigma is estimated, so Student's t replaces the
normal. The noise of the class and of today's launches are combined as in Smyth's moderated t (Statistical
Applications in Genetics and Molecular Biology 3, 2004, article 3). The constants were chosen by simulation:
tests/verdict/test_simulated_gate.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

from perfsuite.verdict.robust import (
    SCALE_EFFICIENCY,
    Z_95_ONE_SIDED,
    Z_99,
    clipped_variance,
    location,
    relative,
    sorted_logs,
    squares,
    t_quantile,
)
from perfsuite.verdict.variance import Component

Outcome = Literal["passed", "improved", "regressed", "inconclusive", "undecided"]

MAX_LAUNCHES = 15
"""Maximum number of launches of a case in a session. With a noise of 1% and a tolerance of 3%, 10 would be
enough: a drop of 3% is then detected 98 times in 100. A drop of twice the noise is detected 95 times in 100
with 15 launches, 85 times with 10, and 97 times with 20. If the code is unchanged, a maximum of 15 hardly
costs extra launches: a case takes 1.7 to 2.9 on average."""
# Minimum number of launches for reporting a change. If it were 2, and 1 launch in 20 were slow, 1 session in
# 400 would be a false alarm.
FEWEST_LAUNCHES = 3
SIGMA_FLOOR = 0.002
"""Lower limit of the noise between launches, 0.2%. Consecutive launches share temperature, node and file
cache. If a few of them agree to 0.05%, that does not mean that next week's launches will agree as closely."""

# Thresholds in standard errors. Those without a formula were tuned by simulation.

# A single one-sided test with this threshold gives 1 false alarm in 1,500. The threshold is so strict because
# the test is repeated after each launch.
_Z_CHANGE = 3.2  # regressed, improved
_WALD_PASS = 2.7  # log(1/beta) of Wald's boundary; the overshoot makes the true beta smaller
_Z_PASS_MAX = 3.0  # upper limit of Wald's boundary, which would grow without bound as the noise falls
_Z_LOOKS_FASTER = Z_95_ONE_SIDED  # a passing case is launched again if it is faster by more than this
Z_HOPELESS = 2.5  # stop if a decision would need a shift of the mean by more than this
Z_FUTILE = round(NormalDist().inv_cdf(0.9), 3)
"""Replaces `Z_HOPELESS` in a comparison with a reference. Launches stop if the chance of a decision is below
10% (conditional power: Lachin, Statistics in Medicine 24, 2005, 2747). The saved launches pay for the
launches with the reference."""
_Z_POWER = 2.3  # 1.645 for a power of 95%, the rest for clipping and early passes
OWN_SPREAD = 0.9  # minimum noise of a case, as a share of the standard deviation of its own launches
# Minimum noise in `_surely_above`, as a share of the standard deviation of today's launches without the
# slowest one.
_DISAGREEMENT = 0.5


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The standard deviation between launches of unchanged code, and how reliably it is known."""

    sigma: float  # standard deviation of log(seconds per step) between launches of one session
    degrees_of_freedom: float  # degrees of freedom of `sigma`; not necessarily an integer
    # The whole machine drifts between sessions. This shifts all launches of a session against the baseline by
    # the same amount. `session_sigma` is the standard deviation of this shift, in log(seconds per step); 0 if
    # unknown. The launches of one session cannot show it: `verdict.noise` estimates it from baselines of
    # several sessions.
    session_sigma: float = 0.0
    # Variance of the shift that all cases of a session have in common; None: unknown.
    of_session: Component | None = None
    # Variance of the additional shift that a single case has in a session, in log(seconds per step); None:
    # unknown.
    of_case: Component | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome after the launches so far. Changes are relative: +0.03 is 3% more seconds per step."""

    outcome: Outcome
    estimate: float  # estimated change
    interval: tuple[float, float]  # 99% interval of the change, including the baseline's uncertainty
    tolerance: float
    launches_used: int
    minimum_detectable_drop: float  # what the function of this name returns for the decision's noise

    @property
    def blind(self) -> bool:
        """Whether the gate misses more than 5 of 100 drops that are as large as its tolerance."""
        return self.minimum_detectable_drop > self.tolerance


def pooled_noise(groups: Sequence[Sequence[float]], *, fitted: int = 0) -> Noise:
    """Estimate the noise that several baselines have in common. Each group has a baseline's seconds per step.

    The variance is computed from the deviations from each group's median. These are clipped, so that one
    outlier among five launches has little effect. `fitted` is the number of parameters already fitted to
    these launches (1 for the probe's exponent). Raises ValueError with fewer than 2 degrees of freedom
    (launches - groups - fitted).
    """
    residuals = [square for group in groups for square in squares(sorted_logs(group))]
    degrees = len(residuals) - len(groups) - fitted
    if degrees < 2:
        raise ValueError(f"noise needs 2 degrees of freedom (launches - groups - fitted), got {degrees}")
    variance = clipped_variance(residuals, degrees)
    return Noise(sigma=max(math.sqrt(variance), SIGMA_FLOOR), degrees_of_freedom=SCALE_EFFICIENCY * degrees)


def decide(
    baseline: Sequence[float],
    launches: Sequence[float],
    *,
    tolerance: float,
    noise: Noise,
    max_launches: int = MAX_LAUNCHES,
    z_hopeless: float = Z_HOPELESS,
) -> Decision:
    """Compare today's launches with the baseline's. All are seconds per step, in the same unit.

    Call this after each launch with all launches so far, until the outcome is not "undecided". `tolerance` is
    the largest relative slowdown that passes: 0.03 is 3%. Launches stop if a decision would need a shift of
    the mean by more than `z_hopeless` standard errors. Raises ValueError if the tolerance is out of
    range.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is {tolerance!r}, expected a fraction between 0 and 1: 0.03 for 3%")
    reference = sorted_logs(baseline)
    logs = sorted_logs(launches)
    noise = _noise_of_case(reference, logs, noise)
    centre = location(reference, noise.sigma)
    change = location(logs, noise.sigma) - centre
    error = _error(noise, len(reference), len(logs))
    half = t_quantile(Z_99, noise.degrees_of_freedom) * error
    slow = math.log1p(tolerance)

    mirrored = [-x for x in reversed(logs)]
    outcome: Outcome = "undecided"
    # pragma: no mutate >=: no estimate is exactly the bound
    if change + half >= slow and _surely_above(logs, centre, len(reference), noise):
        outcome = "regressed"
    # pragma: no mutate <=: no estimate is exactly the bound
    elif change - half <= -slow and _surely_above(mirrored, -centre, len(reference), noise):
        outcome = "improved"
    elif change + _wald_margin(slow, error, noise) < slow:
        # pragma: no mutate change <: no estimate is exactly the bound
        # pragma: no mutate <=: no estimate is exactly the bound
        looks_faster = change < -_Z_LOOKS_FASTER * error and change - half <= -slow
        outcome = "undecided" if looks_faster and len(logs) < max_launches else "passed"
    elif len(logs) == max_launches or _hopeless(
        change, slow, noise, len(reference), len(logs), max_launches, z_hopeless
    ):
        outcome = "inconclusive"
    final = _later(noise, max_launches - len(logs))
    minimum = minimum_detectable_drop(
        noise=final, baseline_launches=len(reference), max_launches=max_launches
    )
    return Decision(
        outcome=outcome,
        estimate=relative(change),
        interval=(relative(change - half), relative(change + half)),
        tolerance=tolerance,
        launches_used=len(logs),
        minimum_detectable_drop=minimum,
    )


def minimum_detectable_drop(
    *, noise: Noise, baseline_launches: int, max_launches: int = MAX_LAUNCHES
) -> float:
    """Return the smallest relative slowdown that the gate detects 95 times in 100: 0.03 is 3%.

    In simulations, this slowdown is detected 95 to 97 times in 100 if the noise is normal and known from the
    hardware class. It is detected 92 times in 100 if the noise is known from only five launches or has heavy
    tails. A gate whose tolerance is below this value is called blind: it misses drops as large as its
    tolerance.
    """
    kept = max_launches - 1  # `_surely_above` leaves out the slowest launch
    needed = t_quantile(_Z_CHANGE, noise.degrees_of_freedom) + _Z_POWER
    return relative(needed * _error(noise, baseline_launches, kept))


def smallest_tolerance(*, noise: Noise, baseline_launches: int, launches: int, z: float) -> float:
    """Return the smallest tolerance at which an unchanged case is `regressed` only rarely.

    With this tolerance, an unchanged case is `regressed` only if its estimated change is at least `z`
    standard errors. `z` is a quantile of the normal distribution. As in the sequential test, it is converted
    to the corresponding quantile of Student's t.
    """
    errors = t_quantile(z, noise.degrees_of_freedom) + t_quantile(Z_99, noise.degrees_of_freedom)
    return relative(errors * _error(noise, baseline_launches, launches))


def can_pass(*, tolerance: float, noise: Noise, baseline_launches: int, max_launches: int) -> bool:
    """Return whether a case passes if its launches are exactly as fast as the baseline's."""
    slow = math.log1p(tolerance)
    final = _later(noise, max_launches - 1)
    return _wald_margin(slow, _error(noise, baseline_launches, max_launches), final) < slow


def _noise_of_case(reference: list[float], logs: list[float], noise: Noise) -> Noise:
    """Average the noise of the hardware class and of the case, weighted by their degrees of freedom.

    The result is at least `OWN_SPREAD` times the standard deviation of the case's own launches.
    """
    today = squares(logs)
    degrees = SCALE_EFFICIENCY * (len(logs) - 1)
    variance = clipped_variance(today, degrees, noise.sigma**2, noise.degrees_of_freedom)
    own = clipped_variance(today + squares(reference), len(logs) + len(reference) - 2)
    sigma = max(math.sqrt(variance), OWN_SPREAD * math.sqrt(own), SIGMA_FLOOR)
    return _later(replace(noise, sigma=sigma), len(logs) - 1)


def _later(noise: Noise, launches: int) -> Noise:
    return replace(noise, degrees_of_freedom=noise.degrees_of_freedom + SCALE_EFFICIENCY * launches)


def _error(noise: Noise, baseline_launches: int, launches: int) -> float:
    between = noise.sigma**2 * (1 / baseline_launches + 1 / launches)
    return math.sqrt(between + noise.session_sigma**2)


def _surely_above(logs: list[float], centre: float, baseline_launches: int, noise: Noise) -> bool:
    """Return whether the launches are significantly above the centre even without the slowest one.

    A single slow launch is never a regression.
    """
    if len(logs) < FEWEST_LAUNCHES:
        return False
    kept = logs[:-1]
    mean = sum(kept) / len(kept)
    spread = math.sqrt(sum([(x - mean) ** 2 for x in kept]) / (len(kept) - 1))
    wide = replace(noise, sigma=max(noise.sigma, _DISAGREEMENT * spread))
    error = _error(wide, baseline_launches, len(kept))
    margin = t_quantile(_Z_CHANGE, noise.degrees_of_freedom) * error
    return location(kept, noise.sigma) - centre > margin


def _wald_margin(slow: float, error: float, noise: Noise) -> float:
    """Return how far below the tolerance a change must be to pass, in logarithms: z * error of Wald's test.

    Wald accepts "no change" if (slow * change - slow^2 / 2) / error^2 <= -_WALD_PASS. This corresponds to
    z = slow / (2 error) + _WALD_PASS error / slow.
    """
    z = slow / (2 * error) + _WALD_PASS * error / slow
    return t_quantile(min(z, _Z_PASS_MAX), noise.degrees_of_freedom) * error


def _hopeless(
    change: float, slow: float, noise: Noise, baseline_launches: int, launches: int, most: int, z: float
) -> bool:
    """Return whether launching up to a total of `most` launches is unlikely to lead to a decision.

    It is unlikely if a decision would need a shift of the mean by more than `z` standard errors.
    """
    if launches < FEWEST_LAUNCHES:
        return False
    final = _later(noise, most - launches)
    error = _error(final, baseline_launches, most)
    shift = z * noise.sigma * math.sqrt(1 / launches - 1 / most)
    # pragma: no mutate >: no estimate is exactly the bound
    regresses = change + shift > t_quantile(_Z_CHANGE, final.degrees_of_freedom) * error
    # pragma: no mutate <: no estimate is exactly the bound
    passes = change - shift + _wald_margin(slow, error, final) < slow
    return not (regresses or passes)
