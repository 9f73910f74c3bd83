from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.history import store
from perfsuite.history.store import StoredSession
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, PytestRun
from tests.samples import (
    ARMS,
    COMMIT,
    judged,
    make_case,
    make_compared,
    make_figures,
    make_gpu_machine,
    make_machine,
    make_result,
    make_run,
    never_run,
    write_session,
)

VERSIONS = Path(__file__).parent / "data"
"""A history of each schema version there ever was, in a directory named after it."""

SEEN = Observed(settings={"wrapper": "DDP"}, environment={"torch": "2.13.0"})
FIGURES = make_figures(step_s_p50=0.2560001, step_s_mean=0.26, probe_s_p50=0.001)
RUN = make_run(figures=FIGURES, observed=SEEN, device_probe={"matmul_tflops": 1.23456789})


def kept(*runs: Run) -> Measurement:
    """Whatever was measured, it was a good measurement."""
    return make_result(RUN, before=None).replace(runs=runs, case_id=runs[0].case.id)


def sessions_of(directory: Path) -> list[StoredSession]:
    cases = store.read_cases(directory)
    return [place.read(cases) for place in store.places(directory)]


def only_session(directory: Path) -> StoredSession:
    [session] = sessions_of(directory)
    return session


def add_one(tmp_path: Path, *results: Measurement, **changes: Any) -> store.Added:
    return store.add(tmp_path / "history", write_session(tmp_path, *results, **changes))


# What is kept


def test_a_session_is_found_by_hardware_class_commit_and_case(tmp_path: Path) -> None:
    added = add_one(tmp_path, kept(RUN, RUN))
    [written] = added.written
    assert (added.kept, added.known, added.left_out) == (1, False, [])
    assert written.parent == tmp_path / "history" / "cpu-test-2c" / COMMIT
    assert written.name.startswith("20260102T030405Z-")
    session = only_session(tmp_path / "history")
    assert (session.hardware_class, session.commit, session.perfsuite) == ("cpu-test-2c", COMMIT, "0.1")
    [(name, case)] = store.read_cases(tmp_path / "history").items()
    assert session.results[0].case == name
    assert (case.id, case.parameters) == (make_case().id, make_case().parameters)
    assert case.case == documents.plain(make_case())


def test_medians_of_each_launch_are_kept_as_far_as_they_mean_something_and_no_step_series(
    tmp_path: Path,
) -> None:
    gap = RUN.replace(figures=FIGURES.replace(peak_memory_bytes=None, step_s_mean=math.nan))
    [written] = add_one(tmp_path, kept(RUN, gap)).written
    [result] = only_session(tmp_path / "history").results
    assert result.step_s_p50 == (0.256, 0.256)
    assert result.step_s_mean == (0.26, None)
    assert result.probe_s_p50 == (0.001, 0.001)
    assert result.peak_memory_bytes == (64.0 * 2**20, None)
    assert result.tokens_per_step == 256
    assert result.device_probe == {"matmul_tflops": 1.23457}
    assert 'step_s"' not in written.read_text()


def test_settings_and_environments_are_kept_once(tmp_path: Path) -> None:
    bumped = RUN.replace(observed=SEEN.replace(environment={"torch": "2.14.0"}))
    runs = (RUN, RUN.replace(case=make_case(micro_batch=4)), bumped.replace(case=make_case(micro_batch=8)))
    add_one(tmp_path, *map(kept, runs))
    session = only_session(tmp_path / "history")
    assert session.settings == ({"wrapper": "DDP"},)
    assert session.environments == ({"torch": "2.13.0"}, {"torch": "2.14.0"})
    assert [(each.settings, each.environment) for each in session.results] == [(0, 0), (0, 0), (0, 1)]


