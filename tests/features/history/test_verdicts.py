from pathlib import Path
from typing import Any

import pytest

from perfsuite.features.history import store, verdicts
from perfsuite.features.history.verdicts import CaseNight
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Measurement
from tests.samples import COMMIT, make_figures, make_result, make_run, never_run, write_session

RUN = make_run(figures=make_figures(step_s_p50=0.25))


def result_of(outcome: Any, *, judged_by: str | None = "a", **changes: Any) -> Measurement:
    """Return a result with this outcome. The launch of a failed case crashed."""
    failure = Failure(kind="crash", message="boom") if outcome == "failed" else None
    result = make_result(RUN.replace(failure=failure), before=None, judged_by=judged_by, **changes)
    return result.replace(verdict=result.verdict.replace(outcome=outcome))


def add(tmp_path: Path, day: int, *results: Measurement, commit: str = COMMIT) -> list[Path]:
    file = write_session(tmp_path, *results, commit=commit, started_at=f"2026-01-{day:02}T01:00:00+00:00")
    return [*store.add(tmp_path / "history", file).written]


def nights(tmp_path: Path, **wanted: Any) -> list[CaseNight]:
    (nights_of_case,) = verdicts.by_case(tmp_path / "history", **wanted)
    return nights_of_case


def test_keeps_verdicts_of_unmeasured_cases(tmp_path: Path) -> None:
    both = (result_of("failed", shadow=True), never_run().replace(case_id="lost", judged_by="b"))
    add(tmp_path, 1, *both)
    lost, failed = verdicts.by_case(tmp_path / "history")[::-1]
    assert [night.verdict for night in (*failed, *lost)] == [
        store.StoredVerdict(word="failed", shadow=True, baselines="a"),
        store.StoredVerdict(word="failed", baselines="b"),
    ]
    assert add(tmp_path, 1, *both) == []
    add(tmp_path, 2, result_of("regressed", excused="waived"))
    assert nights(tmp_path, case="fake-*")[-1].verdict.word == "waived"
    assert nights(tmp_path, case="lost", hardware_class="cpu-*") == lost
    assert add(tmp_path, 3, make_result(RUN.replace(inject="slowdown=30%"))) == [], (
        "this session has no verdict"
    )


@pytest.mark.parametrize("outcome", ["passed", "improved", "inconclusive", "regressed"])
@pytest.mark.parametrize(
    "changes", [{}, {"judged_by": "b"}, {"shadow": True}, {"excused": "waived"}], ids=str
)
def test_later_pass_retracts_a_failure(tmp_path: Path, outcome: str, changes: Any) -> None:
    add(tmp_path, 1, result_of("regressed", shadow=True))
    add(tmp_path, 2, result_of(outcome, **changes), commit="f" * 40)
    first, back = next(verdicts.failures(nights(tmp_path)))
    assert (first.word, first.verdict.shadow) == ("regressed (shadow)", True)
    takes_back = outcome in ("passed", "improved") and not changes
    assert (back and back.place.day) == ("20260102" if takes_back else None)


def test_earlier_or_unknown_pass_retracts_nothing(tmp_path: Path) -> None:
    seen = (
        result_of("passed"),
        result_of("failed"),
        result_of("failed", judged_by=None),
        result_of("passed", judged_by=None),
    )
    for day, result in enumerate(seen, 1):
        add(tmp_path, day, result)
    assert [back for _, back in verdicts.failures(nights(tmp_path))] == [None, None]


TOLD = ("failed", "unhealthy", "passed regressed", "regressed passed", "passed regressed inconclusive")
OLD = ("passed", "regressed failed", "regressed passed passed", "inconclusive unhealthy", "recorded improved")


@pytest.mark.parametrize("outcomes", [*TOLD, *OLD])
def test_reports_cases_that_changed_state(tmp_path: Path, outcomes: str) -> None:
    *before, now = outcomes.split()
    for day, outcome in enumerate(before, 1):
        add(tmp_path, day, result_of(outcome))
    added = add(tmp_path, 9, result_of(now))
    changed = [night.verdict.word for night in verdicts.changed(tmp_path / "history", added)]
    assert changed == ([now] if outcomes in TOLD else [])
    assert verdicts.changed(tmp_path / "history", []) == []


def test_each_hardware_class_has_a_state(tmp_path: Path) -> None:
    add(tmp_path, 1, result_of("regressed"))
    other = RUN.replace(machine=RUN.machine.replace(hardware_class="h100"))
    added = add(tmp_path, 2, result_of("regressed").replace(runs=(other,)))
    assert [night.place.hardware_class for night in verdicts.changed(tmp_path / "history", added)] == ["h100"]
