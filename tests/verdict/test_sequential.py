import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.verdict.sequential import (
    MAX_LAUNCHES,
    SIGMA_FLOOR,
    Z_FUTILE,
    Decision,
    Noise,
    can_pass,
    decide,
    minimum_detectable_drop,
    pooled_noise,
    smallest_tolerance,
)

NOISE = Noise(sigma=0.01, degrees_of_freedom=30)
QUIET, HALF_LOUD, LOUD = (Noise(sigma=sigma, degrees_of_freedom=30) for sigma in (0.002, 0.05, 0.1))
DRIFTING = Noise(sigma=0.01, degrees_of_freedom=30, session_sigma=0.01)
BASELINE = [0.991, 1.012, 0.997, 1.004, 0.985, 1.008, 1.001, 0.994, 1.003, 1.006]
TIGHT = [1 + (s - 1) / 10 for s in BASELINE]
UNCHANGED = [1.004, 0.993, 1.009, 0.998, 1.001, 1.012, 0.99, 1.003, 0.996, 1.0, 1.007, 0.995]

seconds = st.floats(-0.04, 0.04).map(math.exp)
baselines = st.lists(seconds, min_size=3, max_size=20)
some_launches = st.lists(seconds, min_size=1, max_size=MAX_LAUNCHES)


def judge(
    launches: Sequence[float],
    baseline: Sequence[float] = BASELINE,
    tolerance: float = 0.03,
    noise: Noise = NOISE,
    max_launches: int = MAX_LAUNCHES,
) -> Decision:
    return decide(baseline, launches, tolerance=tolerance, noise=noise, max_launches=max_launches)


def session(available: Sequence[float], baseline: Sequence[float] = BASELINE) -> Decision:
    """Judge one launch after the other until a decision is reached."""
    for used in range(1, len(available) + 1):
        decision = judge(available[:used], baseline)
        if decision.outcome != "undecided":
            return decision
    return decision


@given(baselines, some_launches, st.floats(1e-6, 1e6), st.randoms())
def test_outcome_matches_its_interval_in_any_unit(
    baseline: list[float], launches: list[float], unit: float, random: Random
) -> None:
    here = judge(launches, baseline)
    lower, upper = here.interval
    assert lower < here.estimate < upper
    assert here.outcome != "regressed" or (lower > 0 and upper >= 0.03)
    assert here.outcome != "improved" or upper < 0
    there = judge([unit * s for s in launches], [unit * s for s in baseline])
    assert there.outcome == here.outcome
    assert there.estimate == pytest.approx(here.estimate, abs=1e-9)
    assert there.interval == pytest.approx(here.interval, abs=1e-9)
    random.shuffle(baseline)
    random.shuffle(launches)
    assert judge(launches, baseline) == here


@given(baselines, some_launches, st.floats(0, 0.2), st.floats(0.001, 0.2))
def test_larger_drop_is_never_judged_milder(
    baseline: list[float], launches: list[float], drop: float, further: float
) -> None:
    """This is true if the launches scatter no more than their class.

    If they scatter more, a repeated "outlier" can instead be a second mode of the launches.
    """
    small = judge([s * (1 + drop) for s in launches], baseline)
    large = judge([s * (1 + drop) * (1 + further) for s in launches], baseline)
    assert large.estimate > small.estimate
    assert small.outcome != "regressed" or large.outcome == "regressed"
    assert large.outcome not in ("passed", "improved") or small.outcome != "regressed"
    wide = Noise(sigma=0.04, degrees_of_freedom=30)
    one, two = (judge(launches, baseline * times, noise=wide).interval for times in (1, 2))
    assert (1 + two[1]) / (1 + two[0]) < (1 + one[1]) / (1 + one[0])


@given(st.floats(1.0, 1e9), st.integers(0, MAX_LAUNCHES - 1), st.integers(1, MAX_LAUNCHES))
def test_one_slow_launch_never_regresses(slow: float, place: int, launches: int) -> None:
    today = [*UNCHANGED, *UNCHANGED][:launches]
    today[place % launches] *= slow
    assert judge(today).outcome != "regressed"
    today[place % launches] /= slow**2
    assert judge(today).outcome != "improved"


