"""Two arms compared by one run of each. Launches and dry runs are stood in for."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.case import Case
from perfsuite.errors import CaseError
from perfsuite.launch.arm import Arm
from perfsuite.launch.local import LocalLauncher
from perfsuite.measure import Launching
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from perfsuite.session import against_arm
from perfsuite.session.against_arm import ByDryRuns, by_counts
from perfsuite.session.way import Trial
from tests.samples import make_case, make_machine
from tests.session.making import Unlocked, make_setup
from tests.twin_counts import counts, launch

A, B = Arm(text="main", given={"X": "1"}), Arm(text=".")
LESS, MORE = (counts(kernels={"forward": kernels}) for kernels in (100, 101))


class Arms:
    """Stands in for launches and dry runs: arm B calls one kernel more."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.made: list[str] = []
        self.injected: list[str | None] = []
        self.begun = threading.Barrier(2)
        self.error: Exception | None = None
        self.no_cuda: dict[str, str] = {}
        self.devices: set[str | None] = set()

    def launch_once(self, case: Case, machine: Any, directory: Path, how: Launching) -> Run:
        self.made.append("/".join(directory.parts[-2:]))
        self.injected.append(how.inject)
        return launch(LESS if how.arm == A else MORE)

    def dry_run(self, case: Case, directory: Path, *, device: Any, arm: Arm, stop: threading.Event) -> Run:
        self.made.append("/".join(directory.parts[-2:]))
        self.devices.add(device)
        self.begun.wait(30)
        if self.error is not None and arm == B:
            raise self.error
        if self.error is not None:
            assert stop.wait(30), "the other arm failed"
        return launch(LESS if arm == A else MORE, dry=True)

    def measure(self, *, dry: bool, known_a: Run | None = None, **options: Any) -> Measurement:
        setup = make_setup(self.root, self.said, **options)
        launcher = None if dry else LocalLauncher()
        ours = by_counts(setup.options, setup.listener, launcher, (A, B), known_a)
        ours.setup.lock = Unlocked()
        if not dry:
            ours.setup.host.machine = make_machine()
        return ours.measure(make_case(), "test")


@pytest.fixture
def arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arms:
    made = Arms(tmp_path)
    monkeypatch.setattr(against_arm, "launch_once", made.launch_once)
    monkeypatch.setattr(against_arm, "dry_run", made.dry_run)
    monkeypatch.setattr(against_arm, "why_no_cuda", lambda arm: made.no_cuda.get(arm.text))
    return made


def test_each_arm_is_launched_once_and_the_fault_is_in_arm_b(arms: Arms) -> None:
    result = arms.measure(dry=False, inject="slowdown=30%")
    assert (arms.made, arms.injected) == (["a/launch-1", "b/launch-1"], [None, "slowdown=30%"])
    assert (result.outcome, result.verdict.launches, result.by_counts) == ("regressed", 2, True)


def test_arm_a_that_has_run_is_not_launched_again(arms: Arms) -> None:
    result = arms.measure(dry=False, known_a=launch(MORE))
    assert (arms.made, result.outcome, result.verdict.launches) == (["b/launch-1"], "passed", 1)


def test_arms_run_dry_at_the_same_time_and_need_no_quiet_machine(arms: Arms) -> None:
    result = arms.measure(dry=True)  # else the barrier of two would break
    assert sorted(arms.made) == ["a/launch-1", "b/launch-1"]
    assert (result.outcome, result.dry, arms.devices) == ("regressed", True, {None})


def test_an_arm_that_cannot_run_dry_ends_the_other(arms: Arms) -> None:
    arms.error = CaseError("it cannot")
    with pytest.raises(CaseError, match="it cannot"):
        arms.measure(dry=True)


def test_cuda_is_pretended_in_both_arms_or_in_neither(arms: Arms) -> None:
    arms.no_cuda["main"] = "torch 2.13.0 is built for CUDA 13.0"
    assert arms.measure(dry=True).outcome == "regressed"
    assert arms.devices == {"cpu"}
    assert arms.said[0].endswith("pretended in both arms, for arm A: torch 2.13.0 is built for CUDA 13.0")


def test_one_environment_twice_is_said_to_be(arms: Arms) -> None:
    setup = make_setup(arms.root, arms.said)
    ByDryRuns(setup, (B, replace(B))).refused(Trial(make_case(), make_machine(), arms.root))
    assert "arms A and B are the same environment" in arms.said[0]
