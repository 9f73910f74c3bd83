"""Tests of what `perfsuite compare` prints, writes and refuses, with simulated launches in processes."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Model, Script, documents
from perfsuite.case.case import Case, CaseList, CollectedTest
from perfsuite.cli.compare import can_be_bisected
from perfsuite.dry import driver
from perfsuite.errors import AllocationOverError, CaseError
from perfsuite.inputs.git import git
from perfsuite.launch.arm import Arm
from perfsuite.report.answer import DOES_MORE, IS_SLOWER, NOT_CHECKED
from perfsuite.results.outcome import Outcome, Verdict
from perfsuite.results.session_file import SessionFile
from perfsuite.session import against_arm, comparison, setup
from perfsuite.session.against_arm import AgainstArm, ByCounts, ByDryRuns
from perfsuite.session.mode import Launches, Mode, Task, Trial
from tests.cli import commands
from tests.packages import Packages
from tests.processes import executable, have_compiler
from tests.samples import make_case, make_machine, make_run
from tests.synthetic import commit

CASE = make_case()
OTHER = make_case(steps=21)
LAST = make_case(steps=23)
GPU_CASE = make_case(hardware="h100", steps=22)


@pytest.fixture(autouse=True)
def _cases(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a repository with cases, on a CPU machine."""
    commands.hold(monkeypatch, CASE, OTHER, LAST, GPU_CASE)


class Verdicts:
    """Replaces the launches: every case has this outcome."""

    def __init__(self) -> None:
        self.outcome: Outcome = "passed"
        self.modes: list[Mode] = []
        self.errors: dict[str, Exception] = {}

    def judge(self, mode: Mode, task: Task, launches: Launches) -> Trial:
        self.modes.append(mode)
        if task.case.id in self.errors:
            raise self.errors[task.case.id]
        mode.setup.progress.begin(task.case.id, 20, 1)
        run = make_run(dry=mode.dry)
        for _ in range(3):
            launches.add_pair(run, run)
        changed = ("torch: 2.13.0 -> 2.14.0",)
        verdict = Verdict(outcome=self.outcome, launches=6, against="arm A", changed=changed)
        return Trial.of(launches, verdict)


@pytest.fixture
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    """Replace the verdicts of all modes, and let every case have a dry run on any device."""
    stand_in = Verdicts()
    commands.ask_nobody(monkeypatch)
    for mode in (AgainstArm, ByCounts):
        monkeypatch.setattr(mode, "judge", lambda *arguments: stand_in.judge(*arguments))
    for module in (driver, setup):
        monkeypatch.setattr(module, "why_not_dry", lambda case, machine: None)
    have_compiler(tmp_path / "compiler", monkeypatch)
    by_counts = partial(against_arm.by_counts, why_no_cuda=lambda arm: None)
    monkeypatch.setattr(comparison, "by_counts", by_counts)
    return stand_in


command = partial(commands.run, "compare", "--against")


def session() -> dict[str, Any]:
    """Return the results file of the only comparison, as JSON."""
    (file,) = Path().glob(".perfsuite/compare/*/results.json")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("passed", 0), ("improved", 0), ("regressed", 1), ("failed", 1), ("inconclusive", 3), ("unhealthy", 3)],
)
def test_the_exit_status_tells_if_arm_b_is_worse(verdicts: Verdicts, outcome: Outcome, status: int) -> None:
    verdicts.outcome = outcome
    command(".", CASE.id, status=status)
    command(".", "--dry", CASE.id, status=status)
    assert [type(mode) for mode in verdicts.modes] == [AgainstArm, ByDryRuns]


def test_the_network_of_dry_arms_can_be_given(verdicts: Verdicts) -> None:
    command(".", "--dry", "--interconnect", "8xib400", CASE.id)
    (mode,) = verdicts.modes
    assert isinstance(mode, ByDryRuns)
    assert mode.options.interconnect == "8xib400"


def test_regressed_commit_suggests_a_bisect(verdicts: Verdicts, packages: Packages) -> None:
    packages.install("perf-search", "", commands="bisect = perf_search:bisect")
    verdicts.outcome = "regressed"
    arms = ("main~1", "--arm", "HEAD")
    for way in ([], ["--counts"], ["--dry"]):
        said = command(*arms, *way, CASE.id, status=1).stderr
        line = " ".join([f"perfsuite bisect {CASE.id} --good main~1 --bad HEAD", *way])
        assert f"To find the commit: {line}\n" in said


GOOD = Arm(text="main~1", commit="a" * 40)
BAD = Arm(commit="b" * 40)


