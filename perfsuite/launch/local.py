"""Starts the launcher process of a job on this machine, watches it, and leaves no process behind.

Driver side; imports neither torch nor pytest.

What ends whom: on every way out, this process kills the launcher's process group and every process that
carries the job's mark in its environment. If this process is killed itself, the kernel tells the launcher
(parent-death signal), which kills the same processes and ends. If both are killed, the kernel kills the fork
server and every rank in the same way.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

from perfsuite.case.case import Case
from perfsuite.frameworks.base import NCCL_AFTER_S, framework_of
from perfsuite.launch import stacks
from perfsuite.launch.hang import HangDetector
from perfsuite.launch.health import Sampler
from perfsuite.launch.machine import CUDA_ORDER
from perfsuite.launch.processes import JOB_MARK, marked, sweep
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import ANCESTOR_PID, FLIGHT_RECORDER_FILE, RunDir

POLL_S = 0.05
"""Seconds between two looks at a running job."""
NCCL_HEARTBEAT_S = 480
"""torch's default of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC."""

OnProgress = Callable[[int, int], None]
"""Is called every `POLL_S` seconds with the steps that rank 0 has finished and the tokens of one step."""


def no_progress(step: int, tokens_per_step: int) -> None:
    """Ignore the progress."""


def launch(
    run_dir: RunDir,
    case: Case,
    *,
    device: str,
    python: str = sys.executable,
    on_progress: OnProgress = no_progress,
    sampler: Sampler | None = None,
) -> Failure | None:
    """Run the job of `run_dir.case` to its end. Afterwards no process of it is left.

    Returns a failure if the deadline passed or the job hung; each rank has then written its stacks. How the
    ranks themselves ended is in their reports.
    """
    mark = uuid.uuid4().hex
    if sampler is not None:
        sampler.prepare()
    with run_dir.launcher_log.open("wb") as log:
        launcher = subprocess.Popen(
            [python, "-m", "perfsuite.launch.agent", str(run_dir.path.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **_flight_recorder(run_dir, device),
                **_environment(case, device),
                JOB_MARK: mark,
                ANCESTOR_PID: str(os.getpid()),
            },
            start_new_session=True,
        )
    try:
        if sampler is not None:
            sampler.begin(launcher.pid)
        failure = _watch(launcher, run_dir, case, on_progress, sampler)
        if failure is not None:
            stacks.ask(run_dir, marked(mark))
        return failure
    finally:
        _kill(launcher, mark)


def _environment(case: Case, device: str) -> dict[str, str]:
    """Return this process's environment, changed for the job: offline, and with its share of the threads."""
    ours = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment = framework_of(case).plan(case).environment
    cores = len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": str(max(1, cores // case.topology.processes_per_node))}
    if device == "cpu":
        alone = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, **ours, **threads, **alone, **environment}
    # What a user has set wins, but not on a CPU, where the number of threads is part of what is measured.
    return {**threads, **_on_gpu(case), **os.environ, **ours, **environment}


def _on_gpu(case: Case) -> dict[str, str]:
    """Number GPUs as NVML does, and keep NCCL's own monitor from ending a job before this module does."""
    later_s = max(NCCL_HEARTBEAT_S, math.ceil(case.timeout_s) + NCCL_AFTER_S)
    return {"CUDA_DEVICE_ORDER": CUDA_ORDER, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(later_s)}


def _flight_recorder(run_dir: RunDir, device: str) -> dict[str, str]:
    """Have torch write its flight recorder (what each rank last asked of NCCL) into the launch's directory.

    It does so when a collective hangs until NCCL's watchdog ends it. A user's own file, under the older name
    of the variable, wins.
    """
    if device == "cpu" or "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in os.environ:
        return {}
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", FLIGHT_RECORDER_FILE: str(run_dir.flight_recorder.resolve())}


def _watch(
    launcher: subprocess.Popen[bytes],
    run_dir: RunDir,
    case: Case,
    on_progress: OnProgress,
    sampler: Sampler | None,
) -> Failure | None:
    """Wait until the launcher ends. Return a failure if the job must be killed."""
    began = time.monotonic()
    steps = tokens = 0
    hang = HangDetector()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(POLL_S)
            return None
        with contextlib.suppress(OSError, ValueError):
            steps, tokens = map(int, run_dir.progress.read_text().split())
        if sampler is not None:
            sampler.sample(steps)
        on_progress(steps, tokens)
        now = time.monotonic()
        reports = len(run_dir.all_ranks())  # one listing, however many ranks
        quiet_s = hang.quiet_s(now, is_training=tokens > 0, steps=steps, reports=reports)
        why = None
        if now - began > case.timeout_s:
            why = f"{case.timeout_s:g} s (the case's timeout_s)"
        elif quiet_s is not None:
            why = f"{quiet_s:.0f} s without a step ({hang.allowed_s:.0f} s are let pass here)"
        if why is not None:
            far = f"when rank 0 had finished about {steps} of {case.total_steps} steps"
            return Failure(kind="timeout", message=f"killed after {why}, {far}", at=time.time())


def _kill(launcher: subprocess.Popen[bytes], mark: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    sweep(mark)
