from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.launch.arm import HERE
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import Store
from perfsuite.session.against_arm import AgainstArm
from perfsuite.session.mode import Trial
from perfsuite.session.outputs import lines
from perfsuite.session.record import Record
from perfsuite.session.session import Session
from tests.samples import BEFORE, make_case, make_result, make_run, never_run, now
from tests.session.making import PASSED, RECORDED, Sessions, make_setup
from tests.suite import waiver


def test_unsaved_session_writes_nothing(sessions: Sessions) -> None:
    sessions.launch(make_run())
    ours = sessions.make()
    ours.record.saves = False
    ours.measure(make_case(), "test")
    assert Store(sessions.directory / "store").results() == []


def test_reports_unwritable_results_once(sessions: Sessions) -> None:
    sessions.launch(make_run())
    (sessions.directory / "store").write_text("in the way")
    ours = sessions.make()
    assert ours.measure(make_case(), "test").outcome == "passed"
    (line,) = [line for line in sessions.said if "cannot write" in line]
    assert str(ours.record.directory.results) in line
    assert line.endswith("The session continues, and shows its results when it ends")


def test_a_result_ends_the_running_case(sessions: Sessions) -> None:
    record = sessions.make().record
    case = make_case()
    launches = record.begin(case)
    launches.runs.append(make_run())
    running = record.session_file("running")
    record.add(case, "test", record.directory.case(case.id), Trial.of(launches, PASSED))
    saved = documents.read(record.directory.results, SessionFile)
    assert (running.interrupted_case, len(running.interrupted_launches)) == (case.id, 1)
    assert (saved.interrupted_case, saved.interrupted_launches) == (None, ())
    assert saved.results[0].runs == (make_run(),)


def test_only_the_running_case_has_launches(sessions: Sessions) -> None:
    record = sessions.make().record
    launches = record.begin(make_case())
    launches.add_pair(make_run(), make_run())
    assert record.launches_of(make_case()).all == [make_run()] * 2
    assert record.launches_of(make_case(micro_batch=3)).all == []


def test_a_new_result_replaces_that_of_an_earlier_part(sessions: Sessions) -> None:
    earlier = sessions.make().record
    kept = make_result(now()).replace(nodeid="one")
    old = kept.replace(nodeid="two")
    earlier.results = [old, kept]
    record = sessions.make().record
    record.go_on(earlier.directory, earlier.session_file("interrupted"))
    new = old.replace(verdict=RECORDED)
    record.keep(new)
    assert record.results == [kept, new]


@pytest.fixture
def interrupted(sessions: Sessions) -> Record:
    """Return the record of a session that was interrupted after a launch of its case."""
    record = sessions.make().record
    record.begin(make_case()).runs.append(make_run())
    return record


def resumed(sessions: Sessions, earlier: Record) -> Record:
    """Return the record of a session that continues an interrupted one."""
    record = sessions.make().record
    record.go_on(earlier.directory, earlier.session_file("interrupted"))
    return record


def test_an_interrupted_case_is_kept_on(sessions: Sessions, interrupted: Record) -> None:
    record = resumed(sessions, resumed(sessions, interrupted))
    written = record.session_file("complete")
    assert (written.interrupted_case, written.interrupted_launches) == (make_case().id, (make_run(),))


def test_a_result_ends_an_earlier_interrupt(sessions: Sessions, interrupted: Record) -> None:
    record = resumed(sessions, interrupted)
    record.keep(make_result(make_run(), before=None))
    written = record.session_file("complete")
    assert (written.interrupted_case, written.interrupted_launches) == (None, ())


def test_a_second_interrupt_forgets_no_case(sessions: Sessions, interrupted: Record) -> None:
    record = resumed(sessions, interrupted)
    other = make_case(micro_batch=3)
    record.begin(other).runs.append(make_run(case=other))
    written = resumed(sessions, record).session_file("complete")
    assert (written.interrupted_case, written.interrupted_before) == (other.id, (make_case().id,))
    assert written.interrupted_launches == (make_run(), make_run(case=other))


def test_a_resumed_session_keeps_its_skipped_files(sessions: Sessions) -> None:
    earlier = sessions.make().record
    earlier.skip_file("test_a.py", "no such package")
    record = sessions.make().record
    record.skip_file("test_b.py", "no such package")
    record.go_on(earlier.directory, earlier.session_file("interrupted"))
    assert [skip.nodeid for skip in record.skipped] == ["test_a.py", "test_b.py"]


