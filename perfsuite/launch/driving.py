"""Start the agents of a job with one command, and watch the job, in the same way for every launcher.

On one machine, the command starts the agent itself. On several machines, it is a command of a scheduler. This
command must pass its stdin on to the agents.
"""

import contextlib
import getpass
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.frameworks.base import NCCL_AFTER_S, framework_of
from perfsuite.inputs.files import LARGEST_OWN, read_text
from perfsuite.launch.hang import HangDetector
from perfsuite.launch.job import Job, OnProgress
from perfsuite.node.lease import Beats, text_of
from perfsuite.node.processes import POLL_S, wait_for
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import (
    COMPILE_CACHES,
    FLIGHT_RECORDER_FILE,
    INDUCTOR_CACHE,
    JOB_VARIABLES,
    RunDir,
)

LONGEST_BUILD_S = 1800.0  # maximum duration of a build of a C++ extension; it usually takes minutes
REPORTS_S = 1.0  # seconds between two checks for new reports of ranks
# Seconds after which agents must have ended a job. Writing the stacks, writing the collective calls, reading
# NVML and waiting for other agents can each take 5 s.
END_S = 25.0
NCCL_HEARTBEAT_S = 480  # torch's default for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC


def agent_command(job: Job) -> list[str]:
    """Return the command that starts an agent on a node."""
    return [job.python, "-m", "perfsuite.node.agent", str(job.run_dir.path.resolve())]


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str], directory: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own session, in `directory`. Its stdin stays open until the end of the `with`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def never_broken() -> bool:
    """Return False. This is the default of `is_broken`, for a job whose only agent is the command itself.

    `drive` notices the end of the command in any case.
    """
    return False


def drive(
    job: Job,
    process: subprocess.Popen[bytes],
    on_progress: OnProgress,
    is_broken: Callable[[], bool] = never_broken,
    *,
    hang: HangDetector | None = None,
    reports_s: float = REPORTS_S,
    end_s: float = END_S,
) -> Failure | None:
    """Watch a job until its command ends. Return a failure if the job had to be ended, and None if not.

    If the job had to be ended, each rank has written its stacks, and each agent has written the health of its
    node. If an agent died (`is_broken`), this function returns at once, and the launcher ends the job. `hang`
    decides whether the job hangs. Every `reports_s` seconds (1 by default), this function looks for new
    reports of ranks. Agents have `end_s` seconds (25 by default) to end the job.
    """
    with Beats(job.run_dir.lease) as beats:
        failure = _watch(job, process, on_progress, is_broken, hang or HangDetector(), reports_s)
        if failure is not None:
            beats.end_job()
            wait_for(process, end_s)
        return failure


def _watch(
    job: Job,
    process: subprocess.Popen[bytes],
    on_progress: OnProgress,
    is_broken: Callable[[], bool],
    hang: HangDetector,
    reports_s: float,
) -> Failure | None:
    run_dir = job.run_dir
    case = job.case
    began = listed_at = time.monotonic()
    steps = tokens = reports = 0
    running: dict[int, str] = {}
    while not (wait_for(process, POLL_S) or is_broken()):
        with contextlib.suppress(OSError, ValueError, FileError):
            steps, tokens = map(int, read_text(run_dir.progress, LARGEST_OWN).split())
        on_progress(steps, tokens)
        now = time.monotonic()
        if now - listed_at > reports_s:
            listed_at = now
            reports = len(run_dir.all_ranks()) + len(run_dir.all_profiles())
            running = run_dir.all_running()
        quiet_s = hang.quiet_s(
            now, is_training=tokens > 0, steps=steps, reports=reports, is_in_event=bool(running)
        )
        if now - began > case.timeout_s:
            why = f"{case.timeout_s:g} s (the case's timeout_s)"
        elif quiet_s is not None:
            why = f"{quiet_s:.0f} s without a step ({hang.allowed_s:.0f} s are allowed here)"
        else:
            continue
        far = f"when rank 0 had finished at least {steps} of {case.total_steps} steps"
        if running:
            rank, span = next(iter(running.items()))
            far += f"; rank {rank} was in {span}"
        return Failure(kind="timeout", message=f"killed after {why}, {far}", at=time.time())
    return None


