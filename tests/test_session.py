from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite import baseline, data, session
from perfsuite import run as running
from perfsuite.baseline import Baseline
from perfsuite.case import KnownIssue
from perfsuite.errors import PerfsuiteError
from perfsuite.hardware import gpu_machine
from perfsuite.judge import Policy, Verdict
from perfsuite.lock import MachineLock
from perfsuite.progress import Progress
from perfsuite.result import Run
from perfsuite.results import SessionFile
from perfsuite.session import Options, Session
from perfsuite.summary import interruption
from tests.samples import make_case, make_figures, make_run, never_run


class Unlocked(MachineLock):
    """Of sessions that launch nothing, several of which a test may have at a time."""

    def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
        pass


def make_session(directory: Path) -> Session:
    options = Options(
        root=directory, store=directory / "store", baselines=directory / "baselines", policy=Policy()
    )
    return Session(options, Progress(line=lambda text: None, live=lambda text: None), lock=Unlocked())


def stand_in(monkeypatch: pytest.MonkeyPatch, runs: list[Run], verdict: Verdict) -> None:
    """Nothing is launched: this is what was measured."""

    def measure(*args: object, on_launch: Callable[[int], None], **options: object) -> Any:
        on_launch(1)
        return runs, verdict

    monkeypatch.setattr(session, "measure", measure)


def test_an_unhealthy_launch_is_no_part_of_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(figures=make_figures(tokens_per_s=speed)) for speed in (1000, 10, 1002)]
    verdict = Verdict(outcome="recorded", launches=3, unhealthy_launches=(2,))
    stand_in(monkeypatch, runs, verdict)
    ours = make_session(tmp_path)
    result = ours.measure(make_case(), "test")
    assert result.figures.tokens_per_s == 1001
    directory = tmp_path / "store" / "baselines"
    file = baseline.path(directory, ours.machine.hardware_class, make_case())
    assert data.read(file, Baseline).values("tokens_per_s") == [1000, 1002]


def test_the_result_is_kept_if_the_baseline_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = Verdict(outcome="recorded", launches=1)
    stand_in(monkeypatch, [make_run()], verdict)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "baselines").write_text("in the way")
    ours = make_session(tmp_path)
    with pytest.raises(PerfsuiteError, match="cannot write"):
        ours.measure(make_case(), "test")
    assert [result.verdict.outcome for result in ours.results] == ["recorded"]


def test_a_case_that_cannot_be_launched_is_a_failed_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> Any:
        raise PerfsuiteError("mine.yaml: num_processes is 4")

    monkeypatch.setattr(session, "measure", refuse)
    ours = make_session(tmp_path)
    with pytest.raises(PerfsuiteError, match="num_processes"):
        ours.measure(make_case(), "test")
    (told,) = ours.to_file("complete").results
    assert (told.outcome, told.verdict.failure) == ("failed", "error")
    assert told.verdict.reasons == ("mine.yaml: num_processes is 4",)
    assert ours.to_file("complete").interrupted_case is None


@pytest.mark.parametrize(
    "end", [PerfsuiteError("processes 7 of this job cannot be killed"), KeyboardInterrupt()]
)
def test_the_launches_before_an_error_or_an_interrupt_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    runs = [make_run(started_at=f"2026-01-0{day}T00:00:00+00:00") for day in (1, 2)]
    left = list(runs)

    def launch(*args: object, **options: object) -> Run:
        if not left:
            raise end
        return left.pop(0)

    monkeypatch.setattr(running, "run", launch)
    ours = make_session(tmp_path)
    with pytest.raises(type(end)):
        ours.measure(make_case(), "test")
    file = tmp_path / "results.json"
    data.write(file, ours.to_file("interrupted"))
    told = data.read(file, SessionFile)
    if isinstance(end, KeyboardInterrupt):
        assert (told.interrupted_case, told.interrupted_launches) == (make_case().id, tuple(runs))
        assert "was not judged (2 launches of it in results.json);" in str(interruption(told))
        return
    (result,) = told.results
    assert (result.runs, result.verdict.launches) == (tuple(runs), 2)
    assert (result.outcome, result.verdict.failure) == ("failed", "error")
    assert result.directory == str(ours.files / make_case().id)
    assert (told.interrupted_case, told.interrupted_launches) == (None, ())


