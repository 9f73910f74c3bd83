"""Test each part of a paired comparison, and properties that hold for any pairs.

test_simulated_pairs.py tests how often decisions are wrong.
"""

import math
from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.verdict import paired_comparison
from perfsuite.verdict.paired_comparison import (
    MAX_PAIRS,
    MIN_CHANGED,
    MIN_PAIRS,
    PairedDecision,
    decided,
    minimum_detectable_difference,
    order,
    pair_differences,
)
from tests.samples import deterministic

A = [1.004, 0.993, 1.009, 0.998, 1.001, 1.012, 0.99, 1.003, 0.996, 1.0, 1.007, 0.995]
B = [1.001, 0.998, 1.004, 1.003, 0.996, 1.007, 0.996, 1.0, 1.001, 0.994, 1.003, 1.0]
OPPOSITE = {"regressed": "improved", "improved": "regressed"}

costs = st.floats(-0.05, 0.05).map(math.exp)
some_pairs = st.lists(st.tuples(costs, costs), min_size=1, max_size=MAX_PAIRS)


def look(
    a: Sequence[float],
    b: Sequence[float],
    *,
    tolerance: float = 0.03,
    max_pairs: int = MAX_PAIRS,
    probes: tuple[Sequence[float], Sequence[float]] | None = None,
) -> PairedDecision:
    """Judge all pairs together. Earlier decisions, after fewer pairs, are not considered."""
    probe = None if probes is None else pair_differences(*probes)
    return paired_comparison._look(pair_differences(a, b), probe, tolerance, max_pairs)


@pytest.mark.parametrize(("missing", "enough", "too_few"), [(0, 5, 4), (1, 8, 7), (2, 10, 9), (3, 12, 11)])
def test_more_missing_changes_need_more_pairs(missing: int, enough: int, too_few: int) -> None:
    for pairs in (enough, too_few):
        toward = [0.003] * missing + [0.01] * (pairs - missing)
        assert paired_comparison._is_shown_by_all(toward, 0.01) == (pairs == enough)


def test_three_pairs_pass_and_five_show_a_change() -> None:
    assert [look([1.0] * pairs, [1.0] * pairs).outcome for pairs in (2, 3)] == ["undecided", "passed"]
    assert [look([1.0] * pairs, [2.0] * pairs).outcome for pairs in (4, 5)] == ["undecided", "regressed"]
    assert decided(A[:2], B[:2], tolerance=0.03) == look(A[:2], B[:2]), (
        "an undecided comparison returns its last look"
    )


def test_change_must_survive_without_its_best_pair() -> None:
    """Even without the best pair, the change must be at least 2.6 standard errors.

    In this test, a fitted exponent doubles the noise of the four other pairs.
    """
    noise = {"sigma": 0.01, "error": 2.0, "degrees": 1e9, "z": 2.6}
    seen = paired_comparison._Evidence(ordered=[], change=0.0, **noise)
    sure = [paired_comparison._without_the_most([change] * 4 + [9.0], seen) for change in (0.025, 0.027)]
    assert sure == [False, True]
    # Here, the four other pairs themselves scatter more than the given noise.
    scattered = [-0.01, -0.01, 0.05, 0.05, 9.0]
    assert paired_comparison._without_the_most(scattered, seen._replace(error=1.0)) is False


