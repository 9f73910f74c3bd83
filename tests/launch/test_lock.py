from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perfsuite.errors import FileError
from perfsuite.launch import lock
from perfsuite.launch.lock import LOCK_FILE, MachineLock

HOLDS = """
import sys
from perfsuite.launch.lock import MachineLock
MachineLock().take(print)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOCK_FILE, str(tmp_path / "perfsuite.lock"))
    return tmp_path / "perfsuite.lock"


@contextmanager
def another_session() -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its end."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, "bench_cases"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("file")
@pytest.mark.launch
def test_a_session_waits_for_another_until_that_dies_and_says_for_whom() -> None:
    said: list[str] = []
    with another_session() as other:

        def sleep(seconds: float) -> None:
            if len(naps) == 2:
                other.kill()
                other.wait()
            naps.append(seconds)

        naps: list[float] = []
        ours = MachineLock(sleep=sleep)
        ours.take(said.append)
    (line,) = said
    assert line.startswith(f"waiting for another session on this machine: pid {other.pid} of ")
    assert f": -c in {os.getcwd()}" in line
    assert len(naps) == 3
    ours.release()


@pytest.fixture
def held(file: Path) -> Iterator[None]:
    """By another session in this process."""
    with lock.machine_lock(print):
        yield


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def said_while_held() -> str:
    """What is said by who has to wait."""
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        MachineLock(sleep=interrupt).take(said.append)
    return said[0]


@pytest.mark.usefixtures("file")
def test_the_lock_is_held_until_it_is_released_and_who_waits_is_told_who_has_it() -> None:
    first, second = MachineLock(), MachineLock(sleep=interrupt)
    first.take(print)
    first.take(print)
    assert f"another session on this machine: pid {os.getpid()} of " in said_while_held()
    first.release()
    second.take(print)
    second.release()
    second.release()


def test_the_file_holds_no_secret_and_nothing_afterwards(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/pytest", "--perf-against=HF_TOKEN=hidden main"])
    with lock.machine_lock(print):
        told = file.read_text()
    assert f": pytest in {os.getcwd()}" in told
    assert "hidden" not in told
    assert file.read_text() == ""


def test_any_user_may_open_the_file(file: Path) -> None:
    before = os.umask(0o077)
    try:
        with lock.machine_lock(print):
            assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it has not said who it is"),
        ("pid 7 of a, since now: x\x1b[2J\n in /", "pid 7 of a, since now: x?[2J? in /"),
        ("pid 7 of a" + "b" * 5000, f"pid 7 of a{'b' * (lock.LONGEST - 10)}"),
    ],
    ids=["empty", "escapes", "long"],
)
@pytest.mark.usefixtures("held")
def test_what_another_wrote_is_not_trusted(file: Path, content: str, said: str) -> None:
    file.write_text(content)
    assert said_while_held().endswith(f": {said}")


def test_a_lock_that_cannot_be_opened_is_said(file: Path) -> None:
    file.symlink_to("elsewhere")
    with pytest.raises(FileError, match=rf"cannot open {file}, by which sessions .* queue: .*{LOCK_FILE}"):
        MachineLock().take(print)


def test_a_full_disk_costs_only_who_has_the_lock(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with lock.machine_lock(print):
        assert said_while_held()


@pytest.mark.usefixtures("held")
def test_an_interrupt_while_waiting_leaves_nothing_open() -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        MachineLock(sleep=interrupt).take(lambda line: None)
    assert len(os.listdir("/proc/self/fd")) == opened
