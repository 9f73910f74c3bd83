from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from perfsuite.errors import LaunchError
from perfsuite.launch import processes
from perfsuite.launch.processes import JOB_MARK, JobProcesses, marked, sweep


class Started:
    """Starts a process with an environment of its own, in a session of its own."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for process in started.processes:
        process.kill()
        process.communicate()


def pids(found: list[psutil.Process]) -> list[int]:
    return [process.pid for process in found]


def test_only_the_living_of_one_job_are_found_and_killed(start: Started) -> None:
    mine, zombie = start(**{JOB_MARK: "mine"}), start(**{JOB_MARK: "mine"})
    others, strangers = start(**{JOB_MARK: "another"}), start()
    assert pids(marked("mine")) == [mine.pid, zombie.pid]
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert pids(marked("mine")) == [mine.pid]
    sweep("mine")
    assert not psutil.pid_exists(mine.pid)
    assert marked("mine") == []
    assert (others.poll(), strangers.poll()) == (None, None)
    assert pids(marked("another")) == [others.pid]


def test_who_sweeps_does_not_kill_itself(start: Started) -> None:
    code = (
        "from perfsuite.launch.processes import marked, sweep; print(len(marked('mine')), end=' ')\n"
        "sweep('mine'); print('lives')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, JOB_MARK: "mine"}, capture_output=True, check=True
    )
    assert done.stdout == b"0 lives\n"


def test_who_cannot_be_killed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        """A process in a system call that never returns: one of a lost GPU, say."""

        pid = 4711

        def kill(self) -> None:
            raise psutil.NoSuchProcess(self.pid)

    now = 0.0

    def wait_procs(left: list[Any], timeout: float) -> None:
        nonlocal now
        now += timeout

    monkeypatch.setattr(processes, "marked", lambda mark: [Stuck()])
    monkeypatch.setattr(psutil, "wait_procs", wait_procs)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with pytest.raises(LaunchError, match="processes 4711 of this job cannot be killed") as caught:
        sweep("mine")
    assert "look at dmesg" in str(caught.value)
    assert now == processes.KILL_S + 5


def test_the_time_of_the_jobs_dead_is_not_lost() -> None:
    burn = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"
    run = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    parent = f"{run}\nprint(flush=True)\ninput()"
    job = JobProcesses()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe) as launcher:
        job.begin(launcher.pid)
        assert launcher.stdout is not None
        launcher.stdout.readline()  # now the child is dead
        job.scan()
        assert job.cpu_s() >= 0.29
        launcher.kill()


def test_the_job_is_the_launcher_and_its_descendants(start: Started) -> None:
    job = JobProcesses()
    job.scan()
    assert (job.pids, job.cpu_s()) == (set(), 0), "before it begins"
    stranger = start()
    job.begin(os.getpid())
    assert job.pids == {os.getpid()}
    job.scan(now=17.0)
    assert job.pids >= {os.getpid(), stranger.pid}
    assert job.scanned_at == 17
    job.scan()
    assert job.scanned_at == 17
    stranger.kill()
    stranger.communicate()
    job.scan()
    assert stranger.pid in job.pids, "NVML lists the dead for a while"


def test_a_launcher_that_is_gone_has_no_time() -> None:
    job = JobProcesses()
    job.begin(4_000_000)  # no Linux has such a process
    job.scan()
    assert (job.pids, job.cpu_s()) == ({4_000_000}, 0)
