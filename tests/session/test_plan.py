from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

from perfsuite.case.case import Case, Topology
from perfsuite.results.outcome import Outcome
from perfsuite.session.plan import Budget, Past, budget_for, past_of, planned, shard
from tests.samples import make_case, make_compared, make_result, make_run, write_session

DAY = date(2026, 1, 1)
CASES = [make_case(micro_batch=size) for size in (1, 2, 3, 4)]


def past(outcome: Outcome, started_at: str, seconds: float = 60, launch_s: float | None = None) -> Past:
    longest = seconds if launch_s is None else launch_s
    return Past(outcome=outcome, started_at=started_at, seconds=seconds, launch_s=longest)


def ids(cases: list[Case], past_of_case: dict[str, Past], day: date = DAY) -> list[int]:
    return [entry.case.micro_batch for entry in planned(cases, past_of_case, day)]


def test_orders_failed_new_and_longest_unmeasured() -> None:
    first, second, third, _ = (case.id for case in CASES)
    past_of_case = {first: past("passed", "2026-01-02"), second: past("passed", "2026-01-01")}
    past_of_case[third] = past("inconclusive", "2026-01-02")
    assert ids(CASES, past_of_case) == [3, 4, 2, 1]
    worse: tuple[Outcome, ...] = ("failed", "regressed", "unhealthy", "recorded")
    for outcome in worse:
        past_of_case[third] = past(outcome, "2026-01-02")
        assert ids(CASES, past_of_case)[0] == 3
    past_of_case[third] = past("improved", "2026-01-03")
    assert ids(CASES, past_of_case) == [4, 2, 1, 3]


def test_first_case_rotates_without_a_past() -> None:
    begins = {ids(CASES, {}, date.fromordinal(DAY.toordinal() + day))[0] for day in range(4)}
    assert begins == {1, 2, 3, 4}
    assert planned([], {}, DAY) == []


def test_estimates_cost_from_past_or_similar_cases() -> None:
    wide = make_case(topology=Topology(processes_per_node=8), hardware="h100")
    past_of_case = {CASES[0].id: past("passed", "2026", 100), CASES[1].id: past("passed", "2026", 300)}
    costs = {entry.case.id: entry for entry in planned([*CASES, wide], past_of_case, DAY)}
    assert costs[CASES[0].id].seconds == 100
    assert costs[CASES[2].id].seconds == 200
    assert (costs[wide.id].seconds, costs[wide.id].gpu_hours) == (None, None)
    past_of_case[wide.id] = past("passed", "2026", 900)
    costs = {entry.case.id: entry for entry in planned([*CASES, wide], past_of_case, DAY)}
    assert costs[wide.id].gpu_hours == 2.0
    assert costs[CASES[0].id].gpu_hours == 0


def test_past_ignores_dry_and_injected_launches(tmp_path: Path) -> None:
    old = make_run(duration_s=10)
    new = make_run(duration_s=20)
    case = old.case
    bad = tmp_path / "cut-short.json"
    bad.write_text("{")
    files = [
        write_session(tmp_path / "1", make_result(old)),
        bad,
        write_session(tmp_path / "2", make_result(new, new)),
        write_session(tmp_path / "3", make_result(make_run(duration_s=5, dry=True))),
        write_session(tmp_path / "4", make_result(make_run(duration_s=5, inject="slowdown=30%"))),
    ]
    newest = past_of(files)[case.id]
    assert (newest.seconds, newest.launch_s) == (40, 20)
    assert past_of(files[:2])[case.id].seconds == 10
    assert past_of([]) == {}


def test_a_comparison_needs_all_of_its_launches(tmp_path: Path) -> None:
    compared = make_compared(pairs=5)
    runs = tuple(run.replace(duration_s=10) for run in compared.runs)
    file = write_session(tmp_path, compared.replace(runs=runs, before=runs))
    assert past_of([file])[compared.case_id].launch_s == 100


