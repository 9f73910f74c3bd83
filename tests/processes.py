"""Processes that a test starts or looks for, any of which may end meanwhile, and scripts in their place."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from perfsuite.results.run_dir import RunDir


def python(code: str, *arguments: str) -> str:
    """Return what a new Python that runs `code` has printed. An `AssertionError` holds what made it fail."""
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def executable(file: Path, *lines: str) -> Path:
    """Write a shell script that can be run, in place of a program. Returns its file."""
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return file


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Return when a condition holds. Raises `TimeoutError` naming what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


def arguments(process: psutil.Process) -> list[str]:
    """A process's command line in words; none of a process that has ended, reaped by its parent or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def pid_of(rank: int, run_dir: RunDir, node: int = 0) -> int:
    """The process of a rank that trains, on a node of its launch."""
    return next(pid for each, pid, _ in run_dir.all_stacks(node) if each == rank)


def agent_among(processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """The first of some processes that is an agent of perfsuite. A rank that it forked has its words, too."""
    agents = [each for each in processes if "perfsuite.node.agent" in arguments(each)]
    return min(agents, key=psutil.Process.create_time, default=None)  # which psutil knows of the dead, too
