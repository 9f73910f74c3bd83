from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite.errors import FileError
from perfsuite.results.outcome import Verdict
from perfsuite.results.session_file import ArmFacts, PytestRun, SessionReference, Skipped
from perfsuite.results.store import Store
from perfsuite.session.resume import differences, ended, is_decided, newest
from tests.samples import (
    COMMIT,
    CONDITIONS,
    make_gpu_machine,
    make_machine,
    make_result,
    make_run,
    make_session_file,
    never_run,
    write_session,
)

make_session = partial(make_session_file, status="interrupted")


def test_equal_sessions_do_not_differ() -> None:
    later = make_session(status="running", started_at="2026-01-03T03:04:05+00:00")
    assert differences(make_session(), later) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"commit": "f" * 40}, "commit 0123abcd0123, not ffffffffffff"),
        ({"conditions": CONDITIONS.replace(changes="a1")}, "uncommitted changes none, not a1"),
        ({"machine": make_machine().replace(driver="580.1")}, "driver unset, not 580.1"),
        (
            {"machine": make_gpu_machine().replace(driver=None)},
            "hardware class cpu-test-2c, not h100-80gb-sxm",
        ),
        (
            {"conditions": CONDITIONS.replace(options={"--perf-inject": "nan"})},
            "--perf-inject nothing, not nan",
        ),
        ({"conditions": CONDITIONS.replace(environment={"torch": "2.14.0"})}, "torch 2.13.0, not 2.14.0"),
        ({"conditions": CONDITIONS.replace(environment={})}, "torch 2.13.0, not unset"),
    ],
)
def test_what_differs_is_named_with_both_values(changes: dict[str, Any], said: str) -> None:
    assert differences(make_session(), make_session(**changes)) == [said]


def test_other_gpus_of_the_node_do_not_end_a_session() -> None:
    first, second = (
        make_session(conditions=CONDITIONS.replace(environment={"CUDA_VISIBLE_DEVICES": gpus}))
        for gpus in ("0,1", "2,3")
    )
    assert differences(first, second) == []


def test_a_session_with_a_reference_does_not_go_on() -> None:
    launched = SessionReference(arm=ArmFacts(text="v1", facts={}))
    assert differences(make_session(reference=launched), make_session()) == [
        "a reference, whose launches show the speed of the machine only during that session"
    ]


def test_outside_of_git_nothing_goes_on() -> None:
    assert differences(make_session(commit=None), make_session(commit=None)) == [
        "cases that are not in git, so it is unknown whether they have changed"
    ]


@pytest.mark.parametrize(
    ("outcome", "failure", "decided"),
    [
        *(
            (outcome, None, True)
            for outcome in ("passed", "improved", "regressed", "recorded", "inconclusive")
        ),
        ("unhealthy", None, False),
        *(("failed", kind, True) for kind in ("crash", "timeout", "out_of_memory", "loss")),
        *(("failed", kind, True) for kind in ("mismatch", "missing_metric")),
        *(("failed", kind, False) for kind in ("cancelled", "error", "missing_report", "no_baseline")),
    ],
)
def test_keeps_verdicts_on_code_not_on_machines(outcome: Any, failure: Any, decided: bool) -> None:
    verdict = never_run().verdict.replace(outcome=outcome, failure=failure)
    assert is_decided(never_run().replace(verdict=verdict)) is decided


def test_resumes_the_newest_session_but_a_dry_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second, *later = (f"2026010{day}-000000-000000" for day in (1, 2, 3, 4))
    for name in (first, second):
        write_session(store.sessions / name, status="interrupted")
    dry = make_result(make_run(dry=True), before=None)
    write_session(store.sessions / later[0], dry)
    write_session(store.sessions / later[1], dry=True)
    directory, content = newest(store, make_session())
    assert (directory.name, content.commit) == (second, COMMIT)


UNDECIDED = make_result(make_run(), verdict=Verdict(outcome="unhealthy", launches=1), before=None)
NOT_REACHED = Skipped(nodeid="two", case_id="two", framework="fake", reason="no time", not_reached=True)


@pytest.mark.parametrize(
    ("results", "changes", "goes_on"),
    [
        ((make_result(make_run(), before=None),), {}, False),
        ((make_result(make_run(), before=None),), {"status": "interrupted"}, True),
        ((make_result(make_run(), before=None),), {"status": "running"}, True),
        ((make_result(make_run(), before=None), UNDECIDED), {}, True),
        ((make_result(make_run(), before=None),), {"skipped": (NOT_REACHED,)}, True),
        ((make_result(make_run(), before=None),), {"interrupted_case": "c"}, True),
    ],
)
def test_a_session_goes_on_if_something_is_left(
    tmp_path: Path, results: Any, changes: dict[str, Any], goes_on: bool
) -> None:
    """Otherwise a night would show the verdicts of the night before, and measure nothing."""
    store = Store(tmp_path)
    write_session(store.sessions / "20260101-000000-000000", *results, **changes)
    if goes_on:
        newest(store, make_session())
    else:
        with pytest.raises(FileError, match="has decided all of its cases"):
            newest(store, make_session())


def test_why_no_session_goes_on_is_one_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(FileError, match=f"no session in {store.sessions}"):
        newest(store, make_session())
    file = write_session(store.sessions / "20260101-000000-000000")
    other = CONDITIONS.replace(options={}, environment=dict.fromkeys("abcdef", "1"))
    with pytest.raises(FileError) as caught:
        newest(store, make_session(conditions=other))
    assert str(caught.value) == (
        f"the newest session, {file.parent}, has --perf-inject nothing, not unset; torch 2.13.0, not unset; "
        "a unset, not 1; b unset, not 1; c unset, not 1; and 3 more"
    )
    file.write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        newest(store, make_session())


def test_part_left_running_was_killed() -> None:
    parts = [
        PytestRun(started_at="2026-01-02T03:04:05+00:00", status=status, cases=3)
        for status in ("complete", "running", "interrupted")
    ]
    assert [part.status for part in ended(tuple(parts))] == ["complete", "interrupted", "interrupted"]
