from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.errors import CaseError
from perfsuite.results.profile import (
    LaunchProfile,
    ProfileBaseline,
    StepSplit,
    Work,
    longest_first,
    of_baseline,
)
from tests.samples import make_baseline
from tests.traces import EAGER, launch_profile, make_profile, unseen_profile


def test_ranks_with_equal_calls_share_a_profile() -> None:
    fast = make_profile()
    slow = fast.replace(
        split=fast.split.replace(compute_us=80_000, exposed_us={}),
        operators=(*fast.operators[1:], Work(name="aten::mm", calls=24, us=11_000)),
    )
    other = fast.replace(kernels=())
    launch = launch_profile(fast, other, slow)
    assert [(entry.name, entry.profile) for entry in launch.ranks] == [("0,2", fast), ("1", other)]
    assert [launch.of_rank(rank) for rank in (1, 3)] == [other, None]
    steady = make_profile()
    unsteady = make_profile(unsteady=("aten::mm",))
    for profiles, names in (((steady, unsteady, steady), ["0-2"]), ((unsteady, EAGER), ["0", "1"])):
        ranks = launch_profile(*profiles).ranks
        assert [entry.name for entry in ranks] == names
        assert {entry.profile.unsteady for entry in ranks} == {("aten::mm",)}


def test_a_launch_without_ranks_has_no_profile() -> None:
    with pytest.raises(CaseError, match=r"ranks: .* at least 1 item"):
        LaunchProfile(ranks=())


def test_longest_comes_first_then_by_name() -> None:
    works = [Work(name=name, calls=1, us=us) for name, us in (("b", 5), ("c", 9), ("a", 5))]
    assert [work.name for work in longest_first(works)] == ["c", "a", "b"]


def test_what_is_hidden_is_no_part_of_the_step() -> None:
    split = make_profile().split
    parts = {"compute": 60_000, "optimizer": 10_000, "all_gather exposed": 12_100, "idle": 17_900}
    assert split.parts() == parts
    assert sum(parts.values()) == split.step_us
    assert StepSplit(step_us=1, compute_us=1, optimizer_us=0).parts() == {"compute": 1}


def test_baseline_profile_reads_back_by_line(tmp_path: Path) -> None:
    document = of_baseline(make_baseline(), launch_profile())
    file = tmp_path / "x.json"
    documents.write(file, document)
    assert documents.read(file, ProfileBaseline) == document
    assert '{"calls": 24.0, "name": "aten::mm", "us": 9000.0}' in file.read_text()


def test_reports_much_unattributed_kernel_time() -> None:
    idle = make_profile(device="cpu", split=StepSplit(step_us=1, compute_us=0, optimizer_us=0))
    assert launch_profile(unseen_profile(0.09)).unseen is launch_profile(idle).unseen is None
    assert launch_profile(unseen_profile(0.43)).unseen == (
        "according to the profile, 43% of the GPU's computing time is spent in kernels that no operator "
        "launched, such as those of a replayed CUDA graph: the counts do not contain them"
    )
    for enough in (0.5, 0.1):
        assert launch_profile(make_profile(kernels=()), unseen_profile(enough)).unseen is not None
