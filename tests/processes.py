"""Helpers: scripts that replace programs, and processes that a test starts or finds."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil
import pytest

from perfsuite.results.run_dir import RunDir

SLEEPS = """
import time
from pathlib import Path
try:
    Path("begun").touch()
    time.sleep(60)
except KeyboardInterrupt:
    Path("interrupted").touch()
"""
"""A module that leaves the file `begun`, and the file `interrupted` if it is interrupted."""


def python(code: str, *arguments: str) -> str:
    """Return the output of a new Python that runs `code`. Raises `AssertionError` with the error, if any."""
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def have_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a C++ compiler on PATH, so that dry runs can simulate CUDA. It compiles nothing."""
    directory.mkdir()
    executable(directory / "g++", "exit 1")
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)


def output_of(words: str | Sequence[str], *, status: int = 0, **how: Any) -> str:
    """Return the output of a command that must end with this exit status. By default it includes errors."""
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, text=True, check=False, **{**both, **how})
    assert done.returncode == status, f"{words}\n{done.stdout[-6000:]}"
    return str(done.stdout)


def executable(file: Path, *lines: str) -> Path:
    """Write an executable shell script, as a replacement for a program. Returns the script's file."""
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return file


class Left(BaseException):
    """Raised in place of `os._exit`, which would end this process."""


def leave(status: int) -> NoReturn:
    raise Left(f"with {status}")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Return when a condition holds. Otherwise raises `TimeoutError` naming what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Kill a process if the block fails.

    `with process` alone would wait for the end of the process forever.
    """
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def read_until(
    words: str, output: IO[str] | None, process: subprocess.Popen[str], seconds: float = 120
) -> None:
    """Read the output of a process up to the line with these words. After `seconds` the process is killed,
    which ends the output. Raises `TimeoutError` if there is no such line.
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
    """Return the words of a process's command line, or none if the process has ended, reaped or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def pid_of(rank: int, run_dir: RunDir, node: int = 0) -> int:
    """Return the process id of a rank that trains on a node of its launch."""
    return next(pid for stack_rank, pid, _ in run_dir.all_stacks(node) if stack_rank == rank)


def agent_among(processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """Return the agent of perfsuite among some processes. Its forked ranks have the same command line, so the
    oldest process is the agent."""
    agents = [process for process in processes if "perfsuite.node.agent" in arguments(process)]
    # psutil also knows when an ended process began.
    return min(agents, key=psutil.Process.create_time, default=None)