def test_a_result_of_a_file_ends_its_skip(sessions: Sessions) -> None:
    record = sessions.make().record
    record.skip_file("test_a.py", "no such package")
    record.skip_file("test_b.py", "no such package")
    record.keep(make_result(now()).replace(nodeid="test_a.py::test_it"))
    assert [skip.nodeid for skip in record.skipped] == ["test_b.py"]


def test_a_regression_in_shadow_mode_fails_nothing(sessions: Sessions) -> None:
    record = sessions.make(shadow=True).record
    trial = Trial(verdict=PASSED.replace(outcome="regressed"), runs=(make_run(),))
    result = record.add(make_case(), "test", record.directory.case("x"), trial)
    assert (result.shadow, record.tally.failing) == (True, [])


def waived_session(sessions: Sessions, *waivers: str) -> Session:
    """Write a file with these waivers, and return a session that measured a slow case."""
    (sessions.directory / "perf-waivers.toml").write_text("".join(waivers))
    slow = make_result(*[now(tokens_per_s=50_000)] * 3)
    sessions.launch(*slow.runs, verdict=slow.verdict)
    ours = sessions.make()
    ours.measure(BEFORE.case, "test")
    return ours


def test_waived_regression_passes_after_judgement(sessions: Sessions) -> None:
    ours = waived_session(sessions, waiver(tolerated="60%"), waiver(tolerated="60%", metric="tokens"))
    ours.record.collected = frozenset({BEFORE.case.id})
    (result,) = documents.read(ours.record.directory.results, SessionFile).results
    assert (result.outcome, result.excused) == ("regressed", "waived")
    assert result.waivers == (
        "waived: tokens/s -49.4%: 60% tolerated until 2999-12-31, owner @me, issue https://example.org/1",
    )
    assert not ours.setup.options.is_failing(result)
    assert (ours.record.tally.judged, ours.record.tally.nothing_measured) == (1, False)
    (said,) = ours.record.session_file("complete").waivers
    assert "the waiver of tokens for fake-* matches no metric or count" in said
    assert f"note: {said}" in lines(ours.record, whole=False, color=False, width=None)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tolerated": "20%"}, "beyond the waiver"),
        ({"tolerated": "60%", "until": "2026-01-31"}, "ended on 2026-01-31"),
    ],
)
def test_invalid_waiver_leaves_a_regression_red(sessions: Sessions, fields: dict[str, str], why: str) -> None:
    ours = waived_session(sessions, waiver(**fields))
    (result,) = ours.record.results
    assert (result.excused, ours.setup.options.is_failing(result)) == (None, True)
    assert why in result.waivers[0]


def later_part(sessions: Sessions, earlier: Session, day: str) -> Record:
    """Return the record of a session that continues an earlier one on another day."""
    record = sessions.make().record
    record.started_at = f"{day}T03:04:05+00:00"
    record.go_on(earlier.record.directory, earlier.record.session_file("interrupted"))
    return record


def test_a_kept_result_needs_a_waiver_of_today(sessions: Sessions) -> None:
    ours = waived_session(sessions, waiver(tolerated="60%", until="2999-12-30"))
    (result,) = later_part(sessions, ours, "2999-12-31").results
    assert result.excused is None
    assert result.waivers[0].startswith(
        "not waived: tokens/s -49.4%: the waiver of tokens/s for fake-* ended"
    )


def test_an_ended_waiver_fails_the_resumed_session(sessions: Sessions) -> None:
    ours = waived_session(sessions, waiver(tolerated="60%", until="2999-12-30"))
    assert ours.record.tally.failing == []
    assert len(later_part(sessions, ours, "2999-12-31").tally.failing) == 1


def test_a_kept_result_keeps_its_valid_waiver(sessions: Sessions) -> None:
    ours = waived_session(sessions, waiver(tolerated="60%"))
    assert later_part(sessions, ours, "2999-12-31").results == ours.record.results


def test_a_known_issue_stays_excused(sessions: Sessions) -> None:
    ours = waived_session(sessions, waiver(tolerated="60%"))
    known = never_run().replace(excused="known issue")
    ours.record.results = [known]
    assert later_part(sessions, ours, "2999-12-31").results == [known]


def test_bad_waiver_file_fails_before_measuring(sessions: Sessions) -> None:
    (sessions.directory / "perf-waivers.toml").write_text("[[waiver]]\ncase = 'x'")
    with pytest.raises(FileError, match=r"required, but missing: waiver\.0\.metric, waiver\.0\."):
        sessions.make()


def test_two_arms_are_compared_without_waivers(tmp_path: Path) -> None:
    (tmp_path / "perf-waivers.toml").write_text("not TOML")
    made = make_setup(tmp_path, [])
    assert Record(AgainstArm(made, (HERE, HERE))).waivers == ()