def test_two_commits_can_be_bisected() -> None:
    assert can_be_bisected((GOOD, BAD), "main~1", ["bisect", "compare"])


@pytest.mark.parametrize(
    ("a", "b", "against", "installed"),
    [
        (GOOD, BAD, "main~1", "compare"),
        (GOOD, GOOD, "main~1", "bisect"),
        (GOOD, BAD, "main~1 A=b", "bisect"),
        (GOOD, Arm(), "main~1", "bisect"),
        (Arm(), BAD, "A=b", "bisect"),
    ],
)
def test_suggests_no_bisect_that_cannot_help(a: Arm, b: Arm, against: str, installed: str) -> None:
    assert not can_be_bisected((a, b), against, [installed])


def test_equal_commits_suggest_no_bisect(verdicts: Verdicts) -> None:
    verdicts.outcome = "regressed"
    for same in (".", "A=b"):
        assert "bisect" not in command(same, CASE.id, status=1).stderr


def test_what_the_session_is_asked_for(verdicts: Verdicts) -> None:
    options = ("--tolerance", "3%", "--max-pairs", "5", "--inject", "slowdown=10%", "--wait-quiet", "7")
    command("main~1 X=1", "--arm", "Y=2", *options, CASE.id)
    (mode,) = verdicts.modes
    assert isinstance(mode, AgainstArm)
    assert (mode.options.policy.tolerance, mode.max_pairs) == (0.03, 5)
    assert (mode.setup.options.inject, mode.setup.options.wait_quiet_s) == ("slowdown=10%", 7)
    a, b = mode.arms
    assert (a.commit, a.given) == (git("rev-parse", "main~1", cwd=Path()).strip(), {"X": "1"})
    assert (b.directory, b.given) == (None, {"Y": "2"})


