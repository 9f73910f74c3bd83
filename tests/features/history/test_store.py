import json
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.features.history import store
from perfsuite.features.history.store import StoredReference, StoredSession
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run import Run
from perfsuite.results.session_file import ArmFacts, MachineChange, Measurement, PytestRun, SessionReference
from tests import samples
from tests.case.test_framework import read_case
from tests.samples import COMMIT, judged, make_case, make_machine, make_result, never_run, write_session

VERSIONS = Path(__file__).parent / "data"
"""Directories that are named after a schema version. Each has a history of this version."""

SEEN = Observed(settings={"wrapper": "DDP"}, environment={"torch": "2.13.0"})
FIGURES = samples.make_figures(step_s_p50=0.2560001, step_s_mean=0.26, probe_s_p50=0.001)
RUN = samples.make_run(figures=FIGURES, observed=SEEN, device_probe={"matmul_tflops": 1.23456789})


def kept(*runs: Run) -> Measurement:
    """Return a result with these launches and a good verdict, even if the launches measured nothing."""
    return make_result(RUN, before=None).replace(runs=runs, case_id=runs[0].case.id)


def of_batch(micro_batch: int, **changes: Any) -> Run:
    return RUN.replace(case=make_case(micro_batch=micro_batch), **changes)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return tmp_path / "history"


def add(history: Path, *results: Measurement, **changes: Any) -> store.Added:
    return store.add(history, write_session(history.parent, *results, **changes))


def sessions_of(history: Path) -> list[StoredSession]:
    cases = store.read_cases(history)
    return [place.read(cases) for place in store.places(history)]


def test_adding_names_the_file_by_class_commit_and_time(history: Path) -> None:
    added = add(history, kept(RUN, RUN))
    [written] = added.written
    assert (added.kept, added.was_added_before, added.left_out) == (1, False, [])
    assert written.parent == history / "cpu-test-2c" / COMMIT
    assert written.name.startswith("20260102T030405Z-")


def test_finds_a_session_by_class_commit_and_case(history: Path) -> None:
    add(history, kept(RUN, RUN))
    [session] = sessions_of(history)
    assert (session.hardware_class, session.commit, session.perfsuite) == ("cpu-test-2c", COMMIT, "0.1")
    [(name, case)] = store.read_cases(history).items()
    assert session.results[0].case == name
    assert (case.id, case.parameters) == (make_case().id, make_case().parameters)
    assert case.case == documents.plain(make_case())


def test_keeps_launch_medians_and_no_steps(history: Path) -> None:
    gap = RUN.replace(figures=FIGURES.replace(peak_memory_bytes=None, step_s_mean=math.nan))
    [written] = add(history, kept(RUN, gap)).written
    [result] = sessions_of(history)[0].results
    assert (result.step_s_p50, result.step_s_mean) == ((0.256, 0.256), (0.26, None))
    assert (result.probe_s_p50, result.peak_memory_bytes) == ((0.001, 0.001), (64.0 * 2**20, None))
    assert (result.tokens_per_step, result.device_probe) == (256, {"matmul_tflops": 1.23457})
    assert 'step_s"' not in written.read_text()


def test_settings_and_environments_are_kept_once(history: Path) -> None:
    bumped = SEEN.replace(environment={"torch": "2.14.0"})
    add(history, *map(kept, (RUN, of_batch(4), of_batch(8, observed=bumped))))
    [session] = sessions_of(history)
    assert session.settings == ({"wrapper": "DDP"},)
    assert session.environments == ({"torch": "2.13.0"}, {"torch": "2.14.0"})
    assert [(result.settings, result.environment) for result in session.results] == [(0, 0), (0, 0), (0, 1)]


def test_mixed_machine_is_kept_as_two_classes(history: Path) -> None:
    added = add(history, kept(RUN), kept(RUN.replace(machine=samples.make_gpu_machine())))
    assert {place.hardware_class for place in store.places(history)} == {"cpu-test-2c", "h100-80gb-sxm"}
    assert (added.kept, len(added.written)) == (2, 2)
    [of_gpu] = store.places(history, hardware_class="h100*")
    assert of_gpu.read(store.read_cases(history)).machine == samples.make_gpu_machine()


def test_failure_before_a_launch_is_kept_in_its_class(history: Path) -> None:
    failed = kept(RUN).replace(runs=(), planned_class="h100-80gb-sxm-8xib400")
    add(history, failed)
    assert {place.hardware_class for place in store.places(history)} == {"h100-80gb-sxm-8xib400"}


CHANGE = MachineChange(
    metric="tokens_per_s",
    hardware_class=RUN.machine.hardware_class,
    change=-0.01,
    interval=(-0.013, -0.007),
    case_sigma=0.002,
    canaries=(RUN.case.id, "another"),
)
ARM = ArmFacts(text="image=base", facts={})


