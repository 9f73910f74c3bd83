from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.results.baseline import from_runs
from perfsuite.results.outcome import CountCheck
from perfsuite.results.profile import Profile, ProfileBaseline, RankProfileFile
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import SessionFile
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.unchanged import unless_unchanged
from tests.packages import Packages
from tests.samples import DISTURBED, make_figures, make_run, write_session
from tests.session.review.launches import CASE, MACHINE, REVIEWED, accept, accepted, keep, measured, told
from tests.synthetic import commit
from tests.traces import EAGER, launch_profile, make_profile, unseen_profile
from tests.twin_counts import launch

WITH_SDPA, EAGER_ATTENTION = (
    Observed(settings={"attention": kind}, environment={}) for kind in ("sdpa", "eager")
)
UNLIKE = "5 unlike the newest (observed attention is 'eager' instead of 'sdpa')"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"inject": "slowdown=30%"}, "5 injected"),
        ({"failure": {"kind": "crash", "message": "x"}}, "5 failed"),
        ({"observed": EAGER_ATTENTION}, UNLIKE),
    ],
)
def test_never_accepts_runs_without_evidence(repository: Path, changes: dict[str, Any], why: str) -> None:
    measured("1", 5, **changes)
    result = accept("2", 4, "--sessions", "2", status=1, observed=WITH_SDPA)
    assert "4 healthy launches, but a baseline needs 5" in result
    assert why in result
    assert "--perf-min-launches=5" in result
    assert not Path("baselines").exists()


SET_ASIDE = "set aside by their session, or not judged"
AS_BEFORE, SLOW = (make_figures(probe_s_p50=seconds) for seconds in (0.002, 0.02))
USUAL = make_run(case=CASE, machine=MACHINE, figures=AS_BEFORE)


def test_another_machine_needs_its_option(repository: Path) -> None:
    """The probe ran at two speeds on the same machine. The speed of the newest launch is accepted."""
    accept("1", 5, figures=AS_BEFORE)
    result = accept("2", 5, "--reason", "new", status=1, figures=SLOW, against=accepted())
    assert f"0 healthy launches, but a baseline needs 5 (left out: 5 {SET_ASIDE})" in result
    assert "give --another-machine" in result
    assert accepted().median("probe_s_p50") == 0.002
    told("accept", "--another-machine")
    assert accepted().median("probe_s_p50") == 0.02
    keep("3", [USUAL] * 4 + [USUAL.replace(figures=SLOW)] * 3, from_runs([USUAL] * 3))
    result = told("accept", "--another-machine", status=1)
    assert "3 healthy launches, but a baseline needs 5 (left out: 4 unhealthy)" in result


def test_excludes_launches_their_session_set_aside(repository: Path) -> None:
    """The session judged its launches against a local baseline. It set three aside, as its results show."""
    local = from_runs(measured("1", 3, figures=AS_BEFORE))
    keep("2", [USUAL] * 5 + [USUAL.replace(figures=SLOW)] * 3, local)
    assert f"left out: 3 {SET_ASIDE}" in told("accept", "--reason", "the first baseline")
    assert {launch.figures.probe_s_p50 for launch in accepted().launches} == {0.002}


def test_accepts_a_slower_night_on_which_nothing_changed(repository: Path) -> None:
    """Its verdict is `unhealthy`, but none of its launches was set aside: it is a session of the baseline."""
    same = Observed(settings={}, environment={"torch": "2.13.0"}, code="0123456789ab")
    accept("1", 5, observed=same)
    before = accepted()
    slower = [run.replace(observed=same) for run in measured("2", 5, tokens_per_s=20_000)]
    keep("2", slower, before, class_noise([before]))
    file = Path(".perfsuite/runs/2/results.json")
    (result,) = documents.read(file, SessionFile).results
    with_counts = result.verdict.replace(counts=CountCheck(outcome="passed"))
    verdict = unless_unchanged(with_counts, slower, before)
    assert (with_counts.outcome, verdict.outcome) == ("regressed", "unhealthy")
    write_session(file.parent, result.replace(verdict=verdict))
    told("accept", "--sessions", "2", "--reason", "nights differ")
    assert len({launch.session for launch in accepted().launches}) == 2
    assert len(accepted().launches) == 10


def test_never_accepts_a_disturbed_machine(repository: Path) -> None:
    measured("1", 5, health=DISTURBED)
    for options in ((), ("--reason", "I insist"), ("--another-machine",)):
        assert "0 healthy launches, but a baseline needs 5 (left out: 5 " in told(
            "accept", *options, status=1
        )


def test_never_accepts_unjudged_launches(repository: Path) -> None:
    """The results do not contain a case that was interrupted.

    If the results cannot be read, it is unknown which launches the session judged.
    """
    run = measured("1", 5)[0]
    results = Path(".perfsuite/runs/1/results.json")
    write_session(results.parent)
    assert f"(left out: 5 {SET_ASIDE})" in told("accept", status=1)
    results.write_text("{")
    result = told("accept", status=1)
    assert f"(left out: 5 {SET_ASIDE})" in result
    assert f"left out: {results}: not JSON" in result
    results.unlink()
    keep("1", [run] * 5 + [run.replace(failure=Failure(kind="crash", message="x"))])
    assert f"(left out: 1 failed, 5 {SET_ASIDE})" in told("accept", status=1)


def memory(mib: float | None) -> dict[str, Any]:
    """Return the changed fields of a launch with this peak memory."""
    return {"figures": make_figures(peak_memory_bytes=None if mib is None else mib * 2**20)}


