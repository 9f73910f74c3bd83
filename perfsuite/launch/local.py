"""Start a job on this machine, and leave no process behind.

At the end of a launch, this process always kills the agent's descendants, the agent's process group, and all
processes with the job's mark. If this process is killed, the kernel signals the agent, which then kills these
processes and exits. If the agent is killed as well, the kernel kills the fork server and every rank.
"""

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from perfsuite.case.hardware import Machine
from perfsuite.launch.base import Launcher
from perfsuite.launch.driving import agent_command, drive, environment, prepare, started
from perfsuite.launch.hang import HangDetector
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.node.machine import detect
from perfsuite.node.processes import JOB_MARK, KILL_S, has_ended, not_killed, sweep, wait_for
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import ANCESTOR_PID


class LocalLauncher(Launcher):
    """Runs jobs of one node on this machine."""

    runs_here: ClassVar[bool] = True

    def __init__(
        self, *, new_detector: Callable[[], HangDetector] = HangDetector, kill_s: float = KILL_S
    ) -> None:
        """Create a launcher.

        `new_detector` returns the detector that decides whether a job hangs. A killed agent must end within
        `kill_s` seconds.
        """
        self._new_detector = new_detector
        self._kill_s = kill_s

    def machine(self, shared: Path) -> Machine:
        """Return this machine with its GPUs, if it has any."""
        return detect()

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        """Run a job to its end. See `Launcher.launch`."""
        mark = uuid.uuid4().hex
        ours = {JOB_MARK: mark, ANCESTOR_PID: str(os.getpid())}
        prepare(job.run_dir)
        variables = {**environment(job), **ours}
        with started(agent_command(job), job.run_dir.agent_log(0), variables, job.directory) as agent:
            try:
                return drive(job, agent, on_progress, hang=self._new_detector())
            finally:
                _kill(agent, mark, self._kill_s)


def _kill(agent: subprocess.Popen[bytes], mark: str, kill_s: float) -> None:
    try:
        if not has_ended(agent):  # while the agent lives, orphans of the job are its children
            sweep(mark, agent.pid)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(agent.pid, signal.SIGKILL)
        is_dead = wait_for(agent, kill_s)
        sweep(mark)
    if not is_dead:
        raise not_killed([agent.pid])
