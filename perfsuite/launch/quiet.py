"""Detect other users of the machine between two launches, and wait until there are none.

Other users may use as much CPU time and GPU memory as `analysis.health` allows in a healthy run. No job of
perfsuite runs between launches, so any process that uses the machine belongs to someone else.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from perfsuite.analysis.health import FOREIGN_CPU_SHARE, FOREIGN_MEMORY_BYTES, HELD_BYTES, STEAL_SHARE
from perfsuite.case.hardware import Machine
from perfsuite.errors import MachineError, error_text
from perfsuite.node import nvml_process
from perfsuite.node.cpu import Cpu, read_cpu
from perfsuite.node.machine import readable, visible_handles
from perfsuite.results.amounts import amount

QUIET_S = 5.0  # the machine is quiet after this many seconds without other users
LOOK_EVERY_S = 1.0
WAIT_S = 120.0  # default maximum wait. Many builds and test runs end in this time, but training runs do not
NAMED = 3  # maximum number of processes that a line names
WORTH_NAMING = 0.02  # a process is named if it uses at least this share of the cores' time
LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True)
class Cores(Cpu):
    """The CPU time used so far: on the cores that a job may use, and by each process."""

    # CPU seconds by process id and start time, because ids are reused.
    by_process: Mapping[tuple[int, float], float]


def cores() -> Cores:
    """Read the CPU time used so far."""
    cpu = read_cpu(Path("/proc/stat"), os.sched_getaffinity(0)) or Cpu(processes_s=0, steal_s=0, total_s=0)
    times = {
        (process.pid, process.info["create_time"]): process.info["cpu_times"]
        for process in psutil.process_iter(["create_time", "cpu_times"])
    }
    by_process = {key: spent.user + spent.system for key, spent in times.items() if spent is not None}
    return Cores(**vars(cpu), by_process=by_process)


def others(before: Cores, after: Cores, own_pid: int) -> list[str]:
    """Return the reasons why the machine was not quiet between two readings. Empty if it was quiet."""
    total = after.total_s - before.total_s
    if total <= 0:
        return []
    own = sum(spent for (pid, _), spent in _spent(before, after).items() if pid == own_pid)
    share = (after.processes_s - before.processes_s - own) / total
    steal = (after.steal_s - before.steal_s) / total
    reasons = []
    if share > FOREIGN_CPU_SHARE:
        reasons.append(f"{share:.0%} of the cores' time used by {who(before, after, own_pid)}")
    if steal > STEAL_SHARE:
        reasons.append(f"{steal:.0%} of the cores' time taken by the hypervisor")
    return reasons


def who(before: Cores, after: Cores, own_pid: int) -> str:
    """Name the living processes that used the largest shares of the cores' time between two readings."""
    total = after.total_s - before.total_s
    shares = [(seconds / total, pid) for (pid, _), seconds in _spent(before, after).items() if total > 0]
    most = sorted(process for process in shares if process[0] >= WORTH_NAMING and process[1] != own_pid)
    named = [f"{name_of(pid)} {share:.0%}" for share, pid in most[: -NAMED - 1 : -1]]
    return ", ".join(named) or "processes that have ended or are not visible here"


def _spent(before: Cores, after: Cores) -> dict[tuple[int, float], float]:
    return {key: seconds - before.by_process.get(key, 0.0) for key, seconds in after.by_process.items()}


def name_of(pid: int) -> str:
    """Return a short name for a process: `python train.py (pid 4711)`.

    It consists of the program and the first argument that is not an option.
    """
    try:
        process = psutil.Process(pid)
        program, *words = process.cmdline() or [process.name()]
    except psutil.Error:
        return f"a process (pid {pid})"
    is_code = any(re.fullmatch("-[A-Za-z]*c", word) for word in words)
    first = [] if is_code else [word for word in words if not word.startswith("-")][:1]
    command = " ".join(word.rstrip("/").rsplit("/", 1)[-1] for word in [program, *first])
    name = "".join(letter if letter.isprintable() else "?" for letter in command)
    return f"{name[:LONGEST_NAME]} (pid {pid})"


def gpu_users(nvml: Any, devices: int) -> list[str]:
    """Return a line for each GPU on which other processes hold too much memory.

    Only the first `devices` visible GPUs are checked. In a container, NVML does not list the processes of
    other users: only the memory in use shows that such processes exist. Raises `MachineError` if NVML cannot
    read a GPU.
    """
    users = []
    nvml.nvmlInit()
    try:
        for index, handle in enumerate(visible_handles(nvml)[:devices]):
            with readable(nvml, str(index), handle):
                processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                used = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used
            held = sum(process.usedGpuMemory or 0 for process in processes)
            if held > FOREIGN_MEMORY_BYTES:
                names = ", ".join(name_of(process.pid) for process in processes[:NAMED])
                users.append(f"{amount(held, 'bytes')} of GPU {index} held by {names}")
            elif used > HELD_BYTES:
                held_by = "processes that NVML does not list"
                users.append(f"{amount(used, 'bytes')} of GPU {index} held by {held_by}")
    finally:
        nvml.nvmlShutdown()
    return users


