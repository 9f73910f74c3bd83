import signal
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from perfsuite.session.jobs import interruptible, refused, run
from tests.doc_pages import ROOT
from tests.processes import SLEEPS, wait_until


def test_run_returns_the_status_and_says_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("nosuch_module", "-x") == 1
    assert "$ nosuch_module -x" in capfd.readouterr().err


RUNS = """
from pathlib import Path
from perfsuite.session.jobs import run
try:
    run("sleeps")
finally:
    Path("ended").write_text(str(Path("interrupted").exists()))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sleeps(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the module `sleeps` on the path. It leaves a file if it is interrupted."""
    Path("sleeps.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path.cwd()}")


@pytest.mark.usefixtures("sleeps")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_module_end_first(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", RUNS], stderr=subprocess.DEVNULL) as process:
        wait_until(Path("begun").exists, "begun")
        process.send_signal(number)
    assert Path("ended").read_text() == "True"
    assert process.returncode != 0


@pytest.mark.usefixtures("sleeps")
def test_a_killed_command_interrupts_its_module() -> None:
    with subprocess.Popen([sys.executable, "-c", RUNS]) as process:
        wait_until(Path("begun").exists, "begun")
        process.kill()
    wait_until(Path("interrupted").exists, "interrupted")


@pytest.mark.usefixtures("here")
def test_a_process_that_ignores_interrupts_is_killed() -> None:
    ignores = (
        "import signal, time, pathlib; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "pathlib.Path('begun').touch(); time.sleep(60)"
    )
    with interruptible([sys.executable, "-c", ignores], end_s=0.1) as process:
        wait_until(Path("begun").exists, "begun")
    assert process.returncode == -signal.SIGKILL


@pytest.mark.launch
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), None),
        (("-m", "h100"), "pytest selects no case: bench_cases -m h100"),
        pytest.param(("--perf-shard=9/9",), None, marks=pytest.mark.nightly),
        (
            ("--perf-min-launches=x",),
            "pytest cannot collect the cases: ERROR: --perf-min-launches=x: give a whole*",
        ),
        pytest.param(("-n", "2"), None, marks=pytest.mark.nightly),
    ],
)
def test_what_pytest_would_say_is_known(
    suite: pytest.Pytester, arguments: tuple[str, ...], said: str | None
) -> None:
    suite.mkdir("bench_cases")
    (suite.path / "test_cases.py").rename(suite.path / "bench_cases" / "test_cases.py")
    refusal = refused("bench_cases", *arguments)
    assert refusal == said if said is None else fnmatch(str(refusal), said)


@pytest.mark.launch
def test_a_file_that_cannot_be_imported_is_said(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases="import nosuch")
    assert "No module named 'nosuch'" in str(refused("."))
