"""Test with real processes that nothing of a job is left after its end, or after any process was killed."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from perfsuite import DDP, Case, Script, Topology, documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import LaunchError
from perfsuite.launch import local
from perfsuite.launch.hang import HANG_S, HangDetector
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.launch.local import LocalLauncher
from perfsuite.measure import Launching, launch_once
from perfsuite.node.machine import detect
from perfsuite.node.processes import JOB_MARK, descendants, marked
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import RunDir
from tests.processes import executable, wait_until
from tests.samples import make_case, make_machine

FAKE = make_case(timeout_s=60)
ALONE = FAKE.replace(topology=Topology(processes_per_node=1))
DDP_TINY = FAKE.replace(framework=DDP(), sequence_length=16, micro_batch=1, timeout_s=120)

pytestmark = pytest.mark.launch


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check at the end of a test that none of its processes is alive.

    `processes_of` finds these processes.
    """
    monkeypatch.setenv("PERFSUITE_TEST", str(tmp_path))
    yield
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    assert left == []


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return living processes whose variables show that they belong to a job under `directory`."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            variables = process.environ()
            if JOB_MARK in variables and variables.get("PERFSUITE_TEST") == str(directory):
                processes += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return processes


DRIVER = """
import sys, pathlib
from perfsuite import Case, documents
from perfsuite.launch.launchers import launcher
from perfsuite.measure import Launching, launch_once
from perfsuite.node import lease
from perfsuite.node.machine import detect

lease.LOST_S = 3  # the agents on other nodes wait no longer for a sign of it
directory, inject = pathlib.Path(sys.argv[1]), sys.argv[2] or None
case = documents.read(directory / "the-case.json", Case)
launch_once(case, detect(), directory / "run", Launching(inject=inject, launcher=launcher(sys.argv[3])))
"""


def driver(
    directory: Path, case: Case, inject: str | None, launcher: str = "local"
) -> subprocess.Popen[bytes]:
    """Start another process that runs a case, so that it can be killed."""
    (directory / "the-case.json").write_text(case.model_dump_json())
    words = [sys.executable, "-c", DRIVER, str(directory), inject or "", launcher]
    return subprocess.Popen(words, env={**os.environ, "PERFSUITE_TEST": str(directory)})


def failed(
    case: Case,
    directory: Path,
    inject: str | None = None,
    on_progress: OnProgress = no_progress,
    *,
    hang_s: float = HANG_S,
) -> Failure:
    """Return how a launch failed."""
    launcher = LocalLauncher(new_detector=partial(HangDetector, hang_s=hang_s))
    how = Launching(launcher=launcher, inject=inject, on_progress=on_progress)
    run = launch_once(case, detect(), directory, how)
    assert run.failure is not None
    return run.failure


def started(directory: Path) -> bool:
    """Return whether both ranks of a launch have been started."""
    return all(RunDir(directory).rank_log(rank).exists() for rank in (0, 1))


def gone(directory: Path) -> None:
    wait_until(lambda: processes_of(directory) == [], "all processes to be gone")


@pytest.mark.fault("case takes too long")
def test_the_deadline_kills_a_hang(tmp_path: Path) -> None:
    failure = failed(FAKE.replace(timeout_s=2), tmp_path, "hang")
    assert failure.kind == "timeout"
    assert "2 s" in failure.message
    assert "of 25 steps" in failure.message


@pytest.mark.nightly
@pytest.mark.fault("hang in a collective")
def test_hang_is_seen_by_missing_steps(tmp_path: Path) -> None:
    failure = failed(DDP_TINY, tmp_path, "hang", hang_s=5)
    assert failure.kind == "timeout"
    allowed = r"killed after \d+ s without a step \(\d+ s are allowed here\), when"
    assert re.match(allowed, failure.message)
    lacks = (
        r"steps: rank 1 has not called all_reduce \d+ of group default_pg, in which rank 0 has waited for "
    )
    assert re.search(lacks, failure.message)
    stacks = str(failure.traceback)
    assert stacks.startswith("rank 1 stopped at:\nCurrent thread (most recent call first):\n")
    assert "in _break_down" in stacks.split("stopped at")[1]
    assert "rank 0 stopped at:" in stacks


def test_kills_a_grandchild_in_its_own_session(tmp_path: Path) -> None:
    """A fake launcher leaves an orphan that `killpg` does not reach."""
    orphan = executable(tmp_path / "python", "setsid sleep 1000 > /dev/null 2>&1 &", "sleep 0.2")
    job = Job(run_dir=RunDir(tmp_path), case=FAKE, machine=make_machine(), python=str(orphan))
    assert LocalLauncher().launch(job) is None


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(step: int, tokens: int) -> None:
        if started(tmp_path):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch_once(FAKE, detect(), tmp_path, Launching(inject="hang", on_progress=interrupt))


