"""Is this case slower than its baseline? A sequential test whose unit is a whole launch.

Pure functions, data in and decision out: no clock, no disk, no random numbers. Must not import
torch, pytest, numpy or scipy: a pytest plugin imports it, and `power` runs it a million times.

One launch (fresh processes, some 50 steps) is one piece of evidence: one positive number of
seconds per step, lower is better. All arithmetic is on logarithms, so units cancel and changes
are relative. `decide` looks at the launches so far and says one of

    regressed     surely slower than the baseline, and perhaps by as much as the tolerance
    improved      the mirror image: surely faster, and perhaps by as much as the tolerance
    passed        slower by the tolerance is ruled out
    undecided     launch once more
    inconclusive  `max_launches` are used up, or more of them would hardly decide

Sources:
- The test: Wald, Sequential Analysis (1947). The mean of n launches less the mean of K baseline
  launches has variance sigma^2 (1/K + 1/n); seen against the information 1/variance it is a
  Brownian motion, so Wald's boundary holds although the baseline is itself uncertain.
- Clipped means and variances: Huber, Robust Statistics (1981).
- Sigma is estimated, so Student's t stands in for the normal: Wallace, Annals of Mathematical
  Statistics 30 (1959) 1121. The class's noise and today's spread are combined as in Smyth's
  moderated t: Statistical Applications in Genetics and Molecular Biology 3 (2004), article 3.
The constants were chosen with `power.simulate`; test_power.py holds what they achieve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perfsuite.verdict.robust import (
    SCALE_EFFICIENCY,
    clipped_variance,
    location,
    sorted_logs,
    squares,
    t_quantile,
)

Outcome = Literal["passed", "improved", "regressed", "inconclusive", "undecided"]

MAX_LAUNCHES = 15
"""With noise 1 % and tolerance 3 %, 10 would do (98 % found). 15 find a drop of twice the noise
95 times in 100 (10: 85, 20: 97). Launches of unchanged code are hardly more for it: 1.7 to 2.9."""
FEWEST_LAUNCHES = 3
"""That show a change. With two, one launch in 20 being slow would make 1 false alarm in 400."""
CONFIDENCE = 0.99  # of Decision.interval, both sides together
SIGMA_FLOOR = 0.002
"""Smallest launch-to-launch noise believed, 0.2 %. Launches made in a row share temperature,
node and file cache, so a few that agree to 0.05 % do not show that next week's will."""

_Z_INTERVAL = 2.576  # normal quantile of CONFIDENCE
_Z_CHANGE = 3.2  # regressed and improved: about 1 in 1,500 at one look, several looks are made
_WALD_PASS = 2.7  # log(1/beta) of Wald's boundary; its overshoot makes the true beta smaller
_Z_PASS_MAX = 3.0  # Wald asks for ever more where the noise is low; this is enough
_Z_LOOKS_FASTER = 1.645  # a launch this far below the baseline earns further launches
_Z_HOPELESS = 2.5  # stop where only a shift this improbable would still decide
_Z_POWER = 2.3  # 1.645 for 95 %; the rest is what clipping and unlucky passes cost (simulated)
_OWN_SPREAD = 0.9  # the case's own spread counts where this much of it exceeds its class's
_DISAGREEMENT = 0.5  # likewise for launches of today that disagree among themselves


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far launches of unchanged code scatter, and how well that is known."""

    sigma: float
    """Standard deviation of log(seconds per step) between launches of one session."""
    degrees_of_freedom: float
    session_sigma: float = 0.0
    """Standard deviation of what all launches of a session share against the baseline (drift of
    the whole machine). No number of launches in one session shows it: 0 where unknown. `noise` estimates
    it from baselines of several sessions."""

    def __post_init__(self) -> None:
        """Refuse what is not a noise. Raises ValueError naming the value."""
        for name, most in (("sigma", 1e6), ("degrees_of_freedom", 1e9)):
            if not 0 < getattr(self, name) <= most:
                raise ValueError(
                    f"noise: {name} is {getattr(self, name)!r}, expected above 0 and at most {most:g}"
                )
        if not 0 <= self.session_sigma < math.inf:
            raise ValueError(f"noise: session_sigma is {self.session_sigma!r}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the launches so far say. Changes are relative: +0.03 is 3 % more seconds per step."""

    outcome: Outcome
    estimate: float
    interval: tuple[float, float]
    """CONFIDENCE interval of the change at this look, the baseline's uncertainty included."""
    tolerance: float
    launches_used: int
    minimum_detectable_drop: float
    """See `minimum_detectable_drop`, here with the noise that this decision used."""

    @property
    def blind(self) -> bool:
        """Whether this gate would often miss a drop as large as its tolerance."""
        return self.minimum_detectable_drop > self.tolerance


def pooled_noise(groups: Sequence[Sequence[float]], *, fitted: int = 0) -> Noise:
    """Noise common to several baselines, each a group of launches' seconds per step.

    A clipped variance about each group's median: an outlying launch in five neither blinds the
    gate nor makes it trigger-happy. `fitted` counts parameters already fitted to these launches
    (the probe's exponent). Raises ValueError where too few launches are left to tell a noise.
    """
    residuals = []
    spare = -fitted
    for number, group in enumerate(groups):
        logs = sorted_logs(f"baseline {number}", group)
        residuals += squares(logs)
        spare += len(logs) - 1
    if spare < 2:
        raise ValueError(
            f"noise needs 2 launches beyond one for each baseline and fitted parameter, got {spare}"
        )
    variance = clipped_variance(residuals, spare)
    return Noise(sigma=max(math.sqrt(variance), SIGMA_FLOOR), degrees_of_freedom=SCALE_EFFICIENCY * spare)