def test_keeps_the_change_of_the_reference(history: Path) -> None:
    result = kept(RUN).replace(judged_by="abc")
    others = (CHANGE.replace(metric="cpu_s_per_step"), CHANGE.replace(hardware_class="h100-80gb-sxm"))
    add(history, result, reference=SessionReference(arm=ARM, changes=(*others, CHANGE)))
    [session] = sessions_of(history)
    assert session.reference == StoredReference(
        change=-0.01, interval=(-0.013, -0.007), baselines={RUN.case.id: "abc"}
    )


def test_a_reference_that_showed_nothing_is_unknown(history: Path) -> None:
    add(history, kept(RUN), reference=SessionReference(arm=ARM, problems=("it crashed",)))
    assert [session.reference for session in sessions_of(history)] == [None]


def since(**baselines: str) -> StoredReference:
    return StoredReference(change=0.0, interval=(0.0, 0.0), baselines=baselines)


@pytest.mark.parametrize(
    ("other", "is_comparable"),
    [
        (since(b="1", c="1"), True),
        (since(a="2", b="1"), False),
        (since(c="1"), False),
        (since(), False),
    ],
    ids=["one in common", "one differs", "none in common", "none"],
)
def test_changes_since_the_same_baselines_are_comparable(other: StoredReference, is_comparable: bool) -> None:
    assert since(a="1", b="1").is_comparable(other) is is_comparable


def test_changed_case_is_kept_beside_the_old(history: Path) -> None:
    add(history, kept(RUN))
    add(history, kept(RUN.replace(case=make_case(timeout_s=5))), started_at="2026-01-03T00:00:00Z")
    assert [case.id for case in store.read_cases(history).values()] == [make_case().id] * 2


def test_adding_a_session_twice_changes_nothing(history: Path) -> None:
    def files() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in history.rglob("*.json")}

    add(history, kept(RUN))
    before = files()
    copy = history.parent / "elsewhere.json"
    copy.write_text(json.dumps(json.loads((history.parent / "results.json").read_text())))
    added = store.add(history, copy)
    assert (added.written, added.was_added_before, added.kept) == ([], True, 1)
    assert files() == before
    add(history, kept(RUN, RUN))
    assert len({place.file for place in store.places(history)}) == 2
    assert len(store.read_cases(history)) == 1


def test_keeps_results_once_by_their_session_part(history: Path) -> None:
    first = "2026-01-02T03:04:05+00:00"
    second = "2026-01-02T09:00:00+00:00"
    early = kept(RUN.replace(started_at=first))
    again = kept(of_batch(8, started_at=first))
    late = kept(of_batch(4, started_at="2026-01-02T09:00:01+00:00"))
    killed = PytestRun(started_at=first, status="running", cases=1)
    went_on = (killed.replace(status="interrupted"), PytestRun(started_at=second, status="complete", cases=1))
    add(history, early, parts=(killed,), status="running")
    assert len(add(history, early, again, parts=(killed,), status="running").written) == 1
    added = add(history, early, again, late, parts=went_on)
    assert (added.was_added_before, added.kept, len(added.written)) == (True, 3, 1)
    sessions = [(session.started_at.isoformat(), len(session.results)) for session in sessions_of(history)]
    assert sessions == [(first, 1), (first, 1), (second, 1)]
    assert add(history, early, again, late, parts=went_on).written == []


def test_keeps_results_of_a_missing_framework(history: Path, tmp_path: Path) -> None:
    run = RUN.replace(case=read_case(tmp_path, name="gone", stage=2))
    add(history, kept(run))
    (case,) = history.glob("**/cases/*.json")
    assert case.name.startswith(f"{run.case.id}.")


def test_diverged_histories_merge_by_copying(tmp_path: Path) -> None:
    """Merging only copies files, as in git, because a file has the same content on both sides."""
    a = tmp_path / "a"
    b = tmp_path / "b"
    for day, side in enumerate((a, b), 1):
        add(side, kept(RUN), started_at=f"2026-01-0{day}T00:00:00Z")
    of_a, of_b = (
        {file.relative_to(side): file.read_text() for file in side.rglob("*.json")} for side in (a, b)
    )
    [both] = of_a.keys() & of_b.keys()
    assert of_a[both] == of_b[both]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"commit": None}, "has no commit: run it in a git repository"),
        ({"dirty": True}, "uncommitted changes on 0123abcd: no commit has the measured code"),
    ],
    ids=["no commit", "uncommitted"],
)
def test_without_a_clean_commit_nothing_is_kept(history: Path, changes: dict[str, Any], reason: str) -> None:
    added = add(history, kept(RUN), **changes)
    assert reason in added.left_out[0]
    assert (added.written, added.kept) == ([], 0)
    with pytest.raises(FileError, match=r"no history in .*\. Add sessions with: perfsuite history"):
        store.places(history)


