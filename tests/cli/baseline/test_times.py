from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.results.baseline import from_runs
from perfsuite.results.profile import Profile, ProfileBaseline, RankProfileFile
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run import Health
from perfsuite.results.run_dir import RunDir
from tests.cli.baseline.launches import CASE, MACHINE, REVIEWED, accepted, keep, measured, told
from tests.packages import Packages
from tests.samples import make_figures, make_run, write_session
from tests.synthetic import commit
from tests.traces import EAGER, launch_profile, make_profile, unseen_profile
from tests.twin_counts import launch


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"inject": "slowdown=30%"}, "5 injected"),
        ({"failure": {"kind": "crash", "message": "x"}}, "5 failed"),
        (
            {"observed": Observed(settings={"attention": "eager"}, environment={})},
            "5 unlike the newest (observed attention is 'eager', the newest's 'sdpa')",
        ),
    ],
)
def test_injected_and_failed_runs_and_those_that_ran_otherwise_are_never_accepted(
    repository: Path, changes: dict[str, Any], why: str
) -> None:
    measured("1", 5, **changes)
    measured("2", 4, observed=Observed(settings={"attention": "sdpa"}, environment={}))
    result = told("accept", "--sessions", "2", status=1)
    assert "4 healthy launches, a baseline needs 5" in result
    assert why in result
    assert "--perf-min-launches=5" in result
    assert not Path("baselines").exists()


SET_ASIDE = "set aside by their session, or not judged"


def test_another_machine_is_accepted_by_its_own_option_and_by_no_reason(repository: Path) -> None:
    measured("1", 5, figures=make_figures(probe_s_p50=0.002))
    told("accept")
    measured("2", 5, figures=make_figures(probe_s_p50=0.02), against=accepted())
    result = told("accept", "--reason", "new machines", status=1)
    assert f"0 healthy launches, a baseline needs 5 (left out: 5 {SET_ASIDE})" in result
    assert "say so with --another-machine" in result
    assert accepted().median("probe_s_p50") == 0.002
    told("accept", "--another-machine")
    assert accepted().median("probe_s_p50") == 0.02


def test_launches_that_their_session_set_aside_are_left_out_and_counted(repository: Path) -> None:
    """Beside a local baseline: there is no reviewed one whose probe could tell."""
    local = from_runs(measured("1", 3, figures=make_figures(probe_s_p50=0.002)))
    as_before, slow = (make_figures(probe_s_p50=each) for each in (0.002, 0.02))
    usual = make_run(case=CASE, machine=MACHINE, figures=as_before)
    keep("2", [usual] * 5 + [usual.replace(figures=slow)] * 3, local)
    assert f"left out: 3 {SET_ASIDE}" in told("accept", "--reason", "the first baseline")
    assert {launch.figures.probe_s_p50 for launch in accepted().launches} == {0.002}


def test_another_machine_is_one_machine(repository: Path) -> None:
    """The newest launch tells which: those at another speed are not taken with it."""
    usual, slow = (
        make_run(case=CASE, machine=MACHINE, figures=make_figures(probe_s_p50=each)) for each in (0.002, 0.02)
    )
    keep("1", [usual] * 4 + [slow] * 3, from_runs([usual] * 3))
    result = told("accept", "--another-machine", status=1)
    assert "3 healthy launches, a baseline needs 5 (left out: 4 unhealthy)" in result


@pytest.mark.parametrize("options", [(), ("--reason", "I insist"), ("--another-machine",)])
def test_a_disturbed_machine_is_no_baseline_whatever_the_reason(
    repository: Path, options: tuple[str, ...]
) -> None:
    measured("1", 5, health=Health(samples=40, seconds=10, steps=25, foreign_cpu=0.6))
    assert "0 healthy launches, a baseline needs 5 (left out: 5 " in told("accept", *options, status=1)


def test_launches_that_their_session_did_not_judge_are_never_accepted(repository: Path) -> None:
    """An interrupted case is in no results; nothing is known of a session whose results cannot be read."""
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


def with_memory(peak_memory_bytes: float | None) -> dict[str, Any]:
    return {"figures": make_figures(peak_memory_bytes=peak_memory_bytes)}


FEW_STALLS, STALLS = ({"figures": make_figures(tokens_per_s_mean=mean)} for mean in (49_000, 40_000))
LOSS = tuple(5.0 - step / 100 for step in range(25))
WHY = "say why with --reason"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"tokens_per_s": 60_000}, None),
        ({}, {"tokens_per_s": 40_000}, f"tokens/s gets worse (50,150 -> 40,120): {WHY}"),
        (FEW_STALLS, STALLS, f"tokens/s with stalls gets worse (49,000 -> 40,000): {WHY}"),
        (FEW_STALLS, {**FEW_STALLS, "loss": LOSS}, "the loss over 0 to 10 % of the steps is 4.9"),
        (with_memory(2**20), with_memory(0.0), None),
        (with_memory(0.0), with_memory(0.0), None),
        (with_memory(2**20), with_memory(2**20 * 1.004), None),
        (with_memory(0.0), with_memory(2**20), f"peak memory gets worse (0 bytes -> 1.00 MiB): {WHY}"),
        (
            with_memory(2**20),
            with_memory(2**20 * 1.006),
            f"peak memory gets worse (1.00 MiB -> 1.01 MiB): {WHY}",
        ),
        (with_memory(0.0), with_memory(None), "peak memory is in the baseline and was not measured"),
        (with_memory(None), with_memory(2**20), None),
    ],
)
def test_what_is_worse_needs_a_reason_and_nothing_else_does(
    repository: Path, before: dict[str, Any], now: dict[str, Any], said: str | None
) -> None:
    measured("1", 5, **before)
    told("accept")
    held = accepted()
    measured("2", 5, **now)
    shown = told("accept", status=0 if said is None else 1)
    assert (said or "") in shown
    if said is None:
        assert {launch.session for launch in accepted().launches} == {"2"}
        return
    assert WHY in shown or "was not measured" in said
    assert accepted() == held
    told("accept", "--reason", "torch 2.13 fixed a race")
    newer = accepted()
    assert {launch.session for launch in newer.launches} == {"2"}
    assert newer.accepted is not None
    assert newer.accepted.reason == "torch 2.13 fixed a race"


