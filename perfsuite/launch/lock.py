"""Let only one session measure on a machine at a time, even on other GPUs: these share cores, links, power.

The lock is flock(2) on a file that names the holder. The kernel releases it when the holder ends.
"""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil

from perfsuite.errors import FileError, MachineError

LOCK_FILE = "PERFSUITE_LOCK"  # variable with another lock file, whose sessions only wait for each other
USUAL = Path("/tmp/perfsuite.lock")  # the same for every user, unlike `tempfile.gettempdir()`
POLL_S = 1.0
WAIT_S = 12 * 3600.0  # longest wait; longer than a night of cases
LONGEST = 4096  # maximum bytes to read from the file, because another user may have written it


class MachineLock:
    """The lock of this machine, or `file`, for nodes that the machine's other users do not share."""

    def __init__(
        self,
        file: str | None = None,
        *,
        longest_wait_s: float = WAIT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._file = file
        self._sleep = sleep
        self._longest_wait_s = longest_wait_s
        self._waited_s = 0.0
        self._descriptor: int | None = None

    def take(self, say: Callable[[str], None]) -> None:
        """Take the lock. While waiting, say for whom.

        Raises `FileError`, and `MachineError` after the longest wait. Earlier waits count towards it, so that
        only the first case of a session waits.
        """
        if self._descriptor is not None:
            return
        file = Path(os.environ.get(LOCK_FILE) or self._file or USUAL)
        descriptor = _open(file)
        try:
            self._queue(descriptor, say)
            with contextlib.suppress(OSError):  # such as a full disk; the text only says who has the lock
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _ourselves().encode(errors="replace"), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the next session measure, and clear the holder's name from the file."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _queue(self, descriptor: int, say: Callable[[str], None]) -> None:
        said = None
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            written = os.pread(descriptor, LONGEST, 0).decode(errors="replace")
            holder = "".join(letter if letter.isprintable() else "?" for letter in written)
            holder = holder or "it has not said who it is"
            if self._waited_s >= self._longest_wait_s:
                raise MachineError(
                    "another session still measures on this machine after a wait of "
                    f"{self._waited_s:,.0f} s: {holder}. End it, wait longer (pytest's --perf-wait-lock), or "
                    f"name another file in {LOCK_FILE}"
                )
            if holder != said:
                said = holder
                say(f"waiting for another session on this machine: {holder}")
            self._sleep(POLL_S)
            self._waited_s += POLL_S


@contextlib.contextmanager
def machine_lock(say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock inside a `with`. `say` prints for whom it waits. Raises as `MachineLock.take`."""
    lock = MachineLock()
    lock.take(say)
    try:
        yield
    finally:
        lock.release()


def _open(file: Path) -> int:
    """Open a file that every user may open. In a protected /tmp, O_CREAT fails on another user's file."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    before = os.umask(0)
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.open(file, flags)
        return os.open(file, flags | os.O_CREAT, 0o666)
    except OSError as error:
        raise FileError(
            f"cannot open {file}, by which sessions on this machine queue: {error.strerror}. "
            f"Make it writable, or name another file in {LOCK_FILE}"
        ) from None
    finally:
        os.umask(before)


def _ourselves() -> str:
    """Describe this process without its arguments, which may contain a secret: any user may read the file."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    since = datetime.now().isoformat(sep=" ", timespec="seconds")
    user = psutil.Process().username()
    return f"pid {os.getpid()} of {user}, since {since}: {name} in {os.getcwd()[:500]}"