def prepare(run_dir: RunDir) -> None:
    """Create the files that nodes wait for, before the nodes read them.

    On a shared file system, a node notices a change of an existing file earlier than it notices a new file.

    Locks of builds that an earlier launch did not finish are removed, because torch would wait for them
    forever. Raises `FileError` if a file cannot be written.
    """
    for lock in (*run_dir.all_extension_locks(), *abandoned_locks()):
        with contextlib.suppress(OSError):
            lock.unlink(missing_ok=True)
    documents.write_text(run_dir.endpoint, "")
    documents.write_text(run_dir.lease, text_of(0, "go"))
    documents.write_text(run_dir.progress, "")


def abandoned_locks() -> list[Path]:
    """Return the locks in the user's TORCH_EXTENSIONS_DIR that no build holds any more.

    torch keeps the lock's file open while it builds. A build on another machine cannot be seen, but a build
    takes only minutes. So a lock counts as abandoned only if the lock is also old, and belongs to this user.
    """
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not directory:
        return []
    old = [lock for lock in Path(directory).absolute().glob("*/lock") if _is_own_and_old(lock)]
    if not old:
        return []
    opened = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            opened.add(os.readlink(descriptor))
    return [lock for lock in old if str(lock.resolve()) not in opened]


def _is_own_and_old(lock: Path) -> bool:
    """Return whether a lock belongs to this user, and is older than any build that could still run."""
    try:
        status = lock.stat()
    except OSError:  # its build has just ended
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > LONGEST_BUILD_S


def environment(job: Job) -> dict[str, str]:
    """Return the environment of a job: the variables of this process, of perfsuite and of the framework.

    Hugging Face's libraries run offline.

    Compilers keep their caches next to the launch, unless the user has set another directory. With the
    default directory, the time of the first step would depend on earlier sessions.

    The job's own variables override all others. Each agent adds variables that depend on its node, such as
    the number of threads, unless the job sets them.
    """
    ours = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""} if job.machine.device == "cpu" else {}
    of_framework = framework_of(job.case).plan(job.case).environment
    caches = job.run_dir.compile_caches.resolve()
    of_compilers = {name: str(caches / folder) for name, folder in COMPILE_CACHES.items()}
    theirs = {name: value for name, value in os.environ.items() if not _is_named_by_torch(name, value)}
    chosen = {**of_compilers, **theirs, **ours, **no_gpu, **of_framework, **job.variables}
    if job.variables:
        chosen[JOB_VARIABLES] = " ".join(job.variables)
    flight_recorder = {FLIGHT_RECORDER_FILE: str(job.run_dir.flight_recorder.resolve())}
    if job.machine.device == "cpu":
        return {**flight_recorder, **chosen}
    # NCCL's own monitor must not end a job before this module does.
    later_s = max(NCCL_HEARTBEAT_S, math.ceil(job.case.timeout_s) + NCCL_AFTER_S)
    return {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(later_s),
        # If torch's NCCL watchdog ends a collective, torch's flight recorder writes the last NCCL calls of
        # each rank.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        **flight_recorder,
        **chosen,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML, which detects and watches the GPUs, uses this order
    }


def _is_named_by_torch(name: str, value: str) -> bool:
    """Return whether torch itself has set this variable. torch sets the variable when it imports inductor."""
    if name != INDUCTOR_CACHE:
        return False
    with contextlib.suppress(Exception):  # raised by `getuser` if the user has no name
        # This code is copied from torch._inductor.runtime.cache_dir_utils. That module imports much of torch.
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        return value == os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return False
