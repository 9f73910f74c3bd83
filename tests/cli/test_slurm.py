"""`perfsuite slurm submit`, also on a real Slurm. Sessions are pytest without perfsuite, to start sooner."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from perfsuite import Topology
from perfsuite.cli import slurm
from tests.cli import commands
from tests.processes import arguments, executable, read_until, wait_until
from tests.samples import make_case
from tests.slurm_cluster import START_S, Cluster
from tests.suite import measuring

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--perf-launcher")
"""
TESTS = """
import os, socket, time

def test_good(request):
    print("launched by", request.config.getoption("--perf-launcher"))
    print("on", socket.gethostname(), "of", os.environ["SLURM_JOB_NODELIST"], "in", os.getcwd())

def test_bad():
    raise AssertionError

def test_that_waits():
    print("it waits", flush=True)
    time.sleep(600)
"""
COMMAND = [sys.executable, "-m", "perfsuite.cli", "slurm", "submit"]


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
    cluster.wait_until_idle()
    yield tmp_path
    cluster.run("scancel", "--user=root")
    wait_until(lambda: not queue(cluster), "the queue to be empty")


def queue(cluster: Cluster) -> str:
    return cluster.run("squeue", "--noheader", "--format=%i %T").strip()


submit = partial(commands.run, "slurm", "submit")
LIMITS = (f"--wait-start={START_S}", "--time=5")
"""The longest waits of a real job: seconds in the queue, minutes until its end."""


