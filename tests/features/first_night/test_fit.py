"""Tests of the rows about cases that were measured twice."""

from typing import Any

import pytest

from perfsuite.features.first_night.fit import case_row
from perfsuite.results.baseline import from_runs
from perfsuite.results.outcome import Check, CountCheck, Verdict
from perfsuite.results.rank_report import Observed
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.unchanged import unless_unchanged
from tests.features.first_night.nights import by_check
from tests.samples import make_case, make_result, make_run, metric_check
from tests.twin_counts import launch

CASES = [make_case(micro_batch=size) for size in range(1, 7)]


def result(number: int, outcome: Any, **changes: Any) -> Measurement:
    verdict = Verdict(outcome=outcome, launches=3, **changes)
    return make_result(make_run(case=CASES[number]), verdict=verdict)


def check(**changes: Any) -> Check:
    usual: dict[str, Any] = {
        "metric": "tokens_per_s",
        "label": "tokens/s",
        "unit": "tokens/s",
        "outcome": "passed",
    }
    return Check(**{**usual, "measured": 1.0, "baseline": 1.0, "allowed": 0.03, **changes})


def test_only_steady_cases_are_fit() -> None:
    recorded = [result(number, "recorded") for number in range(4)]
    first = [*recorded, result(4, "failed", reasons=("OOM",)), result(5, "unhealthy")]
    second = [
        result(0, "passed", checks=(check(minimum_detectable=0.01),)),
        result(1, "passed", checks=(check(minimum_detectable=0.2),)),
        result(2, "regressed", reasons=("slower",)),
        *[None] * 3,
    ]
    rows = by_check([case_row(*both) for both in zip(first, second, strict=True)])
    statuses = [rows[case.id].status for case in CASES]
    assert statuses == ["pass", "unknown", "fail", "unknown", "fail", "unknown"]
    detects = "changes of {} or more in tokens/s can be detected"
    assert rows[CASES[0].id].found.endswith(f"then passed; {detects.format('1.0%')}")
    allowed = "and the allowed change is 3.0%"
    assert rows[CASES[1].id].found == f"passed, but only {detects.format('20.0%')}, {allowed}"
    assert rows[CASES[3].id].found == "recorded, but not measured again yet"


@pytest.mark.parametrize(
    ("outcome", "change", "status", "shown"),
    [("regressed", -0.12, "fail", "-12.0%"), ("improved", 0.07, "unknown", "+7.0%")],
)
def test_sessions_that_differ_are_not_fit(outcome: Any, change: float, status: str, shown: str) -> None:
    """The code is the same in both sessions, so the second verdict becomes "unhealthy"."""
    seen = Observed(settings={}, environment={"torch": "2.13.0"}, code="0123456789ab")
    run = launch(observed=seen)
    judged = Verdict(
        outcome=outcome,
        launches=3,
        checks=(metric_check(outcome=outcome, metric="tokens_per_s", change=change),),
        counts=CountCheck(outcome="passed"),
    )
    verdict = unless_unchanged(judged, [run] * 3, from_runs([run] * 3))
    assert verdict.outcome != outcome, "the rule applies"
    first = make_result(run, verdict=Verdict(outcome="recorded", launches=3))
    row = case_row(first, make_result(run, verdict=verdict))
    assert row.status == status
    assert row.found == f"two sessions of the same code differ: tokens/s {shown}"


@pytest.mark.parametrize("excuse", ["known issue", "out of memory"])
def test_excused_cases_are_not_failed(excuse: Any) -> None:
    bad = result(0, "failed", failure="crash").replace(excused=excuse)
    row = case_row(bad)
    assert (row.status, row.found) == ("unknown", f"no baseline: {excuse}: crash")
    good = result(0, "recorded")
    row = case_row(good, bad)
    assert (row.status, row.found) == ("unknown", f"recorded, then {excuse}: crash")
    waived = result(0, "regressed").replace(excused="waived")
    assert case_row(good, waived).status == "unknown"


@pytest.mark.parametrize(
    ("outcome", "said", "shown"),
    [
        ("failed", "launch 1: crash: rank 3: no space left", "launch 1: crash: rank 3: no space left"),
        ("unhealthy", "GPU 3 was throttled", "no baseline: unhealthy: GPU 3 was throttled"),
    ],
)
def test_a_case_without_a_baseline_says_why(outcome: Any, said: str, shown: str) -> None:
    assert case_row(result(0, outcome, reasons=(said,))).found == shown
    again = case_row(result(0, "recorded"), result(0, outcome, reasons=(said,)))
    assert again.found == f"{outcome} although the code did not change: {said}"
