import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfsuite.errors import FileError, MachineError
from perfsuite.launch import lock
from perfsuite.launch.lock import LOCK_FILE, MachineLock


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOCK_FILE, str(tmp_path / "perfsuite.lock"))
    return tmp_path / "perfsuite.lock"


@pytest.fixture
def held(file: Path) -> Iterator[None]:
    """Hold the lock in this process, as another session would."""
    with lock.machine_lock(print):
        yield


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def said_while_held() -> str:
    """Return the message that is printed for a session that has to wait."""
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        MachineLock(sleep=interrupt).take(said.append)
    return said[0]


@pytest.mark.usefixtures("file")
def test_says_once_who_holds_the_lock() -> None:
    first = MachineLock()
    said = list[str]()
    naps = list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            first.release()

    second = MachineLock(sleep=sleep)
    first.take(print)
    first.take(print)
    second.take(said.append)
    (line,) = said
    assert line.startswith(f"waiting for another session on this machine: pid {os.getpid()} of ")
    assert naps == [lock.POLL_S] * 3
    second.release()
    second.release()


def test_file_holds_no_secret_and_is_emptied(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/pytest", "--perf-against=HF_TOKEN=hidden main"])
    with lock.machine_lock(print):
        text = file.read_text()
    assert f": pytest in {os.getcwd()}" in text
    assert "hidden" not in text
    assert file.read_text() == ""


def test_any_user_may_open_the_file(file: Path) -> None:
    before = os.umask(0o077)
    with lock.machine_lock(print):
        assert os.umask(before) == 0o077
    assert stat.S_IMODE(file.stat().st_mode) == 0o666


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "unknown holder"),
        ("pid 7 of a, since now: x\x1b[2J\n in /", "pid 7 of a, since now: x?[2J? in /"),
        ("pid 7 of a" + "b" * 5000, f"pid 7 of a{'b' * (lock.LONGEST - 10)}"),
    ],
    ids=["empty", "escapes", "long"],
)
@pytest.mark.usefixtures("held")
def test_text_of_another_user_is_cleaned_and_cut(file: Path, content: str, said: str) -> None:
    file.write_text(content)
    assert said_while_held().endswith(f": {said}")


def test_a_lock_that_cannot_be_opened_is_named(file: Path) -> None:
    file.symlink_to("elsewhere")
    with pytest.raises(FileError, match=rf"cannot open {file}, the lock of this machine: .*{LOCK_FILE}"):
        MachineLock().take(print)


def test_a_full_disk_costs_only_who_has_the_lock(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with lock.machine_lock(print):
        assert said_while_held()


@pytest.mark.usefixtures("held")
def test_interrupted_wait_leaves_nothing_open() -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        MachineLock(sleep=interrupt).take(lambda line: None)
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.usefixtures("held")
def test_longest_wait_covers_all_tries() -> None:
    naps = list[float]()
    waiting = MachineLock(longest_wait_s=3, sleep=naps.append)
    said = (
        f"another session is still measuring on this machine after 3 s: pid {os.getpid()} of .*"
        rf"--perf-wait-lock\), or set {LOCK_FILE} to another file$"
    )
    for _ in range(2):
        with pytest.raises(MachineError, match=said):
            waiting.take(lambda line: None)
    assert naps == [lock.POLL_S] * 3


def test_takes_a_freed_lock_after_the_longest_wait(file: Path) -> None:
    waiting = MachineLock(longest_wait_s=1, sleep=lambda seconds: None)
    with lock.machine_lock(print), pytest.raises(MachineError):
        waiting.take(lambda line: None)
    waiting.take(print)
    assert str(os.getpid()) in file.read_text()
    waiting.release()
