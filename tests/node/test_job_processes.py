from __future__ import annotations

import os
import subprocess
import sys

from perfsuite.node.job_processes import JobProcesses

BURN = "import time\nwhile time.process_time() < 0.1: pass"


def test_the_time_of_the_jobs_dead_is_not_lost() -> None:
    words = ["sh", "-c", f"{sys.executable} -S -c '{BURN}'; echo; read word"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        job = JobProcesses(launcher.pid)
        assert launcher.stdout is not None
        launcher.stdout.readline()  # now the child is dead
        job.scan()
        assert job.cpu_s() >= 0.09
        launcher.kill()
        launcher.communicate()
        job.scan()
        assert job.cpu_s() == 0, "of one that is gone nothing is known"


def test_the_job_is_the_agent_and_its_descendants() -> None:
    job = JobProcesses(os.getpid())
    assert job.pids == {os.getpid()}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
        job.scan()
        assert job.pids >= {os.getpid(), stranger.pid}
    job.scan()
    assert stranger.pid in job.pids, "NVML lists the dead for a while"
