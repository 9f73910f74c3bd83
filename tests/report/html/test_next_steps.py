import pytest

from perfsuite.report.html.next_steps import next_steps
from perfsuite.results.session_file import ArmFacts, Measurement
from tests import counted
from tests.samples import ARMS, judged, make_case, make_compared, make_result, make_session_file, now

AGAIN = "pytest 'bench_cases/test_x.py::test_x[a]'"
ID = make_case().id
BY_COUNTS = judged(make_result(now()), counts=counted.make_check(counted.make_finding()), outcome="regressed")


def commands(result: Measurement, arms: tuple[ArmFacts, ...] = ()) -> list[str]:
    return [each.command for each in next_steps(result, make_session_file(result, arms=arms))]


def arms(text: str) -> tuple[ArmFacts, ...]:
    return tuple(ArmFacts(text=each, facts={}) for each in (text, "."))


def test_a_slower_case_is_compared_bisected_or_accepted() -> None:
    slower = make_result(*[now(tokens_per_s=50_000.0, tokens_per_s_mean=49_000.0)] * 3)
    assert slower.outcome == "regressed"
    assert commands(slower) == [
        f"perfsuite compare --against COMMIT {ID}",
        f"perfsuite bisect --good COMMIT {ID}",
        f"perfsuite baseline accept --reason WHY {ID}",
        AGAIN,
    ]


def test_more_work_of_a_step_is_searched_by_counts() -> None:
    assert commands(BY_COUNTS)[:3] == [
        f"perfsuite compare --against COMMIT --counts {ID}",
        f"perfsuite bisect --good COMMIT --counts {ID}",
        f"perfsuite baseline accept --counts --reason WHY {ID}",
    ]


def test_a_dry_run_is_searched_by_dry_runs() -> None:
    slower = judged(counted.make_dry(), outcome="regressed")
    again = f"perfsuite dry-run --device=cuda {slower.case_id}"
    assert commands(slower)[0] == f"perfsuite compare --against COMMIT --dry {slower.case_id}"
    assert commands(slower)[2:] == [
        f"perfsuite baseline accept --counts --reason WHY {slower.case_id}",
        again,
    ]


def test_a_case_that_passed_is_only_measured_again() -> None:
    assert commands(make_result(now())) == [AGAIN]
    assert commands(BY_COUNTS.replace(excused="waived")) == [AGAIN]


@pytest.mark.parametrize(
    ("outcome", "words"), [("improved", f"--reason WHY {ID}"), ("recorded", ID)], ids=["improved", "recorded"]
)
def test_new_levels_can_be_accepted(outcome: str, words: str) -> None:
    result = judged(make_result(now()), outcome=outcome)
    assert commands(result) == [f"perfsuite baseline accept {words}", AGAIN]


def test_an_injected_fault_is_not_searched() -> None:
    assert commands(BY_COUNTS.replace(runs=(now().replace(inject="slowdown=30%"),))) == [
        f"{AGAIN} --perf-inject=slowdown=30%"
    ]


def test_arms_are_compared_again_in_the_same_way() -> None:
    compared = make_compared(speed=0.93)
    again = f"perfsuite compare --against 'main X=1' --arm . {ID}"
    assert commands(compared, ARMS) == [again]
    by_counts = judged(compared.replace(verdict=counted.make_counted().verdict), checks=())
    assert commands(by_counts, ARMS) == [again.replace(" --arm .", " --arm . --counts")]


def test_only_between_commits_is_a_commit_searched() -> None:
    slower = judged(make_compared(), outcome="regressed")
    assert commands(slower, arms("v1.2"))[0] == f"perfsuite bisect --good v1.2 {ID}"
    for text in (".", "torch==2.12.0", "old/bin/python", "main X=1", "image:a"):
        assert len(commands(slower, arms(text))) == 1, text
