"""Tests of `perfsuite baseline refresh`. A script replaces the interpreter of the commands that it runs."""

import sys
from pathlib import Path

import pytest

from perfsuite import documents
from tests.cli import commands
from tests.cli.commands import error_of
from tests.processes import executable

BASELINE = Path("baselines/x.json")
RUN = Path("run.txt")  # the arguments of each command that was run, one a line, and an empty line after each


class Interpreter:
    """A script in the working directory that does what a test wants instead of running a module of Python.

    By default, each command succeeds. `perfsuite baseline accept` writes a baseline and prints its options.
    """

    def __init__(self) -> None:
        self.do()

    def do(
        self,
        *,
        collect: str = "exit 0",
        doctor: str = "exit 0",
        measure: str = "exit 0",
        accept: str = f"mkdir -p baselines; echo new > {BASELINE}; exit 0",
    ) -> None:
        """Choose what each command does, as lines of a shell script that end with its exit status."""
        executable(
            Path("python"),
            f'case "$*" in *" --collect-only "*) {collect};; esac',
            f"printf '%s\\n' \"$@\" '' >> {RUN}",
            f'case "$*" in "-m perfsuite.cli doctor "*) {doctor};; "-m pytest "*) {measure};; esac',
            f"({accept})",
            "status=$?",
            'echo "$@"',
            "exit $status",
        )

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of each command, except those that only collect cases."""
        if not RUN.exists():
            return []
        return [command.splitlines() for command in RUN.read_text().split("\n\n") if command]


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    Path("bench_cases").mkdir()
    return Interpreter()


def new_baselines(*words: str, status: int = 0) -> str:
    given = ("baseline", "refresh", "--hardware", "h100", "--reason", "torch 2.14")
    return commands.run(*given, *words, status=status).output


def test_refresh_measures_in_its_own_store(interpreter: Interpreter) -> None:
    # 3: the machine is busy. 1: a case is slower, so it gets a new baseline.
    interpreter.do(doctor="exit 3", measure="exit 1")
    documents.write_text(Path(".perfsuite/refresh/runs/old"), "an earlier attempt")
    new_baselines("--out", "there", "--", "-k", "fsdp2 and not 8b")
    assert not Path(".perfsuite/refresh/runs/old").exists()
    doctor, pytest_, _ = interpreter.commands
    assert doctor == ["-m", "perfsuite.cli", "doctor", "--expect=h100"]
    assert pytest_[:5] == ["-m", "pytest", "bench_cases", "-m", "h100"]
    assert {"--perf-min-launches=10", "--perf-report=there", "--perf-store=.perfsuite/refresh"} < {*pytest_}
    assert pytest_[-2:] == ["-k", "fsdp2 and not 8b"]
    asked = "baseline accept --store=.perfsuite/refresh --baselines=baselines --reason=torch 2.14"
    assert asked in Path("there/before-after.txt").read_text()


def test_refresh_without_a_difference_is_an_error(interpreter: Interpreter) -> None:
    new_baselines("--out", "there")
    assert "no baseline in baselines changed" in new_baselines(status=2)


@pytest.mark.parametrize(
    ("command", "does"),
    [("doctor", "exit 1"), ("doctor", "exit 2"), ("measure", "exit 5"), ("measure", "kill -9 $$")],
)
def test_accepts_nothing_unmeasured(interpreter: Interpreter, command: str, does: str) -> None:
    interpreter.do(**{command: does})
    new_baselines(status=2)
    assert not BASELINE.exists()


def test_unacceptable_results_keep_their_reason(interpreter: Interpreter) -> None:
    interpreter.do(accept="echo no measured run; exit 2")
    assert "no measured run" in new_baselines(status=2)
    assert Path("out/before-after.txt").read_text().startswith("no measured run")
    interpreter.do(accept=f"mkdir baselines; echo new > {BASELINE}; exit 1")
    new_baselines()  # status 1: only some cases were accepted
    assert BASELINE.exists()


def test_a_refusal_of_pytest_is_an_error(interpreter: Interpreter) -> None:
    interpreter.do(collect="echo ERROR: x >&2; exit 4")
    assert "pytest cannot collect the cases: ERROR: x" in new_baselines(status=2)
    assert interpreter.commands == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hardware h1000 --reason x", "--hardware h1000: did you mean 'h100'?"),
        ("--hardware cpu --reason x --cases nosuch", "--cases nosuch: no such directory"),
        ("--hardware cpu --reason=", "--reason is empty: say why a baseline may change"),
    ],
)
def test_refuses_cases_that_cannot_be_refreshed(interpreter: Interpreter, words: str, said: str) -> None:
    assert said in error_of("baseline", "refresh", *words.split())
    assert interpreter.commands == []