def waiting_job(project: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A session in its last test, which waits; and the id of its job."""
    command = [*COMMAND, *LIMITS, *words, "--", "-k", "waits"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    read_until("it waits", process.stdout, process)  # the log is followed
    assert process.poll() is None
    (log,) = (project / ".perfsuite" / "slurm").iterdir()
    return process, log.stem


@pytest.mark.launch
def test_job_exits_with_the_sessions_failure(project: Path) -> None:
    result = submit("--nodes=2", *LIMITS, "--", "-k", "good or bad", status=1)
    assert "1 failed, 1 passed, 1 deselected" in result.stdout
    assert f"launched by slurm\non n1 of n[1-2] in {project}" in result.stdout
    assert re.search(r"job \d+ (runs|ran) on n1, n2", result.stderr)
    assert re.search(r"job \d+ ended", result.stderr)
    (log,) = (project / ".perfsuite" / "slurm").iterdir()
    assert log.read_text() == result.stdout


@pytest.mark.launch
def test_measures_a_two_node_case_in_the_job(project: Path) -> None:
    for stand_in in ("conftest.py", "pytest.ini"):
        (project / stand_in).unlink()
    case = make_case(topology=Topology(nodes=2, processes_per_node=1))
    (project / "test_case.py").write_text(measuring(case))
    submit("--nodes=2", *LIMITS, "--", "test_case.py", "--perf-record-launches=1", "--perf-allow-shared")
    (results,) = project.glob(".perfsuite/runs/*/results.json")
    (result,) = json.loads(results.read_text())["results"]
    assert [node["name"] for node in result["runs"][0]["nodes"]] == ["n1", "n2"]
    assert result["verdict"]["outcome"] in ("recorded", "unhealthy"), "other tests use this machine"


@pytest.mark.launch
@pytest.mark.fault("job is refused")
def test_what_slurm_refuses_is_told_in_its_words(project: Path) -> None:
    result = submit("--partition=short", "--time=5", "--", "-k", "good", status=2)
    assert result.stdout == ""
    assert re.search(r"sbatch .*--time=5.*: sbatch: error: .*Requested time limit is inv", result.stderr)


@pytest.mark.launch
@pytest.mark.fault("job never starts")
def test_a_queue_that_never_starts_is_given_up(project: Path, cluster: Cluster) -> None:
    result = submit("--partition=closed", "--wait-start=1", "--", "-k", "good", status=2)
    assert result.stdout == ""
    assert "is queued: PartitionDown" in result.stderr
    assert "has not started in 1 s (--wait-start) and is cancelled" in result.stderr
    assert result.stderr.rstrip().endswith("as Slurm says: PartitionDown")
    assert queue(cluster) == ""


@pytest.mark.launch
def test_an_interrupt_cancels_the_job(project: Path, cluster: Cluster) -> None:
    process, job = waiting_job(project)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=START_S)
    assert process.returncode == 130
    assert f"job {job} is cancelled and gone; what it wrote is in" in err
    assert "JobState=CANCELLED" in cluster.run("scontrol", "show", "job", job)
    wait_until(lambda: not any(cluster.processes(node) for node in cluster.nodes), "all processes to be gone")


@pytest.mark.launch
def test_a_second_interrupt_leaves_at_once(
    project: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "bin").mkdir()
    executable(project / "bin" / "scancel", "sleep 3600")
    with monkeypatch.context() as slow:
        slow.setenv("PATH", f"{project / 'bin'}:{os.environ['PATH']}")
        process, job = waiting_job(project)
    process.send_signal(signal.SIGINT)
    read_until("interrupt again to leave at once", process.stderr, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=START_S)
    assert process.returncode == 130
    assert f"left job {job}, which may still be there: scancel {job}" in err
    assert queue(cluster) == f"{job} RUNNING"


def bring_limit_forward(cluster: Cluster, job: str) -> None:
    """No limit is as short as a test."""
    cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now")


def kill_session(cluster: Cluster, job: str) -> None:
    (session,) = [each for each in cluster.processes("n1") if "pytest" in arguments(each)]
    session.kill()


@pytest.mark.launch
@pytest.mark.parametrize(
    ("end", "said"),
    [
        pytest.param(bring_limit_forward, "TIMEOUT", marks=pytest.mark.fault("job reaches its time limit")),
        (kill_session, "FAILED"),
    ],
    ids=["time limit", "killed session"],
)
def test_job_that_ends_without_pytest_is_an_error(
    project: Path, cluster: Cluster, end: Callable[[Cluster, str], object], said: str
) -> None:
    process, job = waiting_job(project, "--nodes=2")
    end(cluster, job)
    _, err = process.communicate(timeout=START_S)
    assert process.returncode == 2
    log = project / ".perfsuite" / "slurm" / f"{job}.log"
    assert re.search(f"job {job} is over: {said}", err)
    assert f"What it wrote is in {log}" in err
    assert "it waits" in log.read_text()


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a stand-in for `sbatch`, which refuses, writes down its words."""
    executable(tmp_path / "sbatch", "printf '%s\\n' \"$@\" > words; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "words"


def test_options_of_sbatch_have_three_sources(refusing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked_for(*options: str) -> list[str]:
        """Return what `sbatch` is asked for, beyond what is always the same."""
        submit(*options, status=2)
        words = refusing.read_text().splitlines()
        return words[words.index("--no-requeue") + 1 : words.index(next(w for w in words if "--wrap" in w))]

    assert asked_for() == []
    Path("pytest.ini").write_text("[pytest]\nperf_slurm_options = -c2 '-D a b'\n")
    assert asked_for() == ["-c2", "-D a b"]
    monkeypatch.setenv("PERFSUITE_SLURM_OPTIONS", "-c3 -s")
    given = ["--partition", "gpu", "--nodes=2", "--comment=x y"]
    assert asked_for(*given, "--wait-start=3", "--", "-k", "a") == ["-c2", "-D a b", "-c3", "-s", *given]
    assert "-m pytest --perf-launcher=slurm -k a\n" in refusing.read_text()
    monkeypatch.setenv("PERFSUITE_SLURM_PARTITION", "gpu")
    said = "no setting PERFSUITE_SLURM_PARTITION any more: write --partition=... into PERFSUITE_SLURM_OPTIONS"
    assert said in submit(status=2).stderr


NO_SECONDS = "expected a whole number of seconds"
NEGATIVE = "--nodes is '-1', expected a number of nodes, or a range such as 2-4"


@pytest.mark.parametrize(
    ("words", "setting", "said"),
    [
        *(("", f"perf_slurm_{name} = x", f"any more: write --{name}=... into perf_slurm_options")
          for name in slurm.OF_SBATCH),
        ("--option=--mem=0 -- x", "", "write the options of sbatch themselves"),
        ("--wait-start=soon", "", f"--wait-start is 'soon', {NO_SECONDS}"),
        ("", "perf_slurm_wait_start = -1", f"perf_slurm_wait_start is '-1', {NO_SECONDS}"),
        *((words, "", NEGATIVE) for words in ("--nodes=-1", "--nodes -1", "-N-1", "-N -1")),
        ("", "perf_slurm_options = --nodes=-1", NEGATIVE),
    ],
)  # fmt: skip
def test_what_is_no_option_is_refused(refusing: Path, words: str, setting: str, said: str) -> None:
    Path("pytest.ini").write_text(f"[pytest]\n{setting}\n")
    assert said in submit(*words.split(), status=2).stderr
    assert not refusing.exists()


def test_a_reader_of_the_log_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        slurm._show(b"one line\n")
        slurm._show(b"another\n")