def test_skips_an_unrunnable_case_with_a_reason(verdicts: Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{GPU_CASE.id}: " in command(".", "-k", "any").stderr
    assert len(verdicts.modes) == 3
    assert [skip["case_id"] for skip in session()["skipped"]] == [GPU_CASE.id]
    commands.hold(monkeypatch, GPU_CASE)
    command(".", "-k", "any", status=3)  # nothing was measured, so nothing is decided


GONE = make_case(steps=29)
"""A case that arm B no longer has."""


def collect(before: list[Case], now: list[Case]) -> None:
    """Commit a directory of cases, and write a program with which the arms collect these cases.

    The program takes the place of pytest's interpreter, which would take a second for each arm.
    """
    Path("bench_cases/test_a.py").touch()
    commit(Path())
    for name, cases in (("before", before), ("now", now)):
        tests = [
            CollectedTest(nodeid=f"bench_cases/test_a.py::test_it[{case.id}]", case=case) for case in cases
        ]
        documents.write(Path(f"{name}.json"), CaseList(cases=(), tests=tuple(tests)))
    executable(
        Path("python"),
        "for word; do",
        "    case $word in --perf-cases=*) file=${word#*=};; esac",
        "done",
        "case $PWD in */arms/*) list=before;; *) list=now;; esac",
        f"cp '{Path().absolute()}'/$list.json \"$file\"",
    )


collected = partial(command, "main ./python", "--arm", "./python")


def test_vanished_case_is_listed_and_is_no_pass(verdicts: Verdicts) -> None:
    collect([CASE, GONE], [CASE])
    printed = collected("-k", "any", "--out", "out", status=3).stdout
    listed = f"{GONE.id}: deleted in arm B, or no longer collected there (bench_cases/test_a.py::test_it)"
    vanished = f"Cases of arm A that were not compared, so this is not a pass:\n  {listed}\n"
    assert f"{vanished}\n{DOES_MORE}\n" in printed
    assert [change["case_id"] for change in session()["case_changes"]] == [GONE.id]
    report = Path("out/summary.md").read_text()
    assert report.startswith("## perfsuite: 3 passed, 1 skipped, 1 not compared\n")
    assert f"**{listed}**" in report
    assert listed in Path("out/index.html").read_text()
    verdicts.outcome = "regressed"
    collected("-k", "any", status=1)


def test_change_of_a_compared_case_is_only_listed(verdicts: Verdicts) -> None:
    collect([CASE], [CASE.replace(timeout_s=60.0)])
    printed = collected("-k", "any").stdout
    assert "Other cases in which the arms differ:" in printed
    assert "timeout_s 900.0 -> 60.0" in printed


def test_vanished_case_that_is_not_asked_for_passes(verdicts: Verdicts) -> None:
    collect([CASE, GONE], [CASE])
    assert f"{GONE.id}: deleted in arm B" in collected(CASE.id).stdout


def test_unknown_cases_of_an_arm_are_no_pass(verdicts: Verdicts) -> None:
    collect([CASE], [CASE])
    executable(Path("python"), "echo no pytest >&2", "exit 1")
    printed = commands.flat(collected(CASE.id, "--out", "out", status=3).stdout)
    why = "it is unknown which cases vanished, because arm A's cases could not be collected"
    assert f"{why}: pytest cannot collect the cases in " in printed
    assert ": no pytest" in printed
    assert f"**{why}: pytest cannot collect" in Path("out/summary.md").read_text()


def test_cases_are_checked_before_an_arm_is_made(verdicts: Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm can cost minutes of pip. This arm cannot be made."""
    for words, why in (
        ([GPU_CASE.id], f"{GPU_CASE.id}: it is meant for h100"),
        (["nosuch"], "is called 'nosuch'"),
        ([CASE.id, "-k", "any"], "give case ids or -k, not both"),
    ):
        assert why in commands.error_of("compare", "--against", "nosuch", *words)
    commands.hold(monkeypatch, GPU_CASE)
    refused = command("nosuch", "-k", "any", "--out", "out", status=3)
    assert f"{GPU_CASE.id}: it is meant for h100" in refused.stderr
    assert "1 skipped" in Path("out/summary.md").read_text()


def test_dry_comparison_needs_no_driver(verdicts: Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is too old for the new torch only matters for launches."""
    commands.hold(monkeypatch, CASE, detect=lambda: make_machine(driver="550.54.15"))
    drivers = list[str | None]()
    resolved = against_arm.resolved

    def arms(*arguments: Any, driver: str | None) -> Any:
        drivers.append(driver)
        return resolved(*arguments)

    monkeypatch.setattr(comparison, "resolved", arms)
    command(".", CASE.id)
    command(".", CASE.id, "--dry")
    assert drivers == ["550.54.15", None]


def test_compares_all_cases_if_none_is_named(verdicts: Verdicts) -> None:
    printed = command(".").stdout
    assert all(case.id in printed for case in (CASE, OTHER, LAST))


def test_counts_as_many_steps_as_asked(verdicts: Verdicts) -> None:
    command(".", CASE.id, "--counts", "--counted-steps", "30")
    assert verdicts.modes[-1].options.counted_steps == 30
    message = command(".", CASE.id, "--counts", "--counted-steps", "0", status=2).stderr
    assert "--counted-steps" in message


def test_counts_as_many_steps_as_settings_say(verdicts: Verdicts) -> None:
    Path("pytest.ini").write_text("[pytest]\nperf_counted_steps = 30\n")
    command(".", CASE.id, "--counts")
    assert verdicts.modes[-1].options.counted_steps == 30
    Path("pytest.ini").write_text("[pytest]\nperf_counted_steps = 0\n")
    assert "perf_counted_steps=0: give" in command(".", CASE.id, "--counts", status=2).stderr


def test_the_answers_are_the_last_lines(verdicts: Verdicts) -> None:
    printed = command(".", CASE.id).stdout
    ordered = [printed.index(f"\n{question}\n") for question in (DOES_MORE, IS_SLOWER, NOT_CHECKED)]
    assert ordered == sorted(ordered)
    assert printed.index(CASE.id) < ordered[0], "the report of the case comes first"


def test_an_error_fails_its_own_case_alone(verdicts: Verdicts) -> None:
    verdicts.errors = {CASE.id: CaseError("compile=True with Fake"), OTHER.id: KeyError("nobody expected it")}
    errors = command(".", CASE.id, OTHER.id, LAST.id, status=1).stderr
    assert f"{CASE.id}: compile=True with Fake" in errors
    assert f"{OTHER.id}: KeyError: 'nobody expected it'" in errors
    assert len(verdicts.modes) == 3


def test_shows_results_when_the_allocation_ends(verdicts: Verdicts) -> None:
    verdicts.errors = {OTHER.id: AllocationOverError("the Slurm job 7 is over")}
    assert CASE.id in command(".", CASE.id, OTHER.id, status=2).stdout
    assert session()["status"] == "interrupted"


def test_sigterm_keeps_results_with_its_status(verdicts: Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = verdicts.judge

    def ended(mode: Mode, task: Task, launches: Launches) -> Trial:
        if task.case.id == OTHER.id:
            os.kill(os.getpid(), signal.SIGTERM)
        return judge(mode, task, launches)

    monkeypatch.setattr(verdicts, "judge", ended)
    before = signal.getsignal(signal.SIGTERM)
    interrupted = command("X=1", CASE.id, OTHER.id, "--out", "out", status=143)
    assert "The session was interrupted" in commands.flat(interrupted.stderr)
    assert (session()["status"], len(session()["results"])) == ("interrupted", 1)
    assert "The session was interrupted" in Path("out/summary.md").read_text()
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_report_is_that_of_a_session(verdicts: Verdicts) -> None:
    report = json.loads(command("X=1", "--out", "out", "--json", CASE.id).stdout)
    assert [arm["text"] for arm in report["arms"]] == ["X=1", "."]
    assert len(report["results"][0]["before"]) == 3
    assert "arm A X=1 (interpreter" in Path("out/summary.md").read_text()
    page = Path("out/index.html").read_text()
    again = f"perfsuite compare --against X=1 --arm . {CASE.id}"
    assert [text in page for text in ("Launches of arm A", "Different from arm A", again)] == [True] * 3


def test_what_json_prints_is_a_file_of_results(verdicts: Verdicts) -> None:
    Path("kept.json").write_text(command("X=1", "--out", "out", "--json", CASE.id).stdout)
    kept = documents.read(Path("kept.json"), SessionFile)
    assert kept.results == documents.read(Path("out/results.json"), SessionFile).results


def test_judge_changes_appear_above_the_verdicts(verdicts: Verdicts) -> None:
    Path("pytest.ini").write_text("[pytest]\nperf_shadow = true\n")
    executable(Path("python"), "exit 0")  # arm B has no cases
    said = command("main~1", "--arm", "./python", "--out", "out", "--dry", CASE.id).stdout
    line = "pytest.ini: shadow mode on: no case fails a test"
    assert (
        "This branch changes the files that judge it, compared with "
        f"{git('rev-parse', 'main~1', cwd=Path())[:12]}:" in said
    )
    assert line in said
    (changes,) = session()["judge_changes"]["sentences"][1:]
    assert changes == line
    summary = Path("out/summary.md").read_text()
    assert summary.index("shadow mode on") < summary.index("hardware ")
    page = Path("out/index.html").read_text()
    assert page.index("shadow mode on") < page.index("<dt>hardware")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nosuch", "--against 'nosuch': 'nosuch' is not a commit of"),
        (". --arm=", "--arm is empty. Give one"),
        *(
            (f". --{name}=", f"--{name} is empty: give a value")
            for name in ("inject", "launcher", "max-pairs")
        ),
        (f". {GPU_CASE.id}", f"{GPU_CASE.id}: it is meant for h100"),
        (". -k any", "give case ids or -k, not both"),
        (". --tolerance 0", "for '--tolerance': '0', expected more than 0%"),
        (". --inject nosuch", "nosuch"),
        (". --launcher nosuch", "there is no launcher 'nosuch'"),
        (". --dry --inject slowdown=10%", "--dry and --inject cannot be combined"),
        (". --dry --tolerance 3%", "exactly: leave it out"),
        (". --dry --counts", "--dry excludes --counts"),
        (". --interconnect 8xib400", "--interconnect describes simulated machines. Add --dry, or leave"),
        (". --dry --interconnect fast", "--interconnect=fast: give the ports of a machine and their Gbit/s"),
        (". --counts --max-pairs 3", "--max-pairs only applies to times, and counts are compared exactly: "),
    ],
)
def test_what_cannot_be_compared_is_refused(verdicts: Verdicts, arguments: str, words: str) -> None:
    assert words in commands.error_of("compare", "--against", *arguments.split(), CASE.id)
    assert verdicts.modes == []


@pytest.mark.nightly
def test_compares_a_simulation_in_a_worktree() -> None:
    words = ("main~1", "--inject", "slowdown=40%", "--wait-quiet", "0", CASE.id)
    printed = commands.flat(command(*words, status=1).stdout)
    assert "28.5% fewer" in printed
    assert "regressed" in printed


@pytest.mark.nightly
def test_script_missing_in_an_arm_names_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case file exists here, but not in the commit that it is compared with."""
    Path("train.py").write_text("raise SystemExit(3)\n")
    script = Script(path="train.py", loss="finite")
    case = make_case(model=Model.named("tiny"), framework=script, hardware="cpu")
    commands.hold(monkeypatch, case)
    printed = commands.flat(command("main~1", "--dry", case.id, status=1).stdout)
    assert re.search(r"arm A failed: crash: there is no script \S+/arms/\w+/train.py", printed)
    assert "arm B failed: crash: the script ended with exit code 3" in printed
