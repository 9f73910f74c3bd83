from __future__ import annotations

import os
import subprocess
import sys

from perfsuite.node.job_processes import JobProcesses


def test_the_time_of_the_jobs_dead_is_not_lost() -> None:
    burn = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"
    run = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    parent = f"{run}\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe) as launcher:
        job = JobProcesses(launcher.pid)
        assert launcher.stdout is not None
        launcher.stdout.readline()  # now the child is dead
        job.scan()
        assert job.cpu_s() >= 0.29
        launcher.kill()
        launcher.communicate()
        job.scan()
        assert job.cpu_s() == 0, "of one that is gone nothing is known"


def test_the_job_is_the_agent_and_its_descendants() -> None:
    job = JobProcesses(os.getpid())
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert job.pids == {os.getpid()}
    job.scan()
    assert job.pids >= {os.getpid(), stranger.pid}
    stranger.kill()
    stranger.communicate()
    job.scan()
    assert stranger.pid in job.pids, "NVML lists the dead for a while"