def test_a_machine_with_gpus_is_a_cpu_machine_for_a_cpu_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = gpu_machine(["NVIDIA H100 80GB HBM3"], count=8, memory_bytes=2**36, driver=None)
    monkeypatch.setattr(session, "detect", lambda: gpus)
    ours = make_session(tmp_path)
    assert ours.machine_for(make_case(hardware="cpu")).device == "cpu"
    assert ours.machine_for(make_case(hardware=("cpu", "h100"))) == gpus
    assert ours.machine_for(make_case(hardware="a100")) == gpus
    assert "this machine is h100-80gb-sxm" in str(ours.skip_reason(make_case(hardware="a100"), "test"))
    assert [skip.nodeid for skip in ours.skipped] == ["test"]


@pytest.mark.parametrize(
    ("outcome", "strict", "failing"),
    [
        ("regressed", {}, True),
        ("failed", {}, True),
        ("passed", {}, False),
        ("unhealthy", {}, False),
        ("improved", {}, False),
        ("improved", {"strict_improved": True}, True),
        ("inconclusive", {}, False),
        ("inconclusive", {"strict_inconclusive": True}, True),
    ],
)
def test_which_outcomes_fail(tmp_path: Path, outcome: str, strict: dict[str, Any], failing: bool) -> None:
    ours = make_session(tmp_path)
    ours.options = replace(ours.options, **strict)
    verdict = never_run().verdict.replace(outcome=outcome)
    assert ours.is_failing(never_run().replace(verdict=verdict)) is failing


ISSUE = {"known_issue": KnownIssue(url="https://example.org/issues/209", failure="timeout")}
SWEPT = {"may_run_out_of_memory": True}


@pytest.mark.parametrize(
    ("changes", "failure", "has_baseline", "excused"),
    [
        (ISSUE, "timeout", False, "known issue"),
        (ISSUE, "crash", False, None),
        (ISSUE, "timeout", True, None),
        (ISSUE, "mismatch", False, None),
        (ISSUE, "no_baseline", False, None),
        (ISSUE, "out_of_memory", False, None),
        (SWEPT, "out_of_memory", False, "out of memory"),
        (SWEPT, "out_of_memory", True, None),
        (SWEPT, "crash", False, None),
        ({}, "out_of_memory", False, None),
    ],
)
def test_which_failures_are_no_surprise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    failure: Any,
    has_baseline: bool,
    excused: str | None,
) -> None:
    asked = make_case(**changes)
    verdict = Verdict(outcome="failed", launches=1, failure=failure)
    stand_in(monkeypatch, [make_run(case=asked)], verdict)
    ours = make_session(tmp_path)
    if has_baseline:
        directory, hardware_class = ours.baseline_directories[0], ours.machine.hardware_class
        acceptance = baseline.Acceptance(by="somebody", date="2026-01-01", commit=None)
        before = baseline.from_runs([make_run(case=asked, machine=ours.machine)] * 5, accepted=acceptance)
        data.write(baseline.path(directory, hardware_class, asked), before)
    result = ours.measure(asked, "test")
    assert result.excused == excused
    assert ours.is_failing(result) is (excused is None)
    assert ours.nothing_measured is (excused != "known issue")


def test_what_is_recorded_says_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [make_run()] * 3, Verdict(outcome="recorded", launches=3))
    ours = make_session(tmp_path)
    file = ours.measure(make_case(), "test").baseline_file
    assert file is not None
    assert {launch.session for launch in data.read(Path(file), Baseline).launches} == {ours.files.name}


@pytest.mark.parametrize(
    ("changes", "outcome", "failure", "launched", "excused"),
    [
        ({}, "recorded", None, False, None),
        (ISSUE, "recorded", None, True, None),
        (ISSUE, "failed", "timeout", True, "known issue"),
        (SWEPT, "failed", "out_of_memory", True, "out of memory"),
    ],
)
def test_where_a_baseline_is_required_only_a_case_that_may_fail_is_launched_without_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    outcome: Any,
    failure: Any,
    launched: bool,
    excused: str | None,
) -> None:
    stand_in(monkeypatch, [make_run()], Verdict(outcome=outcome, launches=1, failure=failure))
    ours = make_session(tmp_path)
    ours.options = replace(ours.options, fail_without_baseline=True)
    result = ours.measure(make_case(**changes), "test")
    assert (result.outcome, result.excused, bool(result.runs)) == ("failed", excused, launched)
    assert result.verdict.failure == (failure or "no_baseline")
    assert result.verdict.launches == len(result.runs)
    assert not (tmp_path / "store" / "baselines").exists()
