import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perfsuite.analysis.cause import read_stacks
from perfsuite.errors import LaunchError
from perfsuite.node import processes
from perfsuite.node.processes import (
    JOB_MARK,
    JobProcesses,
    ask_for_stacks,
    descendants,
    has_ended,
    marked,
    sweep,
    wait_for,
)
from perfsuite.results.run_dir import STACKS_SIGNAL, RunDir
from tests.node.conftest import Passing

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts a process with its own environment, in a session of its own."""
    with contextlib.ExitStack() as started:

        def start(*words: str, **environment: str) -> subprocess.Popen[bytes]:
            command = words or ("sh", "-c", "echo; exec cat")
            pipe = subprocess.PIPE
            variables = {**os.environ, **environment}
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, env=variables, start_new_session=True
            )
            started.enter_context(process)
            started.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            return process

        yield start


def pids(mark: str) -> list[int]:
    return [process.pid for process in marked(mark)]


@pytest.fixture
def mark() -> str:
    """Return a job's mark that no other test has."""
    return uuid.uuid4().hex


def test_kills_only_the_living_of_one_job(start: Start, mark: str) -> None:
    mine = start(**{JOB_MARK: mark})
    zombie = start(**{JOB_MARK: mark})
    others = start(**{JOB_MARK: f"{mark}-2"})
    strangers = start()
    assert pids(mark) == [mine.pid, zombie.pid]
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert pids(mark) == [mine.pid]
    sweep(mark)
    assert not psutil.pid_exists(mine.pid)
    assert marked(mark) == []
    assert (others.poll(), strangers.poll()) == (None, None)
    assert pids(f"{mark}-2") == [others.pid]


def test_a_sweep_spares_its_own_process(mark: str) -> None:
    code = (
        f"from perfsuite.node.processes import marked, sweep; print(len(marked({mark!r})), end=' ')\n"
        f"sweep({mark!r}); print('lives')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, JOB_MARK: mark}, capture_output=True, check=True
    )
    assert done.stdout == b"0 lives\n"


def test_kills_all_that_an_agent_started(start: Start, mark: str) -> None:
    agent = start("sh", "-c", "env -i setsid sleep 1000 & sleep 1000 & echo; wait")
    stranger = start()
    spared, *others = psutil.Process(agent.pid).children(recursive=True)
    assert others
    sweep(None, agent.pid, spare={spared.pid})
    assert [process for process in others if process.is_running()] == []
    assert spared.is_running()
    sweep(mark, agent.pid)
    assert not spared.is_running()
    assert stranger.poll() is None
    assert agent.wait(20) == 0, "the agent has waited for both"
    assert descendants(agent.pid) == []


def test_sees_a_childs_end_despite_a_held_lock(start: Start) -> None:
    child = start()
    other = start()
    child._waitpid_lock.acquire()  # type: ignore[attr-defined]
    assert not wait_for(child, 0.01)
    assert not has_ended(child)
    child.kill()
    assert wait_for(child, 20)
    assert child.returncode == -signal.SIGKILL
    other.kill()
    os.waitpid(other.pid, 0)
    assert has_ended(other), "somebody has already waited for it"


def test_captures_output_however_a_command_ends() -> None:
    code = "import sys; print(sys.stdin.read(), end='told'); sys.exit('failed')"
    done = processes.captured([sys.executable, "-c", code], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "told", "failed\n")


def test_unkillable_process_is_an_error_naming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        """A process in a system call that never returns, for example because of a lost GPU."""

        pid = 4711

        def environ(self) -> dict[str, str]:
            return {JOB_MARK: "mine"}

        def status(self) -> str:
            return psutil.STATUS_DISK_SLEEP

        def kill(self) -> None:
            raise psutil.NoSuchProcess(self.pid)

    now = 0.0

    def wait_procs(left: list[Any], timeout: float) -> None:
        nonlocal now
        now += timeout

    monkeypatch.setattr(psutil, "process_iter", lambda: [Stuck()])
    monkeypatch.setattr(psutil, "wait_procs", wait_procs)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with pytest.raises(LaunchError, match="processes 4711 of this job cannot be killed") as caught:
        sweep("mine")
    assert "Look at dmesg" in str(caught.value)
    assert now == processes.KILL_S + 5


