import math
from dataclasses import replace

import pytest

from perfsuite.verdict.planning import (
    EXTRA,
    MAX_CANARIES,
    USUAL_MAX_LAUNCHES,
    NightPlan,
    Planned,
    canary_cost,
    expected_shift,
    hidden_by_case,
    least_cost,
    most_cost,
    pairs_to_find,
    plan_night,
    smallest_found,
)
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES, Noise, minimum_detectable_drop
from perfsuite.verdict.variance import Component

SESSIONS = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
CASE = Planned(baseline_launches=15, sessions=SESSIONS)
CASES = {f"case{number:02}": CASE for number in range(20)}


def noise(*, within: float = 0.001, sigma: float = 0.003, session: float = 0.02) -> Noise:
    """Return the noise of 20 cases with three sessions."""
    of_case = Component(observed=within**2 + sigma**2 / 5, explained=sigma**2 / 5, degrees=38)
    return Noise(sigma=sigma, degrees_of_freedom=200, session_sigma=session, of_case=of_case)


def plan(of: Noise, find: float, cases: dict[str, Planned] = CASES, canaries: int = 20) -> NightPlan:
    return plan_night(cases, of, find, min(find, 0.03), list(cases)[:canaries])


def test_a_reference_reaches_what_the_gate_alone_cannot() -> None:
    alone = plan(noise(), 0.02, canaries=0)
    assert (alone.canaries, alone.canary_launches, len(alone.unreached)) == ((), 0, 20)
    beside = plan(noise(), 0.02)
    assert beside.unreached == []
    assert 2 <= len(beside.canaries) <= MAX_CANARIES
    assert beside.canaries == tuple(CASES)[: len(beside.canaries)], "the first are the best"
    assert all(case.finds <= 0.02 for case in beside.cases.values())


def test_sessions_that_are_alike_need_no_reference() -> None:
    assert plan(noise(session=0.0), 0.02).canaries == ()


def test_smaller_changes_take_more_launches() -> None:
    few, many = (plan(noise(session=0.0, sigma=0.006), find) for find in (0.04, 0.015))
    assert few.unreached == many.unreached == []
    assert FEWEST_LAUNCHES == few.max_launches < many.max_launches <= MAX_LAUNCHES


def test_no_launches_outweigh_the_noise_of_a_case() -> None:
    noisy = noise(within=0.005)
    assert len(plan(noisy, 0.02).unreached) == 20
    assert hidden_by_case(noisy, CASE, 0.02)
    assert not hidden_by_case(noise(), CASE, 0.02)
    assert not hidden_by_case(replace(noisy, of_case=None), CASE, 0.02)


def test_an_unreached_plan_launches_as_usual() -> None:
    assert plan(noise(within=0.005), 0.02).max_launches == USUAL_MAX_LAUNCHES


def test_an_unreached_plan_finds_as_much_as_it_can() -> None:
    alone = plan(noise(within=0.005), 0.02, canaries=0)
    beside = plan(noise(within=0.005), 0.02)
    assert beside.canaries
    assert max(case.finds for case in beside.cases.values()) < 0.5 * alone.cases["case00"].finds


def test_a_case_with_few_launches_is_not_reached() -> None:
    cases = {**CASES, "new": Planned(baseline_launches=2, sessions=SESSIONS)}
    assert plan(noise(sigma=0.006), 0.03, cases, canaries=20).unreached == ["new"]


def test_canaries_take_a_quarter_of_the_launches() -> None:
    beside = plan(noise(), 0.03)
    fewest = sum(case.fewest_launches for case in beside.cases.values())
    assert beside.canary_launches * len(beside.canaries) <= EXTRA * fewest


def test_a_single_case_gets_no_canary() -> None:
    few, alone = (dict(list(CASES.items())[:count]) for count in (2, 1))
    assert len(plan(noise(), 0.03, few).canaries) == 2
    assert plan(noise(), 0.03, alone).canaries == ()


def test_more_cases_must_each_raise_fewer_alarms() -> None:
    few, many = ({str(number): CASE for number in range(count)} for count in (10, 1_000))
    few_find, many_find = (plan(noise(session=0.0), 0.001, cases).cases["0"].finds for cases in (few, many))
    assert few_find < many_find


def test_costs_count_every_launch() -> None:
    cases = {"a": replace(CASE, cost=10.0), "b": replace(CASE, cost=1.0)}
    beside = plan(noise(), 0.03, cases)
    of_canaries = beside.canary_launches * sum(cases[name].cost for name in beside.canaries)
    assert canary_cost(beside, cases) == of_canaries > 0
    assert most_cost(beside, cases) == 11 * beside.max_launches + of_canaries
    fewest = sum(beside.cases[name].fewest_launches * cases[name].cost for name in cases)
    assert least_cost(beside, cases) == fewest + of_canaries < most_cost(beside, cases)


def test_an_unreached_plan_costs_no_more_than_its_most() -> None:
    alone = plan(noise(within=0.005), 0.02, canaries=0)
    assert least_cost(alone, CASES) == most_cost(alone, CASES) == 20 * USUAL_MAX_LAUNCHES


def test_more_canaries_and_launches_show_the_shift_better() -> None:
    errors = []
    for count, launches in ((2, 1), (2, 3), (8, 3)):
        shift = expected_shift(dict.fromkeys(list(CASES)[:count], CASE), launches, noise())
        assert shift is not None
        assert shift.sessions == pytest.approx(SESSIONS)
        errors.append(shift.error)
    assert errors == sorted(errors, reverse=True)
    upper = known_upper(noise())
    assert errors[-1] == pytest.approx(math.sqrt((0.003**2 * (1 / 3 + 1 / 15) + upper * 4 / 3) / 8))


def known_upper(of: Noise) -> float:
    assert of.of_case is not None
    return of.of_case.upper


def test_without_a_noise_of_cases_no_shift_is_expected() -> None:
    assert expected_shift({"a": CASE}, 1, replace(noise(), of_case=None)) is None
    assert expected_shift({}, 1, noise()) is None


def test_unknown_noise_of_cases_plans_without_a_reference() -> None:
    assert plan(replace(noise(), of_case=None), 0.02).canaries == ()


def test_pairs_find_what_sessions_hide() -> None:
    assert pairs_to_find(noise(), 0.02) == 5
    few, more = (pairs_to_find(noise(sigma=0.006), find) for find in (0.03, 0.02))
    assert few is not None
    assert more is not None
    assert few < more
    assert pairs_to_find(noise(sigma=0.02), 0.01) is None


def test_todays_launches_show_the_noise_as_well() -> None:
    few = Noise(sigma=0.003, degrees_of_freedom=3)
    assert smallest_found(few, 15, 15, 3.9) < smallest_found(few, 15, 5, 3.9)
    assert smallest_found(few, 15, 15, 3.9) < minimum_detectable_drop(noise=few, baseline_launches=15)