def test_a_machine_with_gpus_that_also_ran_cpu_cases_is_kept_as_two_classes(tmp_path: Path) -> None:
    gpu = kept(RUN.replace(machine=make_gpu_machine()))
    added = add_one(tmp_path, kept(RUN), gpu)
    found = store.places(tmp_path / "history")
    assert {place.hardware_class for place in found} == {"cpu-test-2c", "h100-80gb-sxm"}
    assert (added.kept, len(added.written)) == (2, 2)
    [of_gpu] = store.places(tmp_path / "history", hardware_class="h100*")
    assert of_gpu.read(store.read_cases(tmp_path / "history")).machine == make_gpu_machine()


def test_a_case_that_changed_under_its_name_is_kept_beside_the_old_one(tmp_path: Path) -> None:
    add_one(tmp_path, kept(RUN))
    add_one(tmp_path, kept(RUN.replace(case=make_case(timeout_s=5))), started_at="2026-01-03T00:00:00Z")
    cases = store.read_cases(tmp_path / "history")
    assert len(cases) == 2
    assert {case.id for case in cases.values()} == {make_case().id}


# Adding again, and side by side


def test_adding_a_session_again_changes_nothing_whatever_its_file_is_called(tmp_path: Path) -> None:
    def files() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in (tmp_path / "history").rglob("*.json")}

    add_one(tmp_path, kept(RUN))
    before, copy = files(), tmp_path / "elsewhere.json"
    copy.write_text(json.dumps(json.loads((tmp_path / "results.json").read_text())))
    added = store.add(tmp_path / "history", copy)
    assert (added.written, added.known, added.kept) == ([], True, 1)
    assert files() == before
    add_one(tmp_path, kept(RUN, RUN))
    assert len({place.file for place in store.places(tmp_path / "history")}) == 2
    assert len(store.read_cases(tmp_path / "history")) == 1


def test_what_was_added_while_a_session_ran_is_kept_once_and_by_the_part_that_measured_it(
    tmp_path: Path,
) -> None:
    first, second = "2026-01-02T03:04:05+00:00", "2026-01-02T09:00:00+00:00"
    early = kept(RUN.replace(started_at=first))
    again = kept(RUN.replace(started_at=first, case=make_case(micro_batch=8)))
    late = kept(RUN.replace(started_at="2026-01-02T09:00:01+00:00", case=make_case(micro_batch=4)))
    killed = PytestRun(started_at=first, status="running", cases=1)
    went_on = (killed.replace(status="interrupted"), PytestRun(started_at=second, status="complete", cases=1))
    add_one(tmp_path, early, parts=(killed,), status="running")
    assert len(add_one(tmp_path, early, again, parts=(killed,), status="running").written) == 1
    added = add_one(tmp_path, early, again, late, parts=went_on)
    assert (added.known, added.kept, len(added.written)) == (True, 3, 1)
    sessions = sessions_of(tmp_path / "history")
    assert [each.started_at.isoformat() for each in sessions] == [first, first, second]
    assert [len(each.results) for each in sessions] == [1, 1, 1]
    assert add_one(tmp_path, early, again, late, parts=went_on).written == []


def test_histories_that_grew_apart_merge_by_copying_files(tmp_path: Path) -> None:
    """What git does: no file of one side has other content on the other side."""
    for side, day in (("a", 1), ("b", 2)):
        file = write_session(tmp_path, kept(RUN), started_at=f"2026-01-0{day}T00:00:00Z")
        store.add(tmp_path / side, file)
    a, b = (
        {file.relative_to(root): file.read_text() for file in root.rglob("*.json")}
        for root in (tmp_path / "a", tmp_path / "b")
    )
    [both] = a.keys() & b.keys()
    assert a[both] == b[both]


