"""Processes that a test starts or looks for, any of which may end meanwhile, and scripts in their place."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from perfsuite.results.run_dir import RunDir


def python(code: str, *arguments: str) -> str:
    """Return what a new Python that runs `code` has printed. An `AssertionError` holds what made it fail."""
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def output_of(words: str | Sequence[str], *, status: int = 0, **how: Any) -> str:
    """Return what a command has written, whose exit status must be this one: errors, too, by default."""
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, text=True, check=False, **{**both, **how})
    assert done.returncode == status, f"{words}\n{done.stdout[-6000:]}"
    return str(done.stdout)


def executable(file: Path, *lines: str) -> Path:
    """Write a shell script that can be run, in place of a program. Returns its file."""
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return file


class Left(BaseException):
    """In place of the end of this process by `os._exit`, which `sys.exit` would not be."""


def leave(status: int) -> NoReturn:
    raise Left(f"with {status}")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Return when a condition holds. Raises `TimeoutError` naming what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Kill a process if the block fails. `with process` alone would wait for its end, without a limit."""
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def read_until(
    words: str, output: IO[str] | None, process: subprocess.Popen[str], seconds: float = 120
) -> None:
    """Read an output of a process up to the line with these words.

    The process is killed after `seconds`, which ends its output. Raises `TimeoutError` without such a line.
    """
    assert output is not None, "the output is not a pipe"
    killer = threading.Timer(seconds, process.kill)
    killer.start()
    lines: list[str] = []
    try:
        for line in output:
            lines.append(line)
            if words in line:
                return
    finally:
        killer.cancel()
    raise TimeoutError(f"{process.args!r} has not printed {words!r} in {seconds:g} s, but {lines}")


def arguments(process: psutil.Process) -> list[str]:
    """A process's command line in words; none of a process that has ended, reaped by its parent or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def pid_of(rank: int, run_dir: RunDir, node: int = 0) -> int:
    """The process of a rank that trains, on a node of its launch."""
    return next(pid for stack_rank, pid, _ in run_dir.all_stacks(node) if stack_rank == rank)


def agent_among(processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """The first of some processes that is an agent of perfsuite. A rank that it forked has its words, too."""
    agents = [process for process in processes if "perfsuite.node.agent" in arguments(process)]
    return min(agents, key=psutil.Process.create_time, default=None)  # which psutil knows of the dead, too
