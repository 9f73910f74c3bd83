import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfsuite.results.run_dir import ANCESTOR_PID, STACKS_SIGNAL, RunDir
from perfsuite.worker import leash
from tests.processes import Left, leave


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the requests to the kernel. A real request would tie this process to its parent permanently.

    A call of `os._exit` does not end this process.
    """
    calls: list[tuple[int, int]] = []
    libc = SimpleNamespace(prctl=lambda option, by: calls.append((option, by)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(os, "_exit", leave)
    return calls


def test_the_kernel_is_asked_for_a_signal(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ANCESTOR_PID, raising=False)
    leash.die_with_parent()
    leash.die_with_parent(signal.SIGUSR2)
    assert asked == [(1, signal.SIGKILL), (1, signal.SIGUSR2)], "PR_SET_PDEATHSIG of linux/prctl.h"


def test_who_was_born_too_late_leaves_at_once(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ANCESTOR_PID, str(os.getpid()))
    leash.die_with_parent()
    child = subprocess.Popen([sys.executable, "-c", ""])
    # The child is a zombie now, because nobody has read its exit code.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setenv(ANCESTOR_PID, str(child.pid))
    with pytest.raises(Left, match=r"^with 1$"):
        leash.die_with_parent()
    child.wait()
    with pytest.raises(Left, match=r"^with 1$"):
        leash.die_with_parent()


@pytest.mark.parametrize("rank", [None, 3])
def test_listener_writes_stacks_at_each_request(tmp_path: Path, rank: int | None) -> None:
    leash.listen(RunDir(tmp_path), rank)
    try:
        file = RunDir(tmp_path).stacks(rank, os.getpid())
        assert file.read_text() == ""
        os.kill(os.getpid(), STACKS_SIGNAL)
        once = file.read_text()
        assert "test_listener_writes_stacks_at_each_request" in once
        os.kill(os.getpid(), STACKS_SIGNAL)
        assert len(file.read_text()) > len(once)
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
