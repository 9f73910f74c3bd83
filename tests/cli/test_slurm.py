"""`perfsuite slurm submit` on a real Slurm. Its sessions are pytest without perfsuite, to start sooner."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfsuite import Topology
from perfsuite.cli import slurm
from perfsuite.cli.app import app
from tests.processes import arguments, wait_until
from tests.samples import make_case
from tests.slurm_cluster import START_S, Cluster
from tests.suite import measuring

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--perf-launcher")
"""
TESTS = """
import os, socket, subprocess, time
from pathlib import Path

def test_good(request):
    print("launched by", request.config.getoption("--perf-launcher"))
    print("on", socket.gethostname(), "of", os.environ["SLURM_JOB_NODELIST"], "in", os.getcwd())

def test_bad():
    raise AssertionError

def test_that_waits():
    print("it waits", flush=True)
    while not Path("go").exists():
        time.sleep(0.1)
"""
COMMAND = [sys.executable, "-c", "from perfsuite.cli.app import app; app()", "slurm", "submit"]

pytestmark = pytest.mark.launch


@pytest.fixture
def project(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with tests in it, on a cluster that has nothing to do, before and afterwards."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_any.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:perfsuite -p no:cacheprovider -s\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    cluster.run("scancel", "--user=root")
    wait_until(lambda: not queue(cluster), "the queue to be empty")


def queue(cluster: Cluster, options: str = "%i %T") -> str:
    return cluster.run("squeue", "--noheader", f"--format={options}").strip()


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def submit(*words: str) -> tuple[int, str, str]:
    """Exit status, what the job wrote, and what is said about it, in this process."""
    result = CliRunner().invoke(app, ["slurm", "submit", *words])
    return result.exit_code, result.stdout, result.stderr


def waiting_job(project: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A session in its last test, which waits; and the id of its job."""
    process = start(*words, "--", "-k", "waits")
    assert process.stdout is not None
    assert any("it waits" in line for line in process.stdout)
    (log,) = (project / ".perfsuite" / "slurm").iterdir()
    return process, log.stem


def test_a_session_runs_in_the_job_and_gives_its_exit_status(project: Path) -> None:
    status, out, err = submit("--nodes=2", "--", "-k", "good")
    assert (status, "1 passed, 2 deselected" in out) == (0, True), err
    assert f"launched by slurm\non n1 of n[1-2] in {project}" in out
    assert re.search(r"job \d+ (runs|ran) on n1, n2", err)
    assert re.search(r"job \d+ ended", err)
    (log,) = (project / ".perfsuite" / "slurm").iterdir()
    assert log.read_text() == out


def test_a_case_over_both_nodes_is_measured_in_the_job(project: Path) -> None:
    for stand_in in ("conftest.py", "pytest.ini"):
        (project / stand_in).unlink()
    case = make_case(topology=Topology(nodes=2, processes_per_node=1))
    (project / "test_case.py").write_text(measuring(case))
    options = ("--perf-record-launches=1", "--perf-allow-shared")
    status, out, err = submit("--nodes=2", "--", "test_case.py", *options)
    assert status == 0, out + err
    (results,) = project.glob(".perfsuite/runs/*/results.json")
    (result,) = json.loads(results.read_text())["results"]
    assert [node["name"] for node in result["runs"][0]["nodes"]] == ["n1", "n2"]
    assert result["verdict"]["outcome"] in ("recorded", "unhealthy"), "other tests use this machine"


def test_a_failing_session_fails_the_command(project: Path) -> None:
    status, out, err = submit("--", "--perf-launcher=local", "-k", "good or bad", "test_any.py")
    assert (status, "1 failed, 1 passed" in out) == (1, True), err
    assert "launched by local" in out


def test_the_log_is_followed_while_the_job_runs(project: Path) -> None:
    process, _ = waiting_job(project)
    assert process.poll() is None
    (project / "go").touch()
    out, _ = process.communicate(timeout=START_S)
    assert "1 passed" in out
    assert process.returncode == 0


@pytest.mark.fault("job is refused")
def test_what_slurm_refuses_is_told_in_its_words(project: Path) -> None:
    status, out, err = submit("--partition=short", "--time=5", "--", "-k", "good")
    assert (status, out) == (2, "")
    assert re.search(r"sbatch .*--time=5.*: sbatch: error: .*Requested time limit is invalid", err)


@pytest.mark.fault("job never starts")
def test_a_queue_that_never_starts_is_given_up(project: Path, cluster: Cluster) -> None:
    status, out, err = submit("--partition=closed", "--wait-start=3", "--", "-k", "good")
    assert (status, out) == (2, "")
    assert "is queued: PartitionDown" in err
    assert "has not started in 3 s (--wait-start) and is cancelled" in err
    assert err.rstrip().endswith("as Slurm says: PartitionDown")
    assert queue(cluster) == ""


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_cancels_the_job(
    project: Path, cluster: Cluster, number: signal.Signals, expected: int
) -> None:
    process, job = waiting_job(project)
    process.send_signal(number)
    _, err = process.communicate(timeout=START_S)
    assert process.returncode == expected
    assert f"job {job} is cancelled and gone; what it wrote is in" in err
    assert "JobState=CANCELLED" in cluster.run("scontrol", "show", "job", job)
    wait_until(lambda: not any(cluster.processes(node) for node in cluster.nodes), "all processes to be gone")


def test_a_second_interrupt_leaves_at_once(
    project: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = project / "bin" / "scancel"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nsleep 3600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    process, job = waiting_job(project)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("interrupt again to leave at once" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=START_S)
    assert process.returncode == 130
    assert f"left job {job}, which may still be there: scancel {job}" in err
    assert queue(cluster) == f"{job} RUNNING"
    monkeypatch.undo()
    cluster.run("scancel", job)


def kill_session(cluster: Cluster, job: str) -> None:
    (session,) = [each for each in cluster.processes("n1") if "pytest" in arguments(each)]
    session.kill()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        pytest.param(lambda cluster, job: cluster.run("scancel", job), "CANCELLED", id="cancelled"),
        pytest.param(  # no limit is as short as a test: this one is brought forward
            lambda cluster, job: cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now"),
            "TIMEOUT",
            id="time limit",
            marks=pytest.mark.fault("job reaches its time limit"),
        ),
        pytest.param(lambda cluster, job: cluster.cut_off("n2"), "NODE_FAIL", id="lost node"),
        pytest.param(kill_session, "FAILED", id="killed session"),
    ],
)
def test_a_job_that_ends_otherwise_than_by_pytest_is_an_error(
    project: Path, cluster: Cluster, end: Callable[[Cluster, str], object], said: str
) -> None:
    process, job = waiting_job(project, "--nodes=2", "--time=60")
    end(cluster, job)
    try:
        _, err = process.communicate(timeout=START_S)
    finally:
        if said == "NODE_FAIL":
            cluster.repair("n2")
    assert process.returncode == 2
    log = project / ".perfsuite" / "slurm" / f"{job}.log"
    assert re.search(f"job {job} is over: {said}", err)
    assert f"What it wrote is in {log}" in err
    assert "it waits" in log.read_text()


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, in which a stand-in for `sbatch` writes down its words, and refuses."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > words; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked_for(*options: str) -> list[str]:
    """What `sbatch` is asked for, beyond what is always the same."""
    assert submit(*options)[0] == 2, "this one refuses"
    words = Path("words").read_text().splitlines()
    return words[words.index("--no-requeue") + 1 : words.index(next(w for w in words if "--wrap" in w))]


def test_options_of_sbatch_come_from_the_ini_file_the_environment_and_the_command_line(
    refusing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked_for() == []
    (refusing / "pytest.ini").write_text("[pytest]\nperf_slurm_options = -c2 '-D a b'\n")
    assert asked_for() == ["-c2", "-D a b"]
    monkeypatch.setenv("PERFSUITE_SLURM_OPTIONS", "-c3 -s")
    given = ["--partition", "gpu", "--nodes=2", "--comment=x y"]
    assert asked_for(*given, "--wait-start=3", "--", "-k", "a") == ["-c2", "-D a b", "-c3", "-s", *given]
    assert "-m pytest --perf-launcher=slurm -k a\n" in (refusing / "words").read_text()


NO_SECONDS = "expected a whole number of seconds"
NEGATIVE = "--nodes is '-1', expected a number of nodes, or a range such as 2-4"


@pytest.mark.parametrize(
    ("words", "setting", "said"),
    [
        ("", "perf_slurm_partition = gpu", "any more: write --partition=... into perf_slurm_options"),
        ("--option=--mem=0 -- x", "", "write the options of sbatch themselves"),
        ("--wait-start=soon", "", f"--wait-start is 'soon', {NO_SECONDS}"),
        ("", "perf_slurm_wait_start = -1", f"perf_slurm_wait_start is '-1', {NO_SECONDS}"),
        *((words, "", NEGATIVE) for words in ("--nodes=-1", "--nodes -1", "-N-1", "-N -1")),
        ("", "perf_slurm_options = --nodes=-1", NEGATIVE),
    ],
)
def test_what_is_no_option_is_refused_with_what_is_allowed(
    refusing: Path, words: str, setting: str, said: str
) -> None:
    (refusing / "pytest.ini").write_text(f"[pytest]\n{setting}\n")
    assert said in submit(*words.split())[2]
    assert not (refusing / "words").exists()


def test_a_variable_of_old_says_what_replaces_it(refusing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFSUITE_SLURM_PARTITION", "gpu")
    said = "no setting PERFSUITE_SLURM_PARTITION any more: write --partition=... into PERFSUITE_SLURM_OPTIONS"
    assert said in submit()[2]


def test_a_reader_of_the_log_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        slurm._show(b"one line\n")
        slurm._show(b"another\n")