FEW_STALLS, STALLS = ({"figures": make_figures(tokens_per_s_mean=mean)} for mean in (49_000, 40_000))
LOSS = tuple(5.0 - step / 100 for step in range(25))
WHY = "To accept it anyway, give --reason"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"tokens_per_s": 60_000}, None),
        ({}, {"tokens_per_s": 40_000}, f"tokens/s gets worse (50,150 -> 40,120). {WHY}"),
        (FEW_STALLS, STALLS, f"tokens/s with stalls gets worse (49,000 -> 40,000). {WHY}"),
        (FEW_STALLS, {**FEW_STALLS, "loss": LOSS}, "the loss between 0% and 10% of the steps is 4.9"),
        (memory(1), memory(0), None),
        (memory(0), memory(0), None),
        (memory(1), memory(1.004), None),
        (memory(0), memory(1), f"peak memory gets worse (0 bytes -> 1.00 MiB). {WHY}"),
        (memory(1), memory(1.006), f"peak memory gets worse (1.00 MiB -> 1.01 MiB). {WHY}"),
        (memory(0), memory(None), "peak memory is in the baseline, but was not measured"),
        (memory(None), memory(1), None),
    ],
)
def test_only_a_regression_needs_a_reason(
    repository: Path, before: dict[str, Any], now: dict[str, Any], said: str | None
) -> None:
    accept("1", 5, **before)
    held = accepted()
    shown = accept("2", 5, status=0 if said is None else 1, **now)
    if said is not None:
        assert said in shown
        assert WHY in shown or "was not measured" in said
        assert accepted() == held
        told("accept", "--reason", "torch 2.13 fixed a race")
        newer = accepted().accepted
        assert newer is not None
        assert newer.reason == "torch 2.13 fixed a race"
    assert {launch.session for launch in accepted().launches} == {"2"}


def test_pools_sessions_across_an_update(repository: Path) -> None:
    before, after = ({"torch": version, "nccl": "2.28"} for version in ("2.12.0", "2.13.0"))
    measured("1", 3, observed=Observed(settings={}, environment=before))
    measured("2", 2, inject="leak=20%")
    accept("3", 3, status=1, observed=Observed(settings={}, environment=after))
    result = told("accept", "--sessions", "3")
    changed = "  changes from older launches to the newest: torch: 2.12.0 -> 2.13.0\n"
    assert result.count(changed) == 1
    held = accepted()
    assert [launch.session for launch in held.launches] == ["1"] * 3 + ["3"] * 3
    assert held.observed is not None
    assert held.observed.environment["torch"] == "2.13.0"


def test_shows_and_judges_package_metrics(repository: Path, packages: Packages) -> None:
    code = """
        from perfsuite.results import Metric

        WEIGHTS = Metric(
            name="weights", label="weights", unit="bytes", better="lower", judged="exact",
            tolerances={"cpu": 0.01, "cuda": 0.01}, read=lambda run: None,
        )
    """
    packages.install("extra-weights", code, metrics="weights = extra_weights:WEIGHTS")
    assert "weights: new -> 1.86 GiB" in accept("1", 5, figures=make_figures(extra={"weights": 2e9}))
    assert "weights: 1.86 GiB, 1.86 GiB, " in told("show", "*")
    worse = accept("2", 5, status=1, figures=make_figures(extra={"weights": 4e9}))
    assert f"weights gets worse (1.86 GiB -> 3.73 GiB). {WHY}" in worse
    packages.uninstall("extra-weights")
    assert "weights (its package cannot be used): 2,000,000,000.00, " in told("show", "*")
    told("accept")


def write_profile(profile: Profile) -> None:
    """Write the files of a launch for a profile. All ranks have the same profile."""
    run_dir = RunDir.of_profile(Path(".perfsuite/runs/1", CASE.id))
    documents.write(run_dir.case, CaseFile(case=CASE, device="cpu", profile=True))
    for rank in range(CASE.topology.world_size):
        documents.write(run_dir.profile(rank), RankProfileFile(profile=profile))


def test_accepts_the_newest_sessions_profile(repository: Path) -> None:
    file = REVIEWED.profiles.reviewed_file(MACHINE.hardware_class, CASE.id)
    accept("1", 5)
    assert not file.exists()
    assert "profile" not in told("show", CASE.id)
    write_profile(make_profile())
    assert f"written: {file}" in told("accept")
    profile = documents.read(file, ProfileBaseline)
    assert profile.of_baseline == accepted().recorded_at
    shown = told("show", CASE.id)
    assert "profile of ranks 0-1: 100.0 ms a step: compute 60.0, optimizer 10.0, all_gather exposed" in shown
    assert f"{CASE.id} profiled on {MACHINE.hardware_class}\n  profile: new" in told("diff")
    commit(repository)
    documents.write(file, profile.replace(profile=launch_profile(EAGER, EAGER)))
    assert "aten::bmm 0 -> 24 calls a step" in told("diff")
    assert told("list").count(CASE.id) == 1, "a profile is not listed as a baseline"
    file.unlink()
    assert "profile: removed" in told("diff")


def test_rejects_counts_that_lack_profiled_work(repository: Path) -> None:
    measured("1", 5, counts=launch().counts)
    for share, files in ((0.9, 0), (0.0, 1)):
        write_profile(unseen_profile(share))
        assert ("counts are left out: according to the profile, 90% of" in told("accept")) is not bool(files)
        assert len(list(Path("baselines/counts").rglob("*.json"))) == files