def see_gpus(devices: int, *, library: str = nvml_process.LIBRARY) -> list[str]:
    """Return the `gpu_users` of this machine. Raises `MachineError` if NVML cannot report them.

    A machine without the file `library` has no NVML.
    """
    if not nvml_process.has_library(library):
        return _see_gpus_here(devices)
    return list(nvml_process.ask("perfsuite.launch.quiet", str(devices)))


def _see_gpus_here(devices: int) -> list[str]:
    """Return the users of GPUs, as this process sees them. Raises `MachineError` if NVML fails."""
    import pynvml

    try:
        return gpu_users(pynvml, devices)
    except MachineError:
        raise
    except Exception as error:  # not all errors of pynvml are NVMLErrors
        raise MachineError(f"the users of the GPUs are unknown: {error_text(error)}") from error


def _users_of(see: Callable[[], list[str]]) -> list[str]:
    """Return the users that `see` returns. If NVML cannot name them, return a line about unknown users."""
    try:
        return see()
    except MachineError as error:
        return [f"unknown users ({error})"]


@dataclass
class Neighbours:
    """Names the other users of a session's machine, and waits until they are quiet.

    `say` prints a line. `show` updates a live line.
    """

    say: Callable[[str], None]
    show: Callable[[str], None]
    most_s: float = WAIT_S
    see_cores: Callable[[], Cores] = cores
    see_gpus: Callable[[int], list[str]] = see_gpus  # number of GPUs -> the users of their memory
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _before: Cores | None = None
    # Whether the last wait failed. If it failed, the next wait gives up as soon as it sees another user.
    _in_vain: bool = False

    def launch_begins(self, machine: Machine) -> None:
        """Start to observe the users of `machine`."""
        self._before = self.see_cores() if machine.device == "cpu" else None

    def during_launch(self, machine: Machine, devices: int) -> str:
        """Name the other users: those on the GPUs now, or those on the cores since `launch_begins` ran.

        All processes of the launch must have ended.
        """
        if machine.device == "cuda":
            return "; ".join(_users_of(lambda: self.see_gpus(devices))) or "nobody is visible now"
        assert self._before is not None
        return who(self._before, self.see_cores(), os.getpid())

    def wait(self, machine: Machine, devices: int) -> bool:
        """Wait until `machine` is quiet. Return False if it is not quiet within `most_s` seconds."""
        most_s = QUIET_S if self._in_vain else max(self.most_s, QUIET_S)
        if not self._in_vain:
            quiet = f"others use less than {FOREIGN_CPU_SHARE:.0%} of the cores' time"
            if machine.device == "cuda":
                quiet = "no other process holds memory of the job's GPUs"
            self.say(
                f"waiting at most {most_s:.0f} s for a period of {QUIET_S:.0f} s in which {quiet} "
                "(--perf-wait-quiet; for a command, --wait-quiet)"
            )
        began = quiet_since = self.clock()
        look = self._look(machine, devices)
        while quiet_since + QUIET_S <= began + most_s:
            self.sleep(LOOK_EVERY_S)
            now = self.clock()
            users = _users_of(look)
            if users:
                quiet_since = now
            elif now - quiet_since >= QUIET_S:
                self.say(f"quiet after {now - began:.0f} s")
                self._in_vain = False
                return True
            why = f": {'; '.join(users)}" if users else ""
            self.show(f"waiting for quiet, at most {began + most_s - now:.0f} s{why}")
        gone = "still not quiet" if self._in_vain else f"not quiet within {most_s:.0f} s"
        self.say(f"{gone}: {'; '.join(users)}")
        self._in_vain = True
        return False

    def look(self, machine: Machine, devices: int) -> list[str]:
        """Watch other users for `LOOK_EVERY_S` seconds, and return what they did. Empty if it was quiet."""
        seen = self._look(machine, devices)
        self.sleep(LOOK_EVERY_S)
        return seen()

    def _look(self, machine: Machine, devices: int) -> Callable[[], list[str]]:
        """Return a function that returns what other users did since its last call (see `look`)."""
        if machine.device == "cuda":
            return lambda: self.see_gpus(devices)
        seen = [self.see_cores()]

        def look() -> list[str]:
            seen.append(self.see_cores())
            return others(seen[-2], seen[-1], os.getpid())

        return look


if __name__ == "__main__":
    nvml_process.answer(lambda: _see_gpus_here(int(sys.argv[1])))