def decide(
    baseline: Sequence[float],
    launches: Sequence[float],
    *,
    tolerance: float,
    noise: Noise,
    max_launches: int = MAX_LAUNCHES,
) -> Decision:
    """Compare today's launches with the baseline's; all are seconds per step, in one unit.

    Call it after each launch with all launches so far, until the outcome is not "undecided".
    `tolerance` is the relative slowdown that must not pass: 0.03 is 3 %. Raises ValueError.
    """
    _check_settings(tolerance, len(launches), max_launches)
    reference = sorted_logs("baseline", baseline)
    logs = sorted_logs("launches", launches)
    noise = _noise_of_case(reference, logs, noise)
    centre = location(reference, noise.sigma)
    change = location(logs, noise.sigma) - centre
    error = _error(noise, len(reference), len(logs))
    half = t_quantile(_Z_INTERVAL, noise.degrees_of_freedom) * error
    slow = math.log1p(tolerance)

    mirrored = [-x for x in reversed(logs)]
    outcome: Outcome
    if change + half >= slow and _surely_above(logs, centre, len(reference), noise):
        outcome = "regressed"
    elif change - half <= -slow and _surely_above(mirrored, -centre, len(reference), noise):
        outcome = "improved"
    elif change + _wald_margin(slow, error, noise) < slow:
        looks_faster = change < -_Z_LOOKS_FASTER * error and change - half <= -slow
        outcome = "undecided" if looks_faster and len(logs) < max_launches else "passed"
    elif len(logs) == max_launches or _hopeless(change, slow, noise, len(reference), len(logs), max_launches):
        outcome = "inconclusive"
    else:
        outcome = "undecided"
    return Decision(
        outcome=outcome,
        estimate=_relative(change),
        interval=(_relative(change - half), _relative(change + half)),
        tolerance=tolerance,
        launches_used=len(logs),
        minimum_detectable_drop=minimum_detectable_drop(
            noise=_later(noise, max_launches - len(logs)),
            baseline_launches=len(reference),
            max_launches=max_launches,
        ),
    )


def minimum_detectable_drop(
    *, noise: Noise, baseline_launches: int, max_launches: int = MAX_LAUNCHES
) -> float:
    """The smallest tolerance that this gate can hold: a drop that large is found 95 times in 100.

    In simulation 95 to 97 times with normal noise known from its class, 92 with a noise known from
    five launches alone or with heavy tails. A wider tolerance is held too (and passes smaller
    drops, as it should); a gate with a smaller one is blind, though it still finds drops of this
    size. Relative seconds per step, 0.03 is 3 %.
    """
    kept = max_launches - 1  # the slowest is set aside
    needed = t_quantile(_Z_CHANGE, noise.degrees_of_freedom) + _Z_POWER
    return _relative(needed * _error(noise, baseline_launches, kept))


def _check_settings(tolerance: float, launches: int, max_launches: int) -> None:
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is {tolerance!r}, expected a fraction above 0: 0.03 for 3 %")
    if max_launches < FEWEST_LAUNCHES:
        raise ValueError(
            f"max_launches is {max_launches}, expected {FEWEST_LAUNCHES} or more: "
            "fewer launches never show a regression"
        )
    if launches > max_launches:
        raise ValueError(f"{launches} launches, more than max_launches {max_launches}")


def _relative(logarithm: float) -> float:
    return math.expm1(logarithm) if logarithm < 700 else math.inf


def _noise_of_case(reference: list[float], logs: list[float], noise: Noise) -> Noise:
    """The class's noise with what this case's own launches say, today's and the baseline's."""
    today = squares(logs)
    degrees = SCALE_EFFICIENCY * (len(logs) - 1)
    variance = clipped_variance(today, degrees, noise.sigma**2, noise.degrees_of_freedom)
    own = clipped_variance(today + squares(reference), len(logs) + len(reference) - 2)
    sigma = max(math.sqrt(variance), _OWN_SPREAD * math.sqrt(own), SIGMA_FLOOR)
    return _later(replace(noise, sigma=sigma), len(logs) - 1)


def _later(noise: Noise, launches: int) -> Noise:
    """The same noise, known better by some launches more."""
    degrees = noise.degrees_of_freedom + SCALE_EFFICIENCY * launches
    return replace(noise, degrees_of_freedom=degrees)


def _error(noise: Noise, baseline_launches: int, launches: int) -> float:
    """Standard error of the change, in logarithms."""
    between = noise.sigma**2 * (1 / baseline_launches + 1 / launches)
    return math.sqrt(between + noise.session_sigma**2)


def _surely_above(logs: list[float], centre: float, baseline_launches: int, noise: Noise) -> bool:
    """Whether the launches lie above the baseline's centre even without the highest of them."""
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
    """How far below the tolerance a change must lie to pass.

    Wald accepts "no change" when (slow * change - slow^2 / 2) / error^2 <= -_WALD_PASS, which is
    change + z * error <= slow with the z below.
    """
    z = slow / (2 * error) + _WALD_PASS * error / slow
    return t_quantile(min(z, _Z_PASS_MAX), noise.degrees_of_freedom) * error


def _hopeless(
    change: float, slow: float, noise: Noise, baseline_launches: int, launches: int, most: int
) -> bool:
    """Whether all launches still allowed would, nearly surely, leave the question open."""
    if launches < FEWEST_LAUNCHES:
        return False
    final = _later(noise, most - launches)
    error = _error(final, baseline_launches, most)
    shift = _Z_HOPELESS * noise.sigma * math.sqrt(1 / launches - 1 / most)
    regresses = change + shift > t_quantile(_Z_CHANGE, final.degrees_of_freedom) * error
    passes = change - shift + _wald_margin(slow, error, final) < slow
    return not (regresses or passes)