def test_launches_alternate_as_abba() -> None:
    """The launches with their costs are, in order: A 1, B 2, B 6, A 3, A 12, B 24."""
    assert [arm for pair in range(3) for arm in order(pair)] == ["a", "b", "b", "a", "a", "b"]
    differences = pair_differences([1.0, 3.0, 12.0], [2.0, 6.0, 24.0])
    assert [math.exp(difference) for difference in differences.pairs] == pytest.approx([2, 2, 2])
    assert [math.exp(difference) for difference in differences.neighbours] == pytest.approx([3, 4])
    assert pair_differences([1.0], [1.0]) == ([0.0], [])
    with pytest.raises(ValueError, match="shorter"):
        pair_differences([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("change", "outcome"), [(0.0, "passed"), (0.06, "regressed"), (-0.06, "improved")])
@pytest.mark.parametrize("machine", [[1.0] * 12, [1.0, 1.0, 1.0, 2.0, 1.0, 1.5, *[1.0] * 6]])
def test_finds_change_and_cancels_shared_noise(machine: list[float], change: float, outcome: str) -> None:
    """The second list for `machine` makes it up to twice as slow in some pairs.

    The slowness cancels within pairs. It is visible as noise only between neighbouring launches of one arm.
    """
    a, b = ([slow * cost for slow, cost in zip(machine, costs, strict=True)] for costs in (A, B))
    decision = decided(a, [(1 + change) * cost for cost in b], tolerance=0.03)
    assert decision.outcome == outcome
    assert decision.interval[0] < change < decision.interval[1]
    assert decision.change == pytest.approx(change, abs=0.01)
    fewest = MIN_PAIRS if outcome == "passed" else MIN_CHANGED
    assert fewest <= decision.pairs <= fewest + 1


def test_neighbours_of_one_arm_tell_of_noise() -> None:
    """In both samples, the ratio of every pair is 1. In the second sample, the launches of one arm differ."""
    quiet, noisy = (look(arm, arm) for arm in ([1.0] * 4, [1.0, 1.1, 0.9, 1.0]))
    assert (quiet.outcome, noisy.outcome == "passed") == ("passed", False)
    assert noisy.pair_sigma > 5 * quiet.pair_sigma
    assert quiet.pair_sigma == pytest.approx(0.002 * math.sqrt(2)), "the noise is at least the floor"


def test_noise_as_large_as_change_is_inconclusive() -> None:
    a = [1.0, 1.2, 0.9, 1.1, 0.8, 1.3, 1.0, 0.9]
    decision = decided(a, [1.1, 1.0, 1.2, 0.9, 1.1, 1.0, 1.2, 0.8], tolerance=0.03)
    assert (decision.outcome, decision.pairs < len(a)) == ("inconclusive", True)
    assert decision.minimum_detectable > 0.03
    b = [1.0, 1.03, 1.0, 1.025, 1.01]
    outcomes = [look([1.0] * 5, b, max_pairs=most).outcome for most in (MAX_PAIRS, 5)]
    assert outcomes == ["undecided", "inconclusive"]


MACHINE = [1.0, 1.3, 0.9, 1.2, 1.1, 0.8, 1.25, 0.95]
"""The slowness of the machine in each launch of A. For B, the same values are in another order."""
PROBES = (MACHINE, MACHINE[3:] + MACHINE[:3])


def followed(factor: float = 1.0, exponent: float = 0.5) -> tuple[list[float], list[float]]:
    """Return the costs of both arms. A launch with a slower probe costs more."""
    a, b = (
        [cost * probe**exponent for cost, probe in zip(costs, probes, strict=False)]
        for costs, probes in zip((A, B), PROBES, strict=True)
    )
    return a, [factor * cost for cost in b]


@pytest.mark.parametrize(("change", "outcome"), [(0.0, "passed"), (0.06, "regressed"), (-0.06, "improved")])
def test_removes_the_part_that_follows_the_probe(change: float, outcome: str) -> None:
    a, b = followed(1 + change)
    decision = decided(a, b, tolerance=0.03, probes=PROBES)
    assert decision.outcome == outcome
    assert decision.exponent == pytest.approx(0.5, abs=0.05)
    assert decision.change == pytest.approx(change, abs=0.01)
    plain = decided(a, b, tolerance=0.03)
    assert plain.outcome != outcome
    assert decision.pair_sigma < plain.pair_sigma / 5
    assert decision.minimum_detectable < plain.minimum_detectable / 5


PLAIN = (0.0593571, 0.0495176, 0.0692887, 0.0076816, 0.0136370, 0.0000000)
FEW = (-0.0009787, -0.0514259, 0.0521513, 0.0091194, 0.0162100, 0.0000000)
CORRECTED = (-0.0006065, -0.0100627, 0.0089399, 0.0075250, 0.0140821, 0.4787495)


def test_figures_of_a_decision_stay_the_same() -> None:
    """The three decisions have eight pairs, only three pairs, and a correction by the probe."""
    a, b = followed()
    for decision, expected in (
        (look(A[:8], [1.06 * cost for cost in B[:8]]), PLAIN),
        (look(A[:3], B[:3]), FEW),
        (look(a, b, probes=PROBES), CORRECTED),
    ):
        numbers = (decision.change, *decision.interval, decision.pair_sigma, decision.minimum_detectable)
        assert (*numbers, decision.exponent) == pytest.approx(expected, abs=1e-6)


def test_ignores_a_probe_launches_do_not_follow() -> None:
    """A probe is also ignored with three pairs, because three pairs are too few to fit an exponent."""
    a = A[:8]
    b = [1.06 * cost for cost in B[:8]]
    assert decided(a, b, tolerance=0.03, probes=([1.0] * 8, [1.0] * 8)) == decided(a, b, tolerance=0.03)
    against = [[1 / probe for probe in probes] for probes in PROBES]
    a, b = followed()
    assert look(a, b, probes=(against[0], against[1])) == look(a, b)
    exponents = [look(a[:n], b[:n], probes=(PROBES[0][:n], PROBES[1][:n])).exponent for n in (3, 4)]
    assert exponents[0] == 0 < exponents[1]


@pytest.mark.parametrize(
    ("factor", "most", "outcome", "disputed"),
    [
        (1, MAX_PAIRS, "undecided", None),
        (1, 8, "inconclusive", ("regressed", "passed")),
        (1.5, MAX_PAIRS, "regressed", None),
    ],
    ids=["undecided", "disputed", "slower"],
)
def test_differing_probes_need_both_to_agree(
    factor: float, most: int, outcome: str, disputed: tuple[str, str] | None
) -> None:
    """Arm B slows down the whole process, including the probe. The probe must not hide B's slowdown."""
    a, b = followed(1.2)
    probes = (PROBES[0], [1.5 * probe for probe in PROBES[1]])
    decision = look(a, [factor * cost for cost in b], tolerance=0.1, max_pairs=most, probes=probes)
    assert (decision.outcome, decision.disputed) == (outcome, disputed)


def test_very_different_probes_correct_nothing() -> None:
    a, b = followed(1.2)
    surely = (PROBES[0], [5 * probe for probe in PROBES[1]])
    assert look(a, b, tolerance=0.1, probes=surely) == look(a, b, tolerance=0.1), "nothing is corrected"


def test_a_difference_by_chance_is_disputed() -> None:
    # Without the correction, it must also be likely that the comparison passes. Here, chance could explain
    # the differences of both the steps and the probe.
    a, b = followed(1.09)
    by_chance = (PROBES[0], [1.2 * probe for probe in PROBES[1]])
    decision = look(a, b, tolerance=0.1, max_pairs=8, probes=by_chance)
    assert decision.disputed is not None
    assert (decision.outcome, decision.disputed[1]) == ("inconclusive", "passed")


def test_fitted_exponent_widens_the_error() -> None:
    """The uncertainty of the exponent adds to the error.

    The more the probes of the arms differ, the more it adds.
    """
    a, b = followed()
    off = (PROBES[0], [1.1 * probe for probe in PROBES[1]])
    near, far = (look(a, b, probes=probes) for probes in (PROBES, off))
    assert (far.exponent, far.pair_sigma) == pytest.approx((near.exponent, near.pair_sigma))
    errors = []
    for arms in (PROBES, off):
        probes = pair_differences(*arms)
        mean = fmean(probes.pairs)
        spread = sum((x - mean) ** 2 for x in probes.pairs) + sum(x**2 for x in probes.neighbours)
        errors.append(math.sqrt(1 + 1.5 * len(MACHINE) * mean**2 / spread))
    assert errors[1] > 1.01 * errors[0]
    widths = [math.log1p(judged.interval[1]) - math.log1p(judged.interval[0]) for judged in (near, far)]
    assert widths[1] / widths[0] == pytest.approx(errors[1] / errors[0])


@given(some_pairs)
@deterministic
def test_exchanged_arms_give_the_opposite_answer(pairs: list[tuple[float, float]]) -> None:
    """This is only true because the next pair always begins with the arm that ended the last pair."""
    a = [1.0] * len(pairs)
    b = [second / first for first, second in pairs]
    reverse = [1 / cost for cost in b]
    first = look(a, b)
    second = look(a, reverse)
    assert second.outcome == OPPOSITE.get(first.outcome, first.outcome)
    assert 1 + second.change == pytest.approx(1 / (1 + first.change))


@given(some_pairs, st.floats(0.001, 1000))
@deterministic
def test_decisions_are_consistent_in_any_unit(pairs: list[tuple[float, float]], unit: float) -> None:
    a, b = ([pair[arm] for pair in pairs] for arm in (0, 1))
    decision = look(a, b)
    scaled = look([unit * cost for cost in a], [unit * cost for cost in b])
    assert scaled.outcome == decision.outcome
    assert scaled.change == pytest.approx(decision.change, abs=1e-9)
    low, high = decision.interval
    assert low <= decision.change <= high
    assert decision.outcome != "regressed" or (low > 0 and high >= 0.03)
    assert decision.outcome != "improved" or high < 0
    assert decision.outcome != "passed" or abs(math.log1p(decision.change)) < math.log1p(0.03)
    assert len(pairs) < MAX_PAIRS or decision.outcome != "undecided"


def test_detectable_change_shrinks_with_pairs() -> None:
    """A simulation gave a detectable change of 7.1 sigma / sqrt(8).

    The formula has the factor 6.5 instead of 7.1 for 8 pairs, and 6.0 for 12 pairs.
    """
    sigma = 1e-6
    assert minimum_detectable_difference(sigma, 8) == pytest.approx(6.5 * sigma / math.sqrt(8), rel=0.03)
    assert minimum_detectable_difference(sigma) == pytest.approx(6.0 * sigma / math.sqrt(12), rel=0.03)
    assert minimum_detectable_difference(1e3) == math.inf


def test_a_tolerance_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"tolerance is 0\.0, expected a fraction between 0 and 1"):
        decided([1.0], [1.0], tolerance=0.0)


def test_fitted_exponent_costs_freedom() -> None:
    differences = paired_comparison.Differences([0.01, -0.02, 0.03, 0.0, 0.02, -0.01], [0.01] * 5)
    plain, fitted = (
        paired_comparison._evidence(differences, exponent, 2.6).degrees for exponent in (None, differences)
    )
    assert 0.5 < fitted < plain