@pytest.mark.parametrize(("slow", "place"), [*itertools.product((1.05, 1.1, 2.0, 100.0), (0, 1, 2))])
def test_one_slow_launch_is_harmless(slow: float, place: int) -> None:
    today = [s * slow if at == place else s for at, s in enumerate(UNCHANGED)]
    assert session(today).outcome == "passed"


@pytest.mark.parametrize(("bad", "count"), [*itertools.product((0.5, 0.9, 1.1, 2.0, 100.0), (5, 10))])
def test_one_bad_launch_of_a_baseline_is_harmless(bad: float, count: int) -> None:
    spoilt = [*BASELINE[: count - 1], bad]
    assert session(UNCHANGED, spoilt).outcome == "passed"
    assert session([1.05 * s for s in UNCHANGED], spoilt).outcome == "regressed"


@pytest.mark.parametrize(
    ("today", "settings", "outcome"),
    [
        *(([many, many], {}, "undecided") for many in (1e6, 1e-6)),  # two launches are never enough
        ([1.1, 1.11, 1.0], {}, "undecided"),  # two of three launches are bad
        ([1.05, 1.14, 1.02, 1.3], {}, "undecided"),  # the launches disagree
        ([1.03, 1.19, 1.24], {}, "undecided"),
        ([1.51, 1.49, 1.5, 1.53], {"noise": HALF_LOUD}, "regressed"),  # a drop larger than the noise
        ([1.012, 1.02, 1.016], {}, "undecided"),
        ([1.012, 1.02, 1.016], {"max_launches": 3}, "inconclusive"),
        ([1.02], {"noise": QUIET, "baseline": TIGHT}, "passed"),  # clearly within the tolerance
        # If the estimate is more than 1.645 standard errors (1.7% here) below the baseline, the code might be
        # faster, so another launch follows.
        ([0.995], {}, "passed"),
        *(([0.98], {"max_launches": most}, "undecided") for most in (MAX_LAUNCHES, 3)),
        ([0.98, 0.982, 0.981], {"max_launches": 3}, "passed"),  # the last launch looked faster
        ([0.99, 0.985], {"noise": QUIET, "baseline": TIGHT}, "passed"),  # it is certainly less than 3% faster
        ([1.0] * 3, {"tolerance": 0.999, "max_launches": 3}, "passed"),  # an extreme tolerance is allowed
    ],
)
def test_launches_decide_when_they_suffice(
    today: list[float], settings: dict[str, Any], outcome: str
) -> None:
    assert judge(today, **settings).outcome == outcome


def test_too_noisy_stops_early() -> None:
    decision = judge([1.03, 1.01, 1.02, 1.0, 1.04, 1.02], noise=LOUD)
    assert (decision.outcome, decision.blind) == ("inconclusive", True)
    assert decision.launches_used < MAX_LAUNCHES


def test_stops_if_a_decision_is_unlikely() -> None:
    launches = [1.025, 1.026, 1.027]
    assert decide(BASELINE, launches, tolerance=0.03, noise=DRIFTING).outcome == "undecided"
    stopped = decide(BASELINE, launches, tolerance=0.03, noise=DRIFTING, z_hopeless=Z_FUTILE)
    assert stopped.outcome == "inconclusive"


def test_blind_below_the_minimum_detectable_drop() -> None:
    minimum = judge(UNCHANGED[:3]).minimum_detectable_drop
    assert not judge(UNCHANGED[:3], tolerance=minimum).blind
    assert judge(UNCHANGED[:3], tolerance=minimum - 1e-6).blind


@pytest.mark.parametrize(("session_sigma", "passes"), [(0.0, True), (0.01, True), (0.03, False)])
def test_a_noise_between_sessions_can_hide_everything(session_sigma: float, passes: bool) -> None:
    noise = Noise(sigma=0.003, degrees_of_freedom=30, session_sigma=session_sigma)
    assert can_pass(tolerance=0.03, noise=noise, baseline_launches=10, max_launches=15) is passes
    assert (judge([1.0] * 15, [1.0] * 10, noise=noise).outcome == "passed") is passes


