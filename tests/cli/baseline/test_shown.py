from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.results.profile import ProfileBaseline, RankProfileFile
from perfsuite.results.run_dir import RunDir
from tests.cli.baseline.launches import CASE, MACHINE, REVIEWED, accepted, commit, measured, told
from tests.traces import EAGER, launch_profile, make_profile, unseen_profile
from tests.twin_counts import launch


def test_accept_takes_the_profile_of_the_newest_session(repository: Path) -> None:
    measured("1", 5)
    run_dir = RunDir.of_profile(Path(".perfsuite/runs/1", CASE.id))
    documents.write(run_dir.case, CaseFile(case=CASE, device="cpu", profile=True))
    for rank in range(CASE.topology.world_size):
        documents.write(run_dir.profile(rank), RankProfileFile(profile=make_profile()))
    result = told("accept")
    file = REVIEWED.profiles.reviewed_file(MACHINE.hardware_class, CASE.id)
    assert f"written: {file}" in result
    profile = documents.read(file, ProfileBaseline)
    assert profile.of_baseline == accepted().recorded_at
    shown = told("show", CASE.id)
    assert "profile of ranks 0-1: 100.0 ms a step: compute 60.0, optimizer 10.0, all_gather exposed" in shown
    assert f"{CASE.id} profiled on {MACHINE.hardware_class}\n  profile: new" in told("diff")
    commit()
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
    run_dir = RunDir.of_profile(Path(".perfsuite/runs/1", CASE.id))
    documents.write(run_dir.case, CaseFile(case=CASE, device="cpu", profile=True))
    for rank in range(CASE.topology.world_size):
        documents.write(run_dir.profile(rank), RankProfileFile(profile=unseen_profile(share)))
    assert ("counts are left out: by the profile, 90% of" in told("accept")) is not bool(files)
    assert len(list(Path("baselines/counts").rglob("*.json"))) == files
