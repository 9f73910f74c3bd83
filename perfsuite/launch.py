"""Start the launcher process, watch it, and leave nothing behind.

Driver side; imports neither torch nor pytest.

What ends whom: this process kills the launcher's process group and sweeps up whatever carries the job's mark
in its environment, on every way out. If this process is killed itself, the kernel kills the launcher
(parent-death signal), then the fork server and with it every rank in the same way. A launcher that runs a
command, whose processes it did not start itself, sweeps them up before it dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping

import psutil

from perfsuite.case import Case
from perfsuite.errors import LaunchError
from perfsuite.health import Sampler
from perfsuite.result import Failure
from perfsuite.rundir import RunDir
from perfsuite.worker import ANCESTOR_PID

JOB_MARK = "PERFSUITE_JOB"
"""Environment variable that every process of a job inherits."""
POLL_S = 0.05
KILL_S = 60

OnProgress = Callable[[int, int], None]
"""Told, every `POLL_S` seconds, the steps that rank 0 has finished and the tokens of one step."""


def no_progress(step: int, tokens_per_step: int) -> None:
    """For who does not want to know."""


def launch(
    run_dir: RunDir,
    case: Case,
    *,
    device: str,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    on_progress: OnProgress = no_progress,
    sampler: Sampler | None = None,
) -> Failure | None:
    """Run the job described by `run_dir.case` to its end; afterwards no process of it is left.

    Returns a failure if the deadline passed; how the ranks ended is for `collect` to read.
    """
    mark = uuid.uuid4().hex
    with run_dir.launcher_log.open("wb") as log:
        launcher = subprocess.Popen(
            [python, "-m", "perfsuite.launcher", str(run_dir.path.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(case, device, environment or {})
            | {JOB_MARK: mark, ANCESTOR_PID: str(os.getpid())},
            start_new_session=True,
        )
    try:
        if sampler is not None:
            sampler.begin(launcher.pid)
        return _watch(launcher, run_dir, case, on_progress, sampler)
    finally:
        _kill(launcher, mark)


def _environment(case: Case, device: str, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, offline, with threads shared out."""
    ours = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        cores = len(os.sched_getaffinity(0))
        ours["OMP_NUM_THREADS"] = str(max(1, cores // case.topology.processes_per_node))
        ours["GLOO_SOCKET_IFNAME"] = "lo"
        ours["CUDA_VISIBLE_DEVICES"] = ""
    return {**os.environ, **ours, **case.framework.environment(), **extra}


def _watch(
    launcher: subprocess.Popen[bytes],
    run_dir: RunDir,
    case: Case,
    on_progress: OnProgress,
    sampler: Sampler | None,
) -> Failure | None:
    deadline = time.monotonic() + case.timeout_s
    steps = tokens = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(POLL_S)
            return None
        with contextlib.suppress(OSError, ValueError):
            steps, tokens = map(int, run_dir.progress.read_text().split())
        if sampler is not None:
            sampler.sample(steps)
        on_progress(steps, tokens)
        if time.monotonic() > deadline:
            return Failure(
                kind="timeout",
                message=f"killed after {case.timeout_s:g} s (the case's timeout_s), "
                f"when rank 0 had finished about {steps} of {case.total_steps} steps",
                at=time.time(),
            )


def _kill(launcher: subprocess.Popen[bytes], mark: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    sweep(mark)


def sweep(mark: str) -> None:
    """Kill every process of a job but this one. Raises `LaunchError` if one cannot be killed."""
    deadline = time.monotonic() + KILL_S
    while left := _marked(mark):  # a process may fork while it is being killed
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise LaunchError(
                f"processes {pids} of this job cannot be killed (waiting for a driver?): "
                "whatever is measured next would share the machine with them; look at dmesg"
            )


def _marked(mark: str) -> list[psutil.Process]:
    """Living processes of the job but this one, in whatever session they put themselves."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.environ().get(JOB_MARK) == mark and process.pid != os.getpid()
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
