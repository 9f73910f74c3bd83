"""Tests of `perfsuite bisect` with real commits. Fake launches read their speed from a file of the commit."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite import DDP, measure
from perfsuite.launch.arm import Arm
from perfsuite.measure import Launching
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.session import against_arm
from tests.cli import commands
from tests.samples import DISTURBED, make_case, make_figures, make_run
from tests.synthetic import commit, git
from tests.twin_counts import counts, launch

CASE = make_case(framework=DDP())
GOOD = 0
FIRST_BAD = 3
BAD = 4
"""The numbers of three commits: the good arm, the first bad commit, and the bad arm."""


class Launches:
    """Replaces launches. The file `step_ms.txt` in the arm's commit has the milliseconds of a step."""

    def __init__(self) -> None:
        self.arms: list[str | None] = []  # the commits of the launches
        self.commits: list[str] = []
        self.is_disturbed = False

    def _ms(self, arm: Arm) -> str:
        self.arms.append(arm.commit)
        return ((arm.directory or Path()) / "step_ms.txt").read_text()

    def __call__(self, case: Any, machine: Any, directory: Path, how: Launching) -> Run:
        text = self._ms(how.arm)
        if text == "broken":
            return make_run(failure=Failure(kind="crash", message="boom", at=0.0))
        speed = 1e6 / float(text) * (1 + 0.001 * (len(self.arms) % 3))
        figures = make_figures(tokens_per_s=speed, tokens_per_s_mean=0.99 * speed)
        return make_run(case=case, figures=figures, health=DISTURBED if self.is_disturbed else None)

    def counted(self, case: Any, machine: Any, directory: Path, how: Launching) -> Run:
        """Return counts with one kernel for each millisecond of the step."""
        return launch(counts(kernels={"forward": int(float(self._ms(how.arm)))}))

    def counted_dry(self, case: Any, directory: Path, *, arm: Arm, **options: Any) -> Run:
        return self.counted(case, None, directory, Launching(arm=arm)).replace(dry=True)


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Make five commits, and replace launches. From commit `FIRST_BAD` on, steps are 10% slower."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    stand_in = Launches()
    for number in range(BAD + 1):
        stand_in.commits.append(step_takes(f"{11 if number >= FIRST_BAD else 10}.{'0' * (number + 1)}"))
    commands.hold(monkeypatch, CASE)
    commands.ask_nobody(monkeypatch)
    monkeypatch.setattr(measure, "launch_once", stand_in)
    by_fake_counts = partial(
        against_arm.by_counts,
        launch_once=stand_in.counted,
        dry_run=stand_in.counted_dry,
        why_no_cuda=lambda arm: None,
    )
    monkeypatch.setattr("perfsuite.features.search.bisect.by_counts", by_fake_counts)
    return stand_in


def step_takes(ms: str) -> str:
    """Commit a file with the milliseconds of a step, and return the commit."""
    Path("step_ms.txt").write_text(ms)
    return commit(Path(), f"{ms} ms")


by_counts = partial(commands.run, "bisect", CASE.id, "--wait-quiet=0")
command = partial(by_counts, "--tolerance=3%")


def test_an_unhealthy_machine_decides_nothing(launches: Launches) -> None:
    launches.is_disturbed = True
    assert "the machine was unhealthy" in command("--good", launches.commits[GOOD], status=3).stderr
    launches.is_disturbed = False
    check_first_bad(launches)


def check_first_bad(launches: Launches) -> None:
    """Search for the first bad commit, and check what is printed."""
    commits = launches.commits
    launches.arms.clear()
    result = command("--good", commits[GOOD])
    first, message, change = result.stdout.splitlines()
    assert first.startswith(f"the first bad commit: {commits[FIRST_BAD]} Ada ")
    assert message.strip() == "11.0000 ms"
    used = len(launches.arms)
    assert change.startswith("  tokens/s: bad, -9.1% (99% interval -")
    assert change.endswith(f" launches, compared with {commits[GOOD][:12]} (3 steps, {used} launches)")
    assert "4 suspects left" in result.stderr


def test_names_the_first_bad_commit(launches: Launches) -> None:
    check_first_bad(launches)


def test_remembers_every_step_of_a_search(launches: Launches) -> None:
    commits = launches.commits
    command("--good", commits[GOOD])
    launches.arms.clear()
    again = command("--good", commits[GOOD], "--json")
    assert launches.arms == [], "every step is known"
    assert "3 steps of this search are already known from" in again.stderr
    state = json.loads(again.stdout)
    assert [step["outcome"] for step in state["steps"]] == ["bad", "good", "bad"]
    assert [step["name"] for step in state["steps"]] == [commits[at] for at in (BAD, 2, FIRST_BAD)]


@pytest.mark.parametrize("way", ["--counts", "--dry"])
def test_by_counts_each_commit_takes_one_run(launches: Launches, way: str) -> None:
    commits = launches.commits
    first, _, change_line = by_counts(way, "--good", commits[GOOD]).stdout.splitlines()
    assert first.startswith(f"the first bad commit: {commits[FIRST_BAD]} ")
    change = "bad (kernels in forward: 10 -> 11 a step)"
    assert change_line == f"  {change}, compared with {commits[GOOD][:12]} (3 steps, 4 launches)"
    assert sorted(map(str, launches.arms)) == sorted(commits[at] for at in (GOOD, 2, FIRST_BAD, BAD))
    again = by_counts(way, "--good", commits[GOOD])
    assert len(launches.arms) == 4, "every step is known"
    assert again.stdout.splitlines()[2] == change_line


def test_refuses_a_bad_arm_that_does_no_more_work(launches: Launches) -> None:
    good = ("--good", launches.commits[FIRST_BAD])
    message = commands.flat(by_counts("--counts", *good, status=2).stderr)
    assert "does not do more work in a step than" in message
    assert "There is nothing to search for (times were not compared: to compare them, leave out" in message
    message = by_counts("--dry", "--counts", *good, status=2).stderr
    assert "--dry excludes --counts" in message
    message = commands.flat(command("--counts", *good, status=2).stderr)
    assert "counts are compared exactly: leave it out" in message


def test_commits_that_fail_stay_suspects(launches: Launches) -> None:
    broken = step_takes("broken")[:12]
    slow = step_takes("20")[:12]
    printed = command("--good", launches.commits[BAD], status=3).stdout
    assert f"one of these made the case worse: {broken}, {slow}" in printed
    assert f"skipped: {broken}: arm B failed: crash: boom" in printed


def test_a_case_that_cannot_run_here_is_an_error(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE.replace(hardware=("h100",))
    commands.hold(monkeypatch, case)
    message = commands.error_of("bisect", case.id, "--good", "HEAD~1")
    assert message.startswith(f"perfsuite bisect: {case.id}: ")


def test_usage_names_the_case_in_capitals() -> None:
    assert " bisect [OPTIONS] {CASE}" in commands.flat(commands.run("bisect", "--help").stdout)
