"""Find the processes of a job, request their stacks and collective calls, wait for them, and kill them.

A process belongs to a job if it has the job's mark in its environment, or if it descends from the agent. The
agent adopts processes whose parent has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsuite.errors import LaunchError
from perfsuite.results.run_dir import STACKS_SIGNAL, RunDir

if TYPE_CHECKING:
    import psutil

POLL_S = 0.05  # seconds between checks whether a child has ended
KILL_S = 60  # seconds within which a killed process must be gone
STACKS_S = 5  # maximum seconds to wait for stacks, and then for collective calls
STACKS_POLL_S = 0.1
# Environment variable that a job's processes inherit. Its value is different for each job.
JOB_MARK = "PERFSUITE_JOB"


def captured(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without stdin, and return its output and exit status.

    `how` contains further arguments for `subprocess.run`.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(command, check=False, **pipes, **how)


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes with a job's mark, in any Unix session, except for this process."""
    import psutil

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.environ().get(JOB_MARK) == mark and process.pid != os.getpid()
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def descendants(pid: int) -> list[psutil.Process]:
    """Return the living descendants of a process."""
    import psutil

    living = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
    return living


class JobProcesses:
    """The agent of a job and its descendants. The agent lives as long as the job."""

    def __init__(self, pid: int) -> None:
        import psutil

        # All processes that the job has had so far. Keep dead ones, because NVML still lists them for a
        # while.
        self.pids = {pid}
        self._agent = psutil.Process(pid)
        self._processes = [self._agent]

    def scan(self) -> None:
        """Look for new processes of the job. This reads all processes of the machine."""
        import psutil

        with contextlib.suppress(psutil.Error):
            self._processes = [self._agent, *self._agent.children(recursive=True)]
            self.pids |= {process.pid for process in self._processes}

    def cpu_s(self) -> float:
        """Return the CPU seconds of living processes, and of ended processes that their parent has reaped."""
        import psutil

        seconds = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds


def ask_for_stacks(
    run_dir: RunDir, processes: Iterable[psutil.Process], node: int = 0, *, wait_s: float = STACKS_S
) -> None:
    """Make processes of a node write their stacks and collective calls, if they have called `leash.listen`.

    The calls are requested only after the files of stacks have stopped growing. To report its calls, a
    process runs Python code, which can start the garbage collector. Stacks that are written at that time
    would show the collector. Waits at most `wait_s` for the stacks, and at most `wait_s` for the calls.
    """
    import psutil

    # If a process has two files, use the later one, which names its rank.
    files = {pid: file for _, pid, file in run_dir.all_stacks(node)}
    pids = []
    for process in processes:
        if process.pid in files:
            with contextlib.suppress(psutil.Error):
                process.send_signal(STACKS_SIGNAL)
                pids.append(process.pid)
    _wait_until_written([files[pid] for pid in pids], wait_s)

    calls = [run_dir.collectives(pid, node) for pid in pids if _takes_request(run_dir.request_address(pid))]
    wait_until(lambda: all(file.exists() for file in calls), wait_s)


def _wait_until_written(files: Sequence[Path], wait_s: float) -> None:
    """Wait until each file has content and has stopped growing, but at most `wait_s`."""
    until = time.monotonic() + wait_s
    before: list[int] = []
    while files and time.monotonic() < until:
        sizes = [file.stat().st_size for file in files]
        if all(sizes) and sizes == before:
            return
        before = sizes
        time.sleep(STACKS_POLL_S)


def _takes_request(address: str) -> bool:
    """Ask the process with this address for its collective calls. Return whether the process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
        requests.setblocking(False)
        try:
            requests.sendto(b"?", address)
        except OSError:  # the process does not listen, because torch has created no process group in it
            return False
    return True


def sweep(mark: str | None, agent: int | None = None, spare: Collection[int | None] = ()) -> None:
    """Kill the processes that have the job's mark or descend from `agent`.

    `agent` itself, this process and the processes in `spare` are not killed. Raises `LaunchError` if
    processes survive.
    """
    import psutil

    kept = {os.getpid(), agent, *spare}
    deadline = time.monotonic() + KILL_S
    while True:  # a process can fork while it is being killed
        of_job = [*([] if mark is None else marked(mark)), *([] if agent is None else descendants(agent))]
        left = [process for process in of_job if process.pid not in kept]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        if time.monotonic() > deadline:
            raise not_killed(sorted({process.pid for process in left}))


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended.

    `Popen.poll` is not used, because an interrupt (Ctrl-C) during the call might leave its lock held forever.
    """
    if process.returncode is None:
        try:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:  # reaped already, just before an interrupt. Like Popen, assume status 0
            process.returncode = 0
        else:
            process.returncode = os.waitstatus_to_exitcode(status) if pid else None
    return process.returncode is not None


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for at most `seconds` until a child has ended. Return whether it has ended."""
    return wait_until(lambda: has_ended(process), seconds)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for at most `seconds` until a condition is true. Return whether it is true."""
    until = time.monotonic() + seconds
    while not condition():
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(POLL_S, left_s))
    return True


def not_killed(pids: Iterable[int]) -> LaunchError:
    """Create the error for processes that survive SIGKILL."""
    return LaunchError(
        f"processes {', '.join(map(str, pids))} of this job cannot be killed (waiting for a driver?): "
        "they would disturb the next measurements on this machine. Look at dmesg"
    )