def test_unknown_noise_gives_a_wide_interval() -> None:
    decision = judge([1.0], noise=Noise(sigma=0.01, degrees_of_freedom=0.1))
    assert decision.outcome == "undecided"
    assert decision.interval == (-1.0, math.inf)


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        *(({"baseline_launches": 5}, 1), ({"max_launches": 6}, 1)),
        ({"noise": Noise(sigma=0.02, degrees_of_freedom=30)}, 1.9),
        ({"noise": Noise(sigma=0.01, degrees_of_freedom=4)}, 1.5),
    ],
    ids=["fewer in the baseline", "fewer launches", "more noise", "fewer degrees"],
)
def test_detectable_drop_follows_noise_and_launches(changes: dict[str, Any], times: float) -> None:
    usual: dict[str, Any] = {"noise": NOISE, "baseline_launches": 10}
    assert minimum_detectable_drop(**{**usual, **changes}) > times * minimum_detectable_drop(**usual)


def test_detectable_drop_is_below_the_tolerance() -> None:
    usual: dict[str, Any] = {"noise": NOISE, "baseline_launches": 10}
    assert 0.02 < minimum_detectable_drop(**usual) < 0.03


@pytest.mark.parametrize("bad", [0.0, -0.03, 1.0, 3.0, math.nan])
def test_a_tolerance_out_of_range_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=f"tolerance is {bad}, expected a fraction between 0 and 1"):
        judge([1.0], tolerance=bad)


@pytest.mark.parametrize(
    ("groups", "fitted"), [([[1.0, 1.1, 0.9]], 0), ([[1.0, 1.1, 0.9, 1.05]], 1)], ids=["three", "four"]
)
def test_fitted_parameters_cost_degrees_of_freedom(groups: list[list[float]], fitted: int) -> None:
    assert pooled_noise(groups, fitted=fitted).degrees_of_freedom == pytest.approx(1.6)


@pytest.mark.parametrize(("groups", "left"), [([[1.0, 1.1], [1.0]], 1), ([], 0)], ids=["two and one", "none"])
def test_too_few_launches_have_no_noise(groups: list[list[float]], left: int) -> None:
    with pytest.raises(ValueError, match=f"noise needs 2 degrees of freedom .* got {left}"):
        pooled_noise(groups)


def test_noise_has_a_floor() -> None:
    assert pooled_noise([[1.0] * 5]).sigma == SIGMA_FLOOR
    assert judge([1.0] * 5, [1.0] * 5).interval[1] > 0.001


@pytest.mark.parametrize("outlier", [1.1, 2.0, 1000.0, 0.1])
def test_noise_resists_an_outlier(outlier: float) -> None:
    clean = pooled_noise([BASELINE[:5]]).sigma
    assert clean / 1.5 < pooled_noise([[*BASELINE[:4], outlier]]).sigma < 2 * clean


# The numbers below are fixed because the simulated tables were made with them. If they change, all verdicts
# change.


def edge(outcome: str, launches: int, far: float, **settings: Any) -> float:
    """Return the shift of the launches, a logarithm from 0 to `far`, at which `outcome` begins or ends."""

    def has(shift: float) -> bool:
        today = [*UNCHANGED, *UNCHANGED][:launches]
        return judge([s * math.exp(shift) for s in today], **settings).outcome == outcome

    near = 0.0
    at_first = has(near)
    assert has(far) != at_first
    for _ in range(40):
        between = (near + far) / 2
        near, far = (between, far) if has(between) == at_first else (near, between)
    return near