def test_several_sessions_are_pooled_on_request_and_each_launch_stays_in_its_own(repository: Path) -> None:
    measured("1", 3)
    measured("2", 2, inject="leak=20%")
    measured("3", 3)
    told("accept", status=1)
    told("accept", "--sessions", "3")
    assert [launch.session for launch in accepted().launches] == ["1"] * 3 + ["3"] * 3


def test_sessions_across_an_update_are_one_baseline_that_says_so(repository: Path) -> None:
    measured("1", 3, observed=Observed(settings={}, environment={"torch": "2.12.0", "nccl": "2.28"}))
    measured("2", 3, observed=Observed(settings={}, environment={"torch": "2.13.0", "nccl": "2.28"}))
    result = told("accept", "--sessions", "2")
    changed = "  changed from the older of these launches to the newest: torch: 2.12.0 -> 2.13.0\n"
    assert result.count(changed) == 1
    observed = accepted().observed
    assert observed is not None
    assert observed.environment["torch"] == "2.13.0"


def test_metrics_of_other_packages_are_shown_and_a_worse_one_needs_a_reason(
    repository: Path, packages: Packages
) -> None:
    code = """
        from perfsuite.results import Metric

        WEIGHTS = Metric(
            name="weights", label="weights", unit="bytes", better="lower", judged="exact",
            tolerances={"cpu": 0.01, "cuda": 0.01}, read=lambda run: None,
        )
    """
    packages.install("extra-weights", code, metrics="weights = extra_weights:WEIGHTS")
    measured("1", 5, figures=make_figures(extra={"weights": 2e9}))
    assert "weights: new -> 1.86 GiB" in told("accept")
    assert "weights: 1.86 GiB, 1.86 GiB, " in told("show", "*")
    measured("2", 5, figures=make_figures(extra={"weights": 4e9}))
    assert "weights gets worse (1.86 GiB -> 3.73 GiB): say why with --reason" in told("accept", status=1)
    packages.uninstall("extra-weights")
    assert "weights (its package is not installed): 2,000,000,000.00, " in told("show", "*")
    told("accept")


def write_profile(profile: Profile) -> None:
    """A launch for a profile, whose ranks all have this one."""
    run_dir = RunDir.of_profile(Path(".perfsuite/runs/1", CASE.id))
    documents.write(run_dir.case, CaseFile(case=CASE, device="cpu", profile=True))
    for rank in range(CASE.topology.world_size):
        documents.write(run_dir.profile(rank), RankProfileFile(profile=profile))


def test_accept_takes_the_profile_of_the_newest_session(repository: Path) -> None:
    measured("1", 5)
    write_profile(make_profile())
    result = told("accept")
    file = REVIEWED.profiles.reviewed_file(MACHINE.hardware_class, CASE.id)
    assert f"written: {file}" in result
    profile = documents.read(file, ProfileBaseline)
    assert profile.of_baseline == accepted().recorded_at
    shown = told("show", CASE.id)
    assert "profile of ranks 0-1: 100.0 ms a step: compute 60.0, optimizer 10.0, all_gather exposed" in shown
    assert f"{CASE.id} profiled on {MACHINE.hardware_class}\n  profile: new" in told("diff")
    commit(repository)
    documents.write(file, profile.replace(profile=launch_profile(EAGER, EAGER)))
    assert "aten::bmm 0 -> 24 calls a step" in told("diff")
    assert told("list").count(CASE.id) == 1, "it stands beside a baseline, and is none"
    file.unlink()
    assert "profile: removed" in told("diff")


def test_without_a_profile_a_baseline_has_none(repository: Path) -> None:
    measured("1", 5)
    told("accept")
    assert not REVIEWED.profiles.reviewed_file(MACHINE.hardware_class, CASE.id).exists()
    assert "profile" not in told("show", CASE.id)


@pytest.mark.parametrize(("share", "files"), [(0.0, 1), (0.9, 0)])
def test_counts_of_which_the_profile_says_that_they_lack_work_are_not_accepted(
    repository: Path, share: float, files: int
) -> None:
    measured("1", 5, counts=launch().counts)
    write_profile(unseen_profile(share))
    assert ("counts are left out: by the profile, 90% of" in told("accept")) is not bool(files)
    assert len(list(Path("baselines/counts").rglob("*.json"))) == files
