"""Test which cases become canaries, and when they are launched with the reference."""

from typing import Any

import pytest

from perfsuite.case.case import Topology
from perfsuite.results.baseline import from_runs
from perfsuite.session.canaries import Candidate, chosen, is_due
from tests.samples import make_case, make_launches

STEADY = (1.0, 1.001, 0.999)


def candidate(
    micro_batch: int,
    *,
    world_size: int = 2,
    speeds: tuple[float, ...] = STEADY,
    session: str = "a",
    **fields: Any,
) -> Candidate:
    """Return a case whose baseline has launches with these speeds."""
    case = make_case(micro_batch=micro_batch, topology=Topology(processes_per_node=world_size))
    runs = [run.replace(case=case) for run in make_launches(*speeds)]
    baseline = from_runs(runs, sessions=[session] * len(runs))
    return Candidate(case=case, baseline=baseline, baseline_file="x.json", **fields)


def batches(candidates: list[Candidate]) -> list[int]:
    return [candidate.case.micro_batch for candidate in candidates]


def test_the_fastest_cases_represent_their_kind() -> None:
    slow, fast, unknown = (
        candidate(batch, launch_s=seconds) for batch, seconds in ((1, 60.0), (2, 5.0), (3, None))
    )
    assert batches(chosen([unknown, slow, fast], 2)) == [2, 1]


def test_kinds_take_turns() -> None:
    small = [candidate(batch) for batch in (1, 2, 3)]
    large = [candidate(batch, world_size=4) for batch in (4, 5)]
    assert batches(chosen([*large, *small], 4)) == [1, 4, 2, 5]


def test_a_case_that_scatters_comes_last() -> None:
    loud = candidate(1, speeds=(1.0, 1.1, 0.9), launch_s=1.0)
    quiet = [candidate(batch, launch_s=5.0) for batch in (2, 3)]
    assert batches(chosen([loud, *quiet], 3)) == [2, 3, 1]


def test_cases_of_the_same_sessions_come_first() -> None:
    other = candidate(1, session="b", launch_s=1.0)
    same = [candidate(batch, launch_s=5.0) for batch in (2, 3)]
    assert batches(chosen([other, *same], 3)) == [2, 3, 1]


def test_the_choice_does_not_depend_on_the_order() -> None:
    candidates = [candidate(batch) for batch in (1, 2, 3, 4)]
    assert batches(chosen(candidates, 2)) == batches(chosen(candidates[::-1], 2))


def test_there_can_be_fewer_cases_than_canaries() -> None:
    assert batches(chosen([candidate(1)], 5)) == [1]
    assert chosen([], 5) == []


@pytest.mark.parametrize(
    ("made", "launches", "due"),
    [(0, 0, True), (4, 0, True), (5, 0, False), (5, 23, False), (5, 24, True), (6, 27, False)],
)
def test_every_canary_is_launched_first_and_then_a_quarter(made: int, launches: int, due: bool) -> None:
    assert is_due(5, made, launches) is due