def test_asks_only_listeners_for_stacks(tmp_path: Path, start: Start) -> None:
    """The signal would end any other process."""
    run_dir = RunDir(tmp_path)
    listens = (
        "import pathlib; from perfsuite.worker import leash\n"
        "from perfsuite.results.run_dir import RunDir\n"
        f"run_dir = RunDir(pathlib.Path({str(tmp_path)!r}))\n"
        f"leash.listen(run_dir, None); leash.listen(run_dir, 3)\n"
        "import sys; print(flush=True); sys.stdin.read()"
    )
    started = [start(sys.executable, "-c", listens), start()]
    ask_for_stacks(run_dir, [psutil.Process(process.pid) for process in started], wait_s=60)
    for process in started:
        process.communicate()
    assert [process.returncode for process in started] == [0, 0]
    assert read_stacks(run_dir).startswith("rank 3 stopped at:")
    assert "in <module>" in read_stacks(run_dir)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Yield this process's (empty) file for stacks. This process ignores the signal that asks for stacks."""
    file = RunDir(tmp_path).stacks(0, os.getpid())
    file.write_text("")
    before = signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    yield file
    signal.signal(STACKS_SIGNAL, before)


def test_asks_for_calls_only_after_the_stacks(tmp_path: Path, file: Path, passing: Passing) -> None:
    """The thread that reads the calls could start the garbage collector, which the stacks would then show."""
    calls = RunDir(tmp_path).collectives(os.getpid(), 0)
    is_asked = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(RunDir(tmp_path).request_address(os.getpid()))

        def look(count: int) -> None:
            is_asked.append(bool(select.select([listener], [], [], 0)[0]))
            if count == 3:
                file.write_text("Thread 1")
            if count == 5:
                calls.touch()

        passing.meanwhile = look
        ask_for_stacks(RunDir(tmp_path), [psutil.Process()])
    assert is_asked == [False, False, False, False, True]


@pytest.mark.usefixtures("file")
def test_waits_briefly_for_silent_processes(tmp_path: Path, passing: Passing) -> None:
    ended = subprocess.Popen(["true"])
    process = psutil.Process(ended.pid)
    ended.wait()
    RunDir(tmp_path).stacks(0, ended.pid).write_text("")
    ask_for_stacks(RunDir(tmp_path), [process])
    assert passing.seconds == 0
    ask_for_stacks(RunDir(tmp_path), [psutil.Process()])
    assert read_stacks(RunDir(tmp_path)) == ""
    assert passing.seconds == pytest.approx(processes.STACKS_S, abs=processes.STACKS_POLL_S)


def test_waits_until_stacks_stop_growing(tmp_path: Path, file: Path, passing: Passing) -> None:
    texts = ["", "Thread 1", "Thread 1\nThread 2"]
    passing.meanwhile = lambda looks: file.write_text(texts[min(looks, 3) - 1])
    ask_for_stacks(RunDir(tmp_path), [psutil.Process()])
    assert file.read_text() == "Thread 1\nThread 2"
    assert passing.count == 4, "the last look saw that nothing new had started"


def test_waits_until_collective_calls_are_written(tmp_path: Path, file: Path, passing: Passing) -> None:
    run_dir = RunDir(tmp_path)
    file.write_text("Thread 1")
    calls = run_dir.collectives(os.getpid(), 0)
    passing.meanwhile = lambda looks: calls.touch() if looks == 5 else None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(run_dir.request_address(os.getpid()))
        ask_for_stacks(run_dir, [psutil.Process()])
        assert listener.recv(9) == b"?"
    assert passing.count == 5


BURN = "import time\nwhile time.process_time() < 0.1: pass"


def test_job_is_the_agent_and_its_descendants(start: Start) -> None:
    agent = start("sh", "-c", f"{sys.executable} -S -c '{BURN}'; sleep 1000 & echo; read word")
    job = JobProcesses(agent.pid)  # its first child is dead by now
    assert job.pids == {agent.pid}
    job.scan()
    (child,) = descendants(agent.pid)
    assert job.pids == {agent.pid, child.pid}
    assert job.cpu_s() >= 0.09
    child.kill()
    agent.kill()
    agent.wait()
    job.scan()
    assert job.cpu_s() == 0, "nothing is known about a process that is gone"
    assert job.pids == {agent.pid, child.pid}, "NVML lists dead processes for a while"


def test_living_descendants_time_is_the_jobs(start: Start) -> None:
    agent = start("sh", "-c", f"{sys.executable} -S -c '{BURN}\nprint(flush=True)\ninput()'; true")
    job = JobProcesses(agent.pid)
    assert job.cpu_s() < 0.05
    job.scan()
    assert job.cpu_s() >= 0.09
