"""`perfsuite bisect` on a real history. Launches are stood in for: how fast one is stands in its worktree."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite import measure
from perfsuite.launch.arm import Arm
from perfsuite.measure import Launching
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.session import against_arm
from perfsuite.session.setup import DryHost
from tests.cli import commands
from tests.samples import DISTURBED, make_case, make_figures, make_run
from tests.synthetic import commit, git
from tests.twin_counts import counts, launch

CASE = make_case()
FIRST_BAD = 9


class Launches:
    """Stands in for launches: the ms of a step stand in `step_ms.txt` of the arm's commit."""

    def __init__(self) -> None:
        self.count = 0
        self.arms: list[Arm] = []
        self.commits: list[str] = []
        self.is_disturbed = False

    def _ms(self, arm: Arm) -> str:
        self.count += 1
        self.arms.append(arm)
        return ((arm.directory or Path()) / "step_ms.txt").read_text()

    def __call__(self, case: Any, machine: Any, directory: Path, how: Launching) -> Run:
        if (text := self._ms(how.arm)) == "broken":
            return make_run(failure=Failure(kind="crash", message="boom", at=0.0))
        speed = 1e6 / float(text) * (1 + 0.001 * (self.count % 3))
        figures = make_figures(tokens_per_s=speed, tokens_per_s_mean=0.99 * speed)
        return make_run(case=case, figures=figures, health=DISTURBED if self.is_disturbed else None)

    def counted(self, case: Any, machine: Any, directory: Path, how: Launching) -> Run:
        """As many kernels as the step has ms."""
        return launch(counts(kernels={"forward": int(float(self._ms(how.arm)))}))

    def counted_dry(self, case: Any, directory: Path, *, arm: Arm, **options: Any) -> Run:
        return self.counted(case, None, directory, Launching(arm=arm)).replace(dry=True)


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Sixteen commits after the first, of which the 9th makes steps slower by 10 %."""
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    stand_in = Launches()
    for number in range(17):
        ms = "11" if number >= FIRST_BAD else "10"
        stand_in.commits.append(step_takes(f"{ms}.{'0' * (number + 1)}"))
    commands.hold(monkeypatch, CASE)
    monkeypatch.setattr(measure, "launch_once", stand_in)
    monkeypatch.setattr(against_arm, "launch_once", stand_in.counted)
    monkeypatch.setattr(against_arm, "dry_run", stand_in.counted_dry)
    return stand_in


def step_takes(ms: str) -> str:
    """Commit that a step takes so long, and return the commit."""
    Path("step_ms.txt").write_text(ms)
    return commit(Path(), f"{ms} ms")


by_counts = partial(commands.run, "bisect", CASE.id, "--wait-quiet=0")
command = partial(by_counts, "--tolerance=3%")


def test_the_first_bad_commit_is_named_with_its_change_and_known_afterwards(launches: Launches) -> None:
    every = launches.commits
    launches.is_disturbed = True
    assert "the machine was unhealthy" in command("--good", every[0], status=3).stderr
    launches.is_disturbed, launches.count = False, 0
    result = command("--good", every[0])
    first, message, change = result.stdout.splitlines()
    assert first.startswith(f"the first bad commit: {every[FIRST_BAD]} Ada ")
    assert message.strip() == "11.0000000000 ms"
    assert change.startswith("  tokens/s: bad, -9.1% (99 % interval -")
    assert change.endswith(f" launches, compared with {every[0][:12]} (5 steps, {launches.count} launches)")
    assert "16 suspects left" in result.stderr
    used = launches.count
    again = command("--good", every[0], "--json")
    assert launches.count == used, "every step is known"
    assert "5 steps are known from" in again.stderr
    told = json.loads(again.stdout)
    assert [step["outcome"] for step in told["steps"]] == ["bad", "good", "bad", "bad", "bad"]
    assert [step["name"] for step in told["steps"]] == [every[at] for at in (16, 8, 12, 10, 9)]


@pytest.mark.parametrize("way", ["--counts", "--dry"])
def test_by_counts_each_commit_takes_one_run_and_the_good_one_one_in_all(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(DryHost, "why_not", lambda self, case: None)
    every = launches.commits
    first, _, told = by_counts(way, "--good", every[0]).stdout.splitlines()
    assert first.startswith(f"the first bad commit: {every[FIRST_BAD]} ")
    assert told == (
        f"  bad (kernels in forward: 10 -> 11 a step), compared with {every[0][:12]} (5 steps, 6 launches)"
    )
    runs = [str(arm.commit) for arm in launches.arms]
    assert sorted(runs) == sorted(every[at] for at in (0, 16, 8, 12, 10, 9))
    again = by_counts(way, "--good", every[0])
    assert len(launches.arms) == 6, "every step is known"
    assert again.stdout.splitlines()[2] == told


def test_a_bad_arm_that_does_no_more_is_no_search(launches: Launches) -> None:
    every = launches.commits
    told = by_counts("--counts", "--good", every[-2], status=2).stderr
    assert "does no more in a step than" in told
    assert "search by times, without --dry and --counts" in " ".join(told.split())
    assert (
        "--dry with --counts: arms are compared one way"
        in by_counts("--dry", "--counts", "--good", every[0], status=2).stderr
    )
    told = command("--counts", "--good", every[0], status=2).stderr
    assert "counts are compared exactly: leave it out" in " ".join(told.split())


def test_commits_that_do_not_run_are_skipped_and_stay_suspects(launches: Launches) -> None:
    broken, slow = step_takes("broken")[:12], step_takes("20")[:12]
    result = command("--good", launches.commits[-1], status=3)
    assert f"one of these is the first bad one: {broken}, {slow}" in result.stdout
    assert f"skipped: {broken}: arm B failed: crash: boom" in result.stdout


def test_a_case_that_cannot_run_here_is_an_error(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE.replace(hardware=("h100",))
    commands.hold(monkeypatch, case)
    assert f"{case.id}: " in commands.run("bisect", case.id, "--good", "HEAD~1", status=2).stderr
