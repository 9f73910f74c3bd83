from __future__ import annotations

import os
import subprocess
import sys

from perfsuite.node.job_processes import JobProcesses


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


def test_the_job_is_the_launcher_and_its_descendants() -> None:
    job = JobProcesses()
    job.scan()
    assert (job.pids, job.cpu_s()) == (set(), 0), "before it begins"
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
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