def test_excludes_injected_and_failed_results(history: Path) -> None:
    injected = make_result(RUN.replace(inject="slowdown=30%"))
    failed = make_result(RUN.replace(failure=Failure(kind="crash", message="boom")))
    timeless = kept(RUN.replace(figures=FIGURES.replace(step_s_p50=None)))
    sick = judged(kept(RUN, RUN.replace(figures=FIGURES.replace(step_s_p50=9))), unhealthy_launches=(2,))
    # A throttled GPU regressed in speed and memory. Only the result about memory is kept.
    throttled = judged(kept(RUN, RUN), outcome="regressed", unhealthy_launches=(1, 2))
    added = add(history, injected, failed, never_run(), timeless, throttled, sick)
    reasons = ["a fault was injected", *["failed, which measures nothing"] * 2, "no launch has a step time"]
    reasons.append("no launch on a healthy machine")
    assert added.left_out == [f"{make_case().id}: {reason}" for reason in reasons]
    [only] = sessions_of(history)[0].results
    assert (added.kept, only.step_s_p50) == (1, (0.256,))


def test_misplaced_file_is_an_error_that_names_it(history: Path) -> None:
    with pytest.raises(FileError, match=r"results\.json: .*commit: String should match.*'\.\./\.\./etc'"):
        add(history, kept(RUN), commit="../../etc")
    with pytest.raises(FileError, match="hardware_class: String should match"):
        add(history, kept(RUN.replace(machine=make_machine(hardware_class="../x"))))
    with pytest.raises(FileError, match=r"its session compares 'main X=1' and '\.', but each session"):
        add(history, samples.make_compared(), arms=samples.ARMS)
    [written] = add(history, kept(RUN)).written
    documents.write_text(history / ".github/workflows/settings.json", "{}")
    [place] = store.places(history)
    [name] = store.read_cases(history)
    with pytest.raises(FileError, match=rf"a case of this session is missing. Restore .*/cases/{name}\.json"):
        place.read({})
    moved = written.parents[1] / ("f" * 40)
    written.parent.rename(moved)
    with pytest.raises(FileError, match="the session ran on cpu-test-2c at 0123abcd"):
        store.places(history)[0].read({})


def test_cases_and_sessions_can_be_chosen(history: Path) -> None:
    add(history, kept(RUN), kept(of_batch(4)))
    add(history, kept(RUN), started_at="2026-02-01T01:00:00+02:00")
    cases = store.read_cases(history)
    assert [cases[name].id for name in store.matching(cases, "*-b4-*")] == [make_case(micro_batch=4).id]
    assert store.matching(cases, "*") == set(cases)
    assert [place.day for place in store.places(history)] == ["20260102", "20260131"]
    assert [place.day for place in store.places(history, since=datetime(2026, 1, 3))] == ["20260131"]


@pytest.mark.parametrize("version", sorted(path.name for path in VERSIONS.iterdir()))
def test_reads_histories_of_every_schema_version(version: str) -> None:
    [session] = sessions_of(VERSIONS / version)
    [result] = session.results
    assert session.commit == COMMIT
    assert session.environments[result.environment] == {"torch": "2.13.0"}
    assert result.step_s_p50 == (0.256, 0.257)
    assert store.read_cases(VERSIONS / version)[result.case].id == make_case().id
    written = {str(kind.model_fields["schema_version"].default) for kind in (StoredSession, store.StoredCase)}
    assert written <= {path.name for path in VERSIONS.iterdir()}


def edited(file: Path, edit: Callable[[Any], object]) -> Path:
    """Edit a file of a history, and put the digest of the new content into the file's name."""
    content = json.loads(file.read_text())
    edit(content)
    file.unlink()
    renamed = file.with_name(f"{file.stem[:-12]}{documents.digest(content, 12)}.json")
    renamed.write_text(json.dumps(content))
    return renamed


def test_refuses_a_file_unlike_its_name(history: Path) -> None:
    [written] = add(history, kept(RUN)).written
    [case] = (history / "cases").iterdir()
    for file in (written, case):
        whole = file.read_text()
        file.write_text(whole.replace("fake", "fale", 1).replace('"passed"', '"improved"'))
        with pytest.raises(FileError, match=r"its name ends with .* it was edited or damaged"):
            sessions_of(history)
        file.write_text(whole)
    assert sessions_of(history)


@pytest.mark.parametrize("word", ["Regressed", "green", ""])
def test_a_word_that_no_verdict_has_is_refused(history: Path, word: str) -> None:
    [written] = add(history, kept(RUN)).written
    written = edited(written, lambda content: content["results"][0].update(outcome=word))
    with pytest.raises(FileError, match=r"field results\.0\.outcome: "):
        sessions_of(history)
    edited(written, lambda content: content.update(results=[], verdicts={"a": {"word": word}}))
    with pytest.raises(FileError, match=r"field verdicts\.a\.word: "):
        sessions_of(history)


@pytest.mark.parametrize("index", [-1, 1])
@pytest.mark.parametrize("name", ["settings", "environment"])
def test_an_index_outside_of_its_table_is_refused(history: Path, name: str, index: int) -> None:
    [written] = add(history, kept(RUN)).written
    edited(written, lambda content: content["results"][0].update({name: index}))
    with pytest.raises(FileError, match=rf"results\.0\.{name} is {index}, but the length of its table is 1"):
        sessions_of(history)
