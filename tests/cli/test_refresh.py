from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.cli import night
from tests.cli.commands import run
from tests.synthetic import make_repository


class Measured:
    """Stands in for the doctor and for pytest: what they end with."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.commands: list[list[str]] = []

    def run(self, module: str, *arguments: str) -> int:
        self.commands.append([module, *arguments])
        return self.statuses.get(module, 0)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """In a repository; `perfsuite baseline accept` writes a baseline, and prints its options."""
    make_repository(tmp_path / "repository", 1)
    monkeypatch.chdir(tmp_path / "repository")
    Path("bench_cases").mkdir()
    made = Measured()
    monkeypatch.setattr(night, "run", made.run)
    accept(tmp_path, monkeypatch, "mkdir -p baselines; echo new > baselines/x.json")
    return made


def accept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\n{does}\nstatus=$?\necho "$@"\nexit $status\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def new_baselines(*words: str, status: int = 0) -> str:
    given = ("refresh", "--hardware", "h100", "--reason", "torch 2.14")
    return str(run(*given, *words, status=status).output)


def test_cases_are_measured_by_ten_launches_in_a_store_of_their_own_and_accepted(measured: Measured) -> None:
    measured.statuses = {"pytest": 1}  # a case is slower, which is why it gets a new baseline
    documents.write_text(Path(".perfsuite/refresh/runs/old"), "an earlier attempt")
    new_baselines("--out", "there", "--", "-k", "fsdp2 and not 8b")
    assert not Path(".perfsuite/refresh/runs/old").exists()
    doctor, pytest_ = measured.commands
    assert doctor == ["perfsuite.cli", "doctor", "--expect=h100"]
    assert pytest_[:4] == ["pytest", "bench_cases", "-m", "h100"]
    assert {"--perf-min-launches=10", "--perf-report=there", "--perf-store=.perfsuite/refresh"} < {*pytest_}
    assert pytest_[-2:] == ["-k", "fsdp2 and not 8b"]
    before_after = Path("there/before-after.txt").read_text()
    assert (
        "baseline accept --store=.perfsuite/refresh --baselines=baselines --reason=torch 2.14" in before_after
    )


@pytest.mark.parametrize("statuses", [{"perfsuite.cli": 2}, {"pytest": 5}, {"pytest": -9}])
def test_nothing_is_accepted_if_nothing_was_measured(measured: Measured, statuses: dict[str, int]) -> None:
    measured.statuses = statuses
    new_baselines(status=2)
    assert not Path("baselines").exists()


def test_what_cannot_be_accepted_is_an_error_and_its_reason_is_kept(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(tmp_path, monkeypatch, "echo no measured run; sh -c 'exit 2'")
    assert "no measured run" in new_baselines(status=2)
    assert Path("out/before-after.txt").read_text().startswith("no measured run")


def test_baselines_of_some_cases_are_new_though_others_were_not_accepted(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept(tmp_path, monkeypatch, "mkdir -p baselines; echo new > baselines/x.json; sh -c 'exit 1'")
    new_baselines()
    assert Path("baselines/x.json").exists()


def test_baselines_that_stay_as_they_are_are_told_also_outside_of_git(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "bench_cases").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    new_baselines()
    assert "no baseline in baselines differs from before" in new_baselines(status=2)


def test_a_marker_and_a_directory_that_there_are_not_are_refused_before_anything_runs(
    measured: Measured,
) -> None:
    assert "--cases nosuch: no such directory" in new_baselines("--cases", "nosuch", status=2)
    told = run("refresh", "--hardware", "h1000", "--reason", "x", status=2).output
    assert "--hardware h1000: did you mean 'h100'?" in told
    assert measured.commands == []


def test_a_reason_is_needed(measured: Measured) -> None:
    told = run("refresh", "--hardware", "h100", "--reason", " ", status=2).output
    assert "--reason is empty: say why a baseline may change" in told
    assert measured.commands == []