# What is not kept


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"commit": None}, "names no commit: run it in a git repository"),
        ({"dirty": True}, "uncommitted changes on 0123abcd: no commit says what was measured"),
    ],
)
def test_a_session_without_a_clean_commit_is_left_out(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    added = add_one(tmp_path, kept(RUN), **changes)
    assert reason in added.left_out[0]
    assert (added.written, added.kept) == ([], 0)
    with pytest.raises(FileError, match=r"no history in .*\. Add sessions to one: perfsuite history"):
        store.places(tmp_path / "history")


def test_injected_failed_and_empty_results_are_left_out_and_named(tmp_path: Path) -> None:
    injected = make_result(RUN.replace(inject="slowdown=30%"))
    failed = make_result(RUN.replace(failure=Failure(kind="crash", message="boom")))
    timeless = kept(RUN.replace(figures=FIGURES.replace(step_s_p50=None)))
    sick = judged(kept(RUN, RUN.replace(figures=FIGURES.replace(step_s_p50=9))), unhealthy_launches=(2,))
    # More memory is told of a throttled GPU, too; its speed is none.
    throttled = judged(kept(RUN, RUN), outcome="regressed", unhealthy_launches=(1, 2))
    added = add_one(tmp_path, injected, failed, never_run(), timeless, throttled, sick)
    reasons = ["a fault was injected", *["failed, which measures nothing"] * 2, "no launch has a step time"]
    reasons.append("no launch on a healthy machine")
    assert added.left_out == [f"{make_case().id}: {reason}" for reason in reasons]
    [only] = only_session(tmp_path / "history").results
    assert (added.kept, only.step_s_p50) == (1, (0.256,))


def test_a_commit_or_a_hardware_class_that_is_none_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"results\.json: .*commit: String should match.*'\.\./\.\./etc'"):
        add_one(tmp_path, kept(RUN), commit="../../etc")
    with pytest.raises(FileError, match="hardware_class: String should match"):
        add_one(tmp_path, kept(RUN.replace(machine=make_machine(hardware_class="../x"))))
    with pytest.raises(FileError, match=r"it compares 'main X=1' and '\.', and is no session"):
        add_one(tmp_path, make_compared(), arms=ARMS)


# Reading


def test_a_file_must_stand_where_its_content_says_and_other_files_are_left_alone(tmp_path: Path) -> None:
    [written] = add_one(tmp_path, kept(RUN)).written
    settings = tmp_path / "history/.github/workflows/settings.json"
    moved = written.parents[1] / ("f" * 40) / written.name
    for file in (settings, moved):
        file.parent.mkdir(parents=True)
    settings.write_text("{}")
    name = only_session(tmp_path / "history").results[0].case
    [place] = store.places(tmp_path / "history")
    with pytest.raises(FileError, match=rf"its case is missing, restore .*/cases/{name}\.json"):
        place.read({})
    written.rename(moved)
    with pytest.raises(FileError, match="it holds a session on cpu-test-2c at 0123abcd"):
        store.places(tmp_path / "history")[0].read({})


def test_cases_and_sessions_can_be_chosen(tmp_path: Path) -> None:
    add_one(tmp_path, kept(RUN), kept(RUN.replace(case=make_case(micro_batch=4))))
    add_one(tmp_path, kept(RUN), started_at="2026-02-01T01:00:00+02:00")
    directory = tmp_path / "history"
    cases = store.read_cases(directory)
    assert {cases[name].id for name in store.matching(cases, "*-b4-*")} == {make_case(micro_batch=4).id}
    assert store.matching(cases, "*") == set(cases)
    days = [place.day for place in store.places(directory)]
    assert days == ["20260102", "20260131"]
    assert [p.day for p in store.places(directory, since=datetime(2026, 1, 3))] == ["20260131"]


@pytest.mark.parametrize("version", sorted(path.name for path in VERSIONS.iterdir()))
def test_histories_of_every_schema_version_can_be_read(version: str) -> None:
    session = only_session(VERSIONS / version)
    [result] = session.results
    assert session.commit == COMMIT
    assert session.environments[result.environment] == {"torch": "2.13.0"}
    assert result.step_s_p50 == (0.256, 0.257)
    assert store.read_cases(VERSIONS / version)[result.case].id == make_case().id
    written = {str(kind.model_fields["schema_version"].default) for kind in (StoredSession, store.StoredCase)}
    assert written <= {path.name for path in VERSIONS.iterdir()}