@dataclass
class Clock:
    """A clock that stands still until a test changes its time."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_case_begins_if_its_launch_fits(clock: Clock) -> None:
    """Cases of unknown duration are expected to take 50 s, the median of the other cases."""
    long, short, *_ = CASES
    budget = Budget(100, {long.id: 90, short.id: 10}, now=clock)
    assert all(map(budget.allows, CASES))
    clock.now_s += 20
    assert [budget.allows(case) for case in CASES] == [False, True, True, True]
    clock.now_s += 40
    assert [budget.allows(case) for case in CASES] == [False, True, False, False]
    clock.now_s += 40
    assert not any(map(budget.allows, CASES))


def test_any_time_is_enough_if_nothing_is_known(clock: Clock) -> None:
    budget = Budget(100, now=clock)
    clock.now_s += 99
    assert budget.allows(CASES[0])


def test_second_launches_leave_time_for_first_ones(clock: Clock) -> None:
    first, second, third, _ = CASES
    launch_s = {first.id: 20.0, second.id: 20.0, third.id: 20.0}
    budget = Budget(100, launch_s, {*launch_s}, now=clock)
    assert budget.allows(first)
    clock.now_s += 40
    assert budget.allows_another(first, 20)
    clock.now_s += 20
    assert not budget.allows_another(first, 20)
    assert budget.allows(second)
    clock.now_s += 20
    assert not budget.allows_another(second, 20)
    assert budget.allows(third)


def test_expects_the_duration_of_todays_launches(clock: Clock) -> None:
    """Today's launches are used too, because the machine can be slower than before.

    On the first day, there are no other launches.
    """
    first, second, third, _ = CASES
    budget = Budget(100, {}, {first.id, second.id, third.id}, now=clock)
    assert budget.allows(first)
    clock.now_s += 40
    assert not budget.allows_another(first, 40)
    assert budget.allows(second)
    clock.now_s += 40
    assert not budget.allows(third)


def test_a_slower_machine_takes_longer_for_every_case(clock: Clock) -> None:
    first, second, third, unknown = CASES
    budget = Budget(300, {first.id: 30, second.id: 30, third.id: 60}, now=clock)
    assert budget.allows(first)
    clock.now_s += 120
    budget.note(first, 120)
    assert budget.allows(second), "30 s in the past, and 120 s today"
    assert not budget.allows(third), "60 s in the past, and 240 s today"
    clock.now_s += 61
    assert not budget.allows(unknown), "120 s today, like the median of the others"


def test_a_machine_as_fast_as_before_takes_as_long(clock: Clock) -> None:
    first, second, *_ = CASES
    budget = Budget(100, {first.id: 30, second.id: 60}, now=clock)
    assert budget.allows(first)
    clock.now_s += 30
    budget.note(first, 30)
    assert budget.allows(second)


def test_reserves_the_fewest_launches_of_each_case(clock: Clock) -> None:
    first, second, *_ = CASES
    budget = Budget(100, {first.id: 15, second.id: 15}, {first.id, second.id}, fewest=5, now=clock)
    assert budget.allows(first)
    clock.now_s += 15
    assert not budget.allows_another(first, 15)
    clock.now_s += 60
    assert not budget.allows(second)


def test_time_for_a_case_excludes_waiting_ones(clock: Clock) -> None:
    first, second, unknown, _ = CASES
    budget = Budget(100, {first.id: 20, second.id: 40}, {second.id, unknown.id}, now=clock)
    assert budget.has_time_for(first, 1), "20 + 40 s, and a median of 30 s"
    assert not budget.has_time_for(first, 2)
    assert budget.has_time_for(second, 1), "its own 40 s are not reserved twice"
    clock.now_s += 40
    assert not budget.has_time_for(second, 1)


def test_too_long_case_names_the_budget_it_needs() -> None:
    long, short, *_ = CASES
    past_of_case = {long.id: past("passed", "2026-01-01", 1800), short.id: past("passed", "2026-01-01", 100)}
    budget = budget_for(planned([long, short], past_of_case, DAY), 600)
    assert not budget.allows(long)
    assert budget.why_not_reached(long) == (
        "not reached: it never fits into the budget of 10.0 min, because it takes about 30.0 min. "
        "Give 30min or more"
    )
    assert "too little of the budget" in budget.why_not_reached(short)
    assert "too little of the budget" in budget.why_not_reached(CASES[2])


def test_a_case_that_fits_on_a_faster_machine_may_fit_later(clock: Clock) -> None:
    first, second, *_ = CASES
    budget = Budget(100, {first.id: 20, second.id: 60}, now=clock)
    budget.note(first, 40)
    assert budget.why_not_reached(second) == (
        "not reached: too little of the budget of 1.7 min is left, and it takes about 2.0 min"
    )


def test_jobs_share_all_cases_evenly() -> None:
    shares = [shard(CASES, number, 3) for number in (1, 2, 3)]
    assert sorted(map(len, shares)) == [1, 1, 2]
    assert set.union(*shares) == {case.id for case in CASES}
    assert shard(CASES[:1], 2, 2) == set()
