"""Measures how long perfsuite takes from a fault to its verdict, for a table in docs/evidence/faults.md.

Two ranks of a small Llama train under DDP on this machine. A rank or an agent is killed once both ranks run.
For a hang, the time begins with the last step that the driver sees, and the allowed time without a step is
subtracted. The measured time ends when `launch_once` returns and every process of the job is gone.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from perfsuite import DDP, Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import AllocationOverError
from perfsuite.launch.base import Launcher
from perfsuite.launch.hang import HANG_S, HangDetector
from perfsuite.launch.local import LocalLauncher
from perfsuite.measure import Launching, launch_once
from perfsuite.node.machine import detect_cpu
from perfsuite.results.run_dir import RunDir
from tests.benchmarks import show_table
from tests.processes import agent_among, pid_of
from tests.samples import make_case

REPEATS = 3
COLUMNS = ("fault", "reported", "seconds")
LET_PASS = re.compile(r"\((\d+) s are allowed here\)")
"""Pattern of the allowed seconds without a step, in the message of a hang."""
CASE = make_case(model="llama-tiny", framework=DDP())
Breaks = Callable[[RunDir], object]


def seconds(
    case: Case, machine: Machine, new_launcher: Callable[..., Launcher], breaks: Breaks | None
) -> tuple[float, str]:
    """Launch once, and break the launch as soon as both ranks run.

    Returns the seconds from the fault to the verdict, and the verdict's kind. Without `breaks`, the launch
    hangs. Then the time begins with the last step that is seen, and the allowed seconds without a step are
    subtracted.
    """
    launcher = new_launcher(new_detector=partial(HangDetector, hang_s=HANG_S if breaks else 4))
    began: list[float] = []
    seen = 0

    def look(step: int, tokens: int) -> None:
        nonlocal seen
        if step == seen or (began and breaks):
            return
        seen = step
        began.append(time.monotonic())
        if breaks is not None:
            breaks(run_dir)

    with tempfile.TemporaryDirectory() as name:
        run_dir = RunDir(Path(name) / "run")
        let_pass = 0
        try:
            how = Launching(inject="hang", launcher=launcher, on_progress=look)
            run = launch_once(case, machine, run_dir.path, how)
        except AllocationOverError:
            kind = "the session ends"
        else:
            kind = "measured" if run.failure is None else run.failure.kind
            if run.failure is not None:
                waited = LET_PASS.search(run.failure.message)
                if waited is not None:
                    let_pass = int(waited[1])
        return time.monotonic() - began[-1] - let_pass, kind


def cells(name: str, break_one: Callable[[], tuple[float, str]]) -> tuple[str, str, str]:
    """Break some launches, and return their row of the table."""
    taken = [break_one() for _ in range(REPEATS)]
    kinds = ", ".join(sorted({kind for _, kind in taken}))
    return name, kinds, f"{median(s for s, _ in taken):.1f}"


def kill_rank(run_dir: RunDir) -> None:
    """End rank 1 with SIGKILL, like the kernel's OOM killer."""
    os.kill(pid_of(1, run_dir), 9)


def kill_agent(run_dir: RunDir) -> None:
    """End the agent on this machine with SIGKILL."""
    agent = agent_among(psutil.Process().children())
    assert agent is not None
    agent.kill()


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield a row of the table for each fault."""
    for name, breaks in (("rank is killed", kill_rank), ("agent is killed", kill_agent), ("hang", None)):
        yield cells(name, partial(seconds, CASE, detect_cpu("x"), LocalLauncher, breaks))


if __name__ == "__main__":
    show_table(COLUMNS, rows())
