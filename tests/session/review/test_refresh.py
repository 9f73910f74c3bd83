"""Tests of `perfsuite baseline refresh`. All commands that it runs are replaced."""

import sys
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.session.review import refresh
from tests.cli import commands
from tests.cli.commands import error_of
from tests.cli.jobs import Jobs
from tests.processes import executable

BASELINE = Path("baselines/x.json")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Replace all commands. The fake `perfsuite baseline accept` writes a baseline and prints its options."""
    monkeypatch.chdir(tmp_path)
    Path("bench_cases").mkdir()
    made = Jobs()
    monkeypatch.setattr(refresh, "run", made.run)
    monkeypatch.setattr(refresh, "refused", made.refused)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    accept(f"mkdir -p baselines; echo new > {BASELINE}; exit 0")
    return made


def accept(does: str) -> None:
    executable(Path("python"), f"({does})", "status=$?", 'echo "$@"', "exit $status")


def new_baselines(*words: str, status: int = 0) -> str:
    given = ("baseline", "refresh", "--hardware", "h100", "--reason", "torch 2.14")
    return commands.run(*given, *words, status=status).output


def test_refresh_measures_in_its_own_store(jobs: Jobs) -> None:
    jobs.statuses = {
        "doctor": 3,
        "pytest": 1,
    }  # 3: the machine is busy. 1: a case is slower, so it gets a new baseline
    documents.write_text(Path(".perfsuite/refresh/runs/old"), "an earlier attempt")
    new_baselines("--out", "there", "--", "-k", "fsdp2 and not 8b")
    assert not Path(".perfsuite/refresh/runs/old").exists()
    doctor, pytest_ = jobs.commands
    assert doctor == ["perfsuite.cli", "doctor", "--expect=h100"]
    assert pytest_[:4] == ["pytest", "bench_cases", "-m", "h100"]
    assert {"--perf-min-launches=10", "--perf-report=there", "--perf-store=.perfsuite/refresh"} < {*pytest_}
    assert pytest_[-2:] == ["-k", "fsdp2 and not 8b"]
    asked = "baseline accept --store=.perfsuite/refresh --baselines=baselines --reason=torch 2.14"
    assert asked in Path("there/before-after.txt").read_text()


def test_refresh_without_a_difference_is_an_error(jobs: Jobs) -> None:
    new_baselines("--out", "there")
    assert "no baseline in baselines changed" in new_baselines(status=2)


@pytest.mark.parametrize("statuses", [{"doctor": 1}, {"doctor": 2}, {"pytest": 5}, {"pytest": -9}])
def test_accepts_nothing_unmeasured(jobs: Jobs, statuses: dict[str, int]) -> None:
    jobs.statuses = statuses
    new_baselines(status=2)
    assert not BASELINE.exists()


def test_unacceptable_results_keep_their_reason(jobs: Jobs) -> None:
    accept("echo no measured run; exit 2")
    assert "no measured run" in new_baselines(status=2)
    assert Path("out/before-after.txt").read_text().startswith("no measured run")
    accept(f"mkdir baselines; echo new > {BASELINE}; exit 1")
    new_baselines()  # status 1: only some cases were accepted
    assert BASELINE.exists()


def test_a_refusal_of_pytest_is_an_error(jobs: Jobs) -> None:
    jobs.refusal = "pytest cannot collect the cases: ERROR: x"
    assert "pytest cannot collect the cases: ERROR: x" in new_baselines(status=2)
    assert jobs.commands == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hardware h1000 --reason x", "--hardware h1000: did you mean 'h100'?"),
        ("--hardware cpu --reason x --cases nosuch", "--cases nosuch: no such directory"),
        ("--hardware cpu --reason=", "--reason is empty: say why a baseline may change"),
    ],
)
def test_refuses_cases_that_cannot_be_refreshed(jobs: Jobs, words: str, said: str) -> None:
    assert said in error_of("baseline", "refresh", *words.split())
    assert jobs.commands == []
