from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import NoReturn

import pytest

from perfsuite.results.run_dir import ANCESTOR_PID
from perfsuite.worker import leash


class Left(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the kernel was asked for, which would bind this process for good."""
    calls: list[tuple[int, int]] = []
    libc = SimpleNamespace(prctl=lambda option, by: calls.append((option, by)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)

    def leave(status: int) -> NoReturn:
        assert status == 1
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    return calls


def test_the_kernel_is_asked_for_a_signal(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ANCESTOR_PID, raising=False)
    leash.die_with_parent()
    leash.die_with_parent(signal.SIGUSR2)
    pr_set_pdeathsig = 1  # linux/prctl.h
    assert asked == [(pr_set_pdeathsig, signal.SIGKILL), (pr_set_pdeathsig, signal.SIGUSR2)]


def test_who_was_born_too_late_leaves_at_once(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ANCESTOR_PID, str(os.getpid()))
    leash.die_with_parent()
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now: nobody has read its exit code
    monkeypatch.setenv(ANCESTOR_PID, str(child.pid))
    with pytest.raises(Left):
        leash.die_with_parent()
    child.wait()
    with pytest.raises(Left):
        leash.die_with_parent()
