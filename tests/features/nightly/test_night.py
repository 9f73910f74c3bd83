"""`perfsuite night` and `refresh`. What they run is stood in for."""

import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.features.nightly import night
from perfsuite.results.session_file import SessionFile
from perfsuite.session.outputs import write_report
from tests.cli import commands
from tests.cli.commands import error_of
from tests.outcomes import GOOD, NOISY, SLOW, crashed
from tests.processes import executable
from tests.sessions import make_session

SESSION = make_session(1)
PAGE = Path("page")
BASELINE = Path("baselines/x.json")


class Night:
    """Stands in for the commands of a night: what they end with, and what pytest leaves."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.refusal: str | None = None
        self.asked: list[tuple[str, ...]] = []
        self.commands: list[list[str]] = []
        self.measures = True
        self.reports = True

    def run(self, module: str, *arguments: str) -> int:
        self.commands.append([module, *arguments])
        if module == "pytest" and self.measures:
            documents.write(Path(".perfsuite/runs/20260101-000000-000000/results.json"), SESSION)
            if self.reports:
                write_report(Path("out"), SESSION)
                documents.write(Path("out/results.json"), SESSION)
        return self.statuses.get(arguments[0] if module == "perfsuite.cli" else module, 0)

    def refused(self, *arguments: str) -> str | None:
        self.asked.append(arguments)
        return self.refusal


@pytest.fixture
def tonight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    """`perfsuite baseline accept` writes a baseline, and prints its options."""
    Path("bench_cases").mkdir()
    made = Night()
    monkeypatch.setattr(night, "run", made.run)
    monkeypatch.setattr(night, "refused", made.refused)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / PAGE))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    accept(f"mkdir -p baselines; echo new > {BASELINE}; exit 0")
    return made


def accept(does: str) -> None:
    executable(Path("python"), f"({does})", "status=$?", 'echo "$@"', "exit $status")


run = partial(commands.run, "night", "--hardware", "cpu")


def test_night_checks_machine_and_gate_first(tonight: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    tonight.statuses = {"doctor": 3, "selftest": 3}  # a busy machine cannot tell, which ends no night
    options = ("--shard=2/8", "--", "-k", "fsdp2", "--perf-min-judged=50%")
    said = commands.run("night", "--hardware", "h100", *options)
    doctor, selftest, pytest_ = tonight.commands
    assert doctor == ["perfsuite.cli", "doctor", "--quick", "--expect=h100"]
    assert selftest == ["perfsuite.cli", "selftest", "--framework=ddp"]
    assert pytest_[:4] == ["pytest", "bench_cases", "-m", "h100"]
    assert pytest_[-3:] == ["-k", "fsdp2", "--perf-min-judged=50%"], "they win over what comes before"
    assert {"--perf-report=out", "--perf-shard=2/8"} <= {*pytest_}
    assert "## perfsuite: 1 " in PAGE.read_text()
    assert "perfsuite history push out/results.json" in said.stderr
    monkeypatch.setattr(night, "find_spec", lambda name: None)  # without transformers nothing is trained
    run()
    assert tonight.commands[-2] == ["perfsuite.cli", "selftest", "--framework=fake"]


@pytest.mark.parametrize(("ended", "status"), [(0, 0), (1, 1), (2, 2), (4, 2), (5, 2), (-9, 2)])
def test_a_night_ends_as_pytest_does(tonight: Night, ended: int, status: int) -> None:
    tonight.statuses = {"pytest": ended}
    run(status=status)


@pytest.mark.parametrize(
    ("command", "ended", "status"), [("doctor", 1, 2), ("doctor", 2, 2), ("selftest", 1, 1)]
)
def test_bad_machine_or_blind_gate_ends_a_night(
    tonight: Night, command: str, ended: int, status: int
) -> None:
    tonight.statuses = {command: ended}
    told = run("--selftest", "fake", status=status).stderr
    assert f"nothing was measured, as perfsuite {command} ended with {ended}" in told
    assert tonight.commands[-1][:2] == ["perfsuite.cli", command]
    assert PAGE.read_text().startswith(
        f"Nothing was measured: perfsuite {command} ended with {ended}: see the "
    )


def test_finds_pytests_refusals_before_checks(tonight: Night) -> None:
    tonight.refusal = "pytest cannot collect the cases: ERROR: *x* [y]"
    assert "nothing was measured: pytest cannot collect the cases: ERROR: *x* [y]" in run(status=2).stderr
    assert tonight.commands == []
    assert PAGE.read_text().startswith(
        "Nothing was measured: pytest cannot collect the cases: ERROR: &#42;x&#42;"
    )
    refresh = ("refresh", "--hardware", "h100", "--reason", "torch 2.14")
    assert "pytest cannot collect the cases" in error_of(*refresh)
    assert tonight.commands == []
    tonight.refusal = None
    run("--", "-k", "fsdp2")
    assert tonight.asked[-1] == tuple(tonight.commands[-1][1:]), "it is asked what is run then"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), None),
        (("-m", "h100"), "pytest selects no case: bench_cases -m h100"),
        (("--perf-shard=9/9",), None),
        (
            ("--perf-min-launches=x",),
            "pytest cannot collect the cases: ERROR: --perf-min-launches=x: give a whole*",
        ),
        (("-n", "2"), None),
    ],
)
def test_what_pytest_would_say_is_known(
    suite: pytest.Pytester, arguments: tuple[str, ...], said: str | None
) -> None:
    suite.mkdir("bench_cases")
    (suite.path / "test_cases.py").rename(suite.path / "bench_cases" / "test_cases.py")
    told = night.refused("bench_cases", *arguments)
    assert told == said if said is None else fnmatch(str(told), said)


@pytest.mark.launch
def test_a_file_that_cannot_be_imported_is_said(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases="import nosuch")
    assert "No module named 'nosuch'" in str(night.refused("."))


def test_github_shows_regressions_at_their_file(tonight: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "::" not in run().stdout, "all is well"
    worse = SLOW.replace(case_id="a,b:c", nodeid="bench_cases/test_x.py::test[1]")
    results = [GOOD, worse, NOISY, SLOW.replace(shadow=True), SLOW.replace(excused="waived")]
    said = night.github_annotations(results)
    titled = "file=bench_cases/test_x.py,title=regressed%3A a%2Cb%3Ac"
    assert said[0].startswith(f"::error {titled}::tokens/s -49.4%25")
    assert [line.partition(" ")[0] for line in said] == ["::error", "::warning", "::warning"]
    (line,) = night.github_annotations([crashed("50%\n::error::evil")])
    assert "\n" not in line


def test_reports_an_interrupted_night_once(tonight: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    tonight.reports = False
    with monkeypatch.context() as killed:
        killed.setattr(night, "_summarise", lambda summary, sessions: None)
        run()
    run("--only-summary")
    assert PAGE.read_text().count("## perfsuite: 1 ") == 1
    assert documents.read(Path("out/results.json"), SessionFile) == SESSION
    run("--only-summary")
    assert PAGE.read_text().count("## perfsuite: 1 ") == 1, "its page has it"


def test_ignores_the_report_of_an_earlier_night(tonight: Night) -> None:
    run("--only-summary")
    assert PAGE.read_text() == night.NOTHING.format("see the log.", 0)
    run()
    tonight.statuses = {"doctor": 1}
    run(status=2)
    run("--only-summary")
    assert PAGE.read_text().endswith(
        f"\n{night.NOTHING.format('perfsuite doctor ended with 1: see the log.', 1)}"
    )
    assert PAGE.read_text().count("Nothing was measured") == 2
    assert [file.name for file in Path("out").iterdir()] == ["summary.md"]
    tonight.statuses = {}
    tonight.measures = False
    assert "pytest ended with 0 and wrote no report" in run(status=2).stderr
    assert PAGE.read_text().count("Nothing was measured") == 3, "an older session is not told as tonight's"


def new_baselines(*words: str, status: int = 0) -> str:
    given = ("refresh", "--hardware", "h100", "--reason", "torch 2.14")
    return commands.run(*given, *words, status=status).output


def test_refresh_measures_in_its_own_store(tonight: Night) -> None:
    tonight.statuses = {"pytest": 1}  # a case is slower, which is why it gets a new baseline
    documents.write_text(Path(".perfsuite/refresh/runs/old"), "an earlier attempt")
    new_baselines("--out", "there", "--", "-k", "fsdp2 and not 8b")
    assert not Path(".perfsuite/refresh/runs/old").exists()
    doctor, pytest_ = tonight.commands
    assert doctor == ["perfsuite.cli", "doctor", "--expect=h100"]
    assert pytest_[:4] == ["pytest", "bench_cases", "-m", "h100"]
    assert {"--perf-min-launches=10", "--perf-report=there", "--perf-store=.perfsuite/refresh"} < {*pytest_}
    assert pytest_[-2:] == ["-k", "fsdp2 and not 8b"]
    asked = "baseline accept --store=.perfsuite/refresh --baselines=baselines --reason=torch 2.14"
    assert asked in Path("there/before-after.txt").read_text()
    assert "no baseline in baselines differs from before" in new_baselines(status=2)


@pytest.mark.parametrize("statuses", [{"doctor": 2}, {"pytest": 5}, {"pytest": -9}])
def test_accepts_nothing_unmeasured(tonight: Night, statuses: dict[str, int]) -> None:
    tonight.statuses = statuses
    new_baselines(status=2)
    assert not BASELINE.exists()


def test_unacceptable_results_keep_their_reason(tonight: Night) -> None:
    accept("echo no measured run; exit 2")
    assert "no measured run" in new_baselines(status=2)
    assert Path("out/before-after.txt").read_text().startswith("no measured run")
    accept(f"mkdir baselines; echo new > {BASELINE}; exit 1")
    new_baselines()  # of some cases, though others were not accepted
    assert BASELINE.exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("night --hardware h1000", "--hardware h1000: did you mean 'h100'?"),
        ("night --hardware cpu --cases nosuch", "--cases nosuch: no such directory"),
        ("night --hardware cpu --shard 9/8", "--shard=9/8: give the number of this job and of how many"),
        ("night --hardware cpu --out mine", "--report=mine: give a directory without an index.html of your"),
        ("refresh --hardware h1000 --reason x", "--hardware h1000: did you mean 'h100'?"),
        ("refresh --hardware cpu --reason x --cases nosuch", "--cases nosuch: no such directory"),
        ("refresh --hardware cpu --reason=", "--reason is empty: say why a baseline may change"),
    ],
)
def test_what_cannot_be_measured_is_refused(tonight: Night, command: str, words: str) -> None:
    page = Path("mine/index.html")
    documents.write_text(page, "<title>Ours</title>")
    assert words in error_of(*command.split())
    assert "--reason is empty" in error_of("refresh", "--hardware=cpu", "--reason= ")
    assert tonight.commands == []
    assert page.read_text() == "<title>Ours</title>"