@pytest.mark.parametrize(
    ("outcome", "launches", "far", "settings", "expected"),
    [
        ("passed", 2, 0.06, {}, 0.0095446),
        ("passed", 5, 0.06, {}, 0.0113534),
        ("passed", 2, -0.2, {}, -0.0111169),
        ("passed", 15, -0.2, {}, -0.020058),
        ("passed", 1, 0.06, {"noise": QUIET, "baseline": TIGHT}, 0.0187154),
        ("regressed", 3, 0.2, {}, 0.0287116),
        ("regressed", 5, 0.2, {}, 0.0211963),
        ("regressed", 15, 0.2, {}, 0.0183717),
        ("regressed", 4, 0.2, {"noise": DRIFTING}, 0.0434826),  # the noise between sessions counts
        ("improved", 3, -0.2, {}, -0.0335334),
        ("improved", 8, -0.2, {}, -0.0194786),
        ("inconclusive", 6, 0.5, {"noise": LOUD}, 0.0546661),
        ("inconclusive", 6, -0.5, {"noise": LOUD}, -0.0213828),
    ],
)
def test_outcomes_change_where_they_did(
    outcome: str, launches: int, far: float, settings: dict[str, Any], expected: float
) -> None:
    assert edge(outcome, launches, far, **settings) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("launches", "settings", "expected"),
    [
        (UNCHANGED[:1], {}, (0.0039308, -0.0246161, 0.0333133, 0.0240202)),
        (UNCHANGED[:3], {}, (0.0019086, -0.0159686, 0.0201107, 0.0239665)),
        ([s / 1.05 for s in UNCHANGED[:3]], {}, (-0.0458013, -0.0628273, -0.028466, 0.0239665)),
        (UNCHANGED, {}, (0.0005774, -0.0103662, 0.011642, 0.0227602)),
        ([1.05, 1.14, 1.02, 1.3], {}, (0.0939996, 0.0488631, 0.1410785, 0.0637155)),
        (
            UNCHANGED[:4],
            {"noise": Noise(sigma=0.002, degrees_of_freedom=4)},
            (0.0006765, -0.0150443, 0.0166481, 0.0191405),
        ),
        (
            UNCHANGED[:2],
            {"noise": Noise(sigma=0.02, degrees_of_freedom=8, session_sigma=0.01), "max_launches": 6},
            (-0.0015839, -0.0585915, 0.0588758, 0.0981955),
        ),
        (  # this case is noisier than its class, so its own noise is used
            UNCHANGED[:5],
            {"baseline": [s**3 for s in BASELINE]},
            (-0.0006691, -0.0278573, 0.0272795, 0.0447136),
        ),
    ],
)
def test_figures_of_a_decision_are_what_they_were(
    launches: list[float], settings: dict[str, Any], expected: tuple[float, ...]
) -> None:
    decision = judge(launches, **settings)
    figures = (decision.estimate, *decision.interval, decision.minimum_detectable_drop)
    assert figures == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("baselines", "sigma", "degrees"),
    [
        ([BASELINE], 0.00856365, 7.2),
        # Differences between baselines are not noise.
        ([BASELINE[:5], [2 * s for s in BASELINE[5:]]], 0.00846973, 6.4),
        ([[*BASELINE[:4], 1.5]], 0.01808546, 3.2),
    ],
    ids=["one", "two levels", "an outlier"],
)
def test_pooled_noise_stays_as_it_was(baselines: list[list[float]], sigma: float, degrees: float) -> None:
    noise = pooled_noise(baselines)
    assert noise.sigma == pytest.approx(sigma, abs=1e-7)
    assert noise.degrees_of_freedom == pytest.approx(degrees)


def test_more_errors_away_need_a_larger_tolerance() -> None:
    certain = Noise(sigma=0.01, degrees_of_freedom=1e6)

    def tolerance(z: float, noise: Noise = certain) -> float:
        return smallest_tolerance(noise=noise, baseline_launches=8, launches=8, z=z)

    assert tolerance(3.0) == pytest.approx(math.expm1(0.005 * (3.0 + 2.576)), rel=1e-3)
    assert tolerance(2.0) < tolerance(3.0) < tolerance(3.0, replace(certain, degrees_of_freedom=5))