def test_sigkill_of_the_driver_leaves_nothing(tmp_path: Path) -> None:
    killed = driver(tmp_path, DDP_TINY, "hang")
    wait_until(lambda: started(tmp_path / "run"), "both ranks")
    assert processes_of(tmp_path) != []
    killed.kill()
    killed.wait()
    gone(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("delay_s", [0, 0.1, 0.3])
def test_killed_driver_leaves_nothing(tmp_path: Path, delay_s: float) -> None:
    killed = driver(tmp_path, FAKE, "hang")
    wait_until(lambda: RunDir(tmp_path / "run").agent_log(0).exists(), "the agent")
    time.sleep(delay_s)
    killed.kill()
    killed.wait()
    gone(tmp_path)


def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    """This relies on the kernel's parent-death signal alone, because no driver watches this launcher."""
    documents.write(RunDir(tmp_path).case, CaseFile(case=DDP_TINY, device="cpu", inject="hang"))
    with subprocess.Popen(
        [sys.executable, "-m", "perfsuite.node.agent", str(tmp_path)],
        stdin=subprocess.PIPE,
        env={**os.environ, JOB_MARK: "x"},
        start_new_session=True,
    ) as launcher:
        wait_until(lambda: started(tmp_path), "both ranks")
        launcher.kill()
    gone(tmp_path)


SPAWNS = """
import multiprocessing, os, pathlib, signal, subprocess, sys, time

def stay(name):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pathlib.Path(os.environ["PERFSUITE_TEST"], name).touch()
    time.sleep(1000)

if __name__ == "__main__":
    if sys.argv[1:]:
        stay("session")
    multiprocessing.get_context("spawn").Process(target=stay, args=("spawned",)).start()
    subprocess.Popen([sys.executable, __file__, "x"], start_new_session=True)
    stay("rank")
"""


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("path", "SIGTERM"),
        ("torchrun", "SIGKILL"),
        pytest.param("module", "SIGINT", marks=pytest.mark.nightly),
        pytest.param("command", "timeout", marks=pytest.mark.nightly),
    ],
)
def test_no_process_of_a_script_survives(tmp_path: Path, how: str, end: str) -> None:
    """Processes that a script spawned end as well, even if they have their own sessions and ignore signals.

    Ranks of torchrun are also in sessions of their own, and are not children of the launcher.
    """
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    framework = {
        "path": Script(path=str(script)),
        "module": Script(module="spawns", cwd=str(tmp_path)),
        "command": Script(command=("python", str(script))),
        "torchrun": Script(command=("torchrun", "--standalone", "--nproc-per-node=1", str(script))),
    }[how]
    case = ALONE.replace(framework=framework, timeout_s=20 if end == "timeout" else 600)
    running = driver(tmp_path, case, None)
    wait_until(lambda: all((tmp_path / name).exists() for name in ("spawned", "session", "rank")), "all")
    assert len(processes_of(tmp_path)) >= 4 + (how == "torchrun"), (
        "the launcher, the rank, and its two children"
    )
    if end != "timeout":
        running.send_signal(signal.Signals[end])
    running.wait(60)
    gone(tmp_path)


ESCAPES = """
import os, pathlib, subprocess, sys, time

here = pathlib.Path(__file__).parent
(here / "child").write_text(str(subprocess.Popen(["env", "-i", "setsid", "sleep", "1000"]).pid))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        tell = f"echo $$ > {here}/pid; mv {here}/pid {here}/daemon; sleep 1000"
        os.execve("/bin/sh", ["sh", "-c", tell], {})
    os._exit(0)
os.wait()
while not (here / "daemon").exists():
    time.sleep(0.01)
time.sleep(1000 if sys.argv[1] == "stays" else 0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("then", ["ends", "stays"])
def test_kills_a_detached_bare_process(tmp_path: Path, then: str) -> None:
    """The process is killed whether its rank ends by itself or the driver is interrupted meanwhile."""
    (tmp_path / "train.py").write_text(ESCAPES)
    case = ALONE.replace(framework=Script(path=str(tmp_path / "train.py"), arguments=(then,)))

    def interrupt(step: int, tokens: int) -> None:
        if then == "stays" and (tmp_path / "daemon").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if then == "stays" else contextlib.nullcontext():
        launch_once(case, detect(), tmp_path / "run", Launching(on_progress=interrupt))
    escaped = [int((tmp_path / name).read_text()) for name in ("child", "daemon")]
    left = [process for process in psutil.process_iter() if process.pid in escaped]
    for process in left:
        process.kill()
    assert left == []


def popen_of(program: str) -> Any:
    """Return the `Popen` with which this process started a program. The launcher keeps it to itself."""
    processes: list[Any] = [value for value in gc.get_objects() if type(value) is subprocess.Popen]
    return next(process for process in processes if process.args[0] == program)


def test_held_lock_does_not_block_the_driver(tmp_path: Path) -> None:
    """This happens if a KeyboardInterrupt comes in `Popen.wait` when the lock is taken, but before `try`."""
    sleeps = executable(tmp_path / "python", "exec sleep 1000")

    def interrupt(step: int, tokens: int) -> None:
        popen_of(str(sleeps))._waitpid_lock.acquire()
        raise KeyboardInterrupt

    job = Job(run_dir=RunDir(tmp_path), case=FAKE, machine=make_machine(), python=str(sleeps))
    with pytest.raises(KeyboardInterrupt):
        LocalLauncher(kill_s=5).launch(job, interrupt)


def test_unkillable_agent_is_an_error_naming_it() -> None:
    """One of its threads waits for a device driver that does not answer, so even SIGKILL does not end it.

    Here, SIGKILL does not reach the agent, because the agent has no process group of its own.
    """
    mark = uuid.uuid4().hex
    words = ["sh", "-c", "sleep 60 & echo; wait; read word"]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent,
        subprocess.Popen(["sleep", "60"], env={**os.environ, JOB_MARK: mark}),
    ):
        assert agent.stdout is not None
        agent.stdout.readline()
        with pytest.raises(
            LaunchError, match=rf"processes {agent.pid} of this job cannot be killed .* Look at dmesg"
        ):
            local._kill(agent, mark, 0.1)
        left = [*marked(mark), *descendants(agent.pid)]
    assert left == [], "its ranks are killed if possible"
