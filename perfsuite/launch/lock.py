"""Lets one session at a time measure on a machine, whatever its GPUs: they share cores, links and power.

The lock is flock(2) on a file, which holds who has it; the kernel lets it go when its holder ends.
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

LOCK_FILE = "PERFSUITE_LOCK"  # variable with another lock file, whose sessions wait for each other alone
USUAL = Path("/tmp/perfsuite.lock")  # the same for every user: `tempfile.gettempdir()` may be a user's own
POLL_S = 1.0
WAIT_S = 12 * 3600.0  # longest wait: longer than a night of cases
LONGEST = 4096  # most bytes that are read of the file: another user may have written it


class MachineLock:
    """The lock of this machine, or `file`, for nodes that are not shared with its other users."""

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
        """Take the lock, or wait and say for whom.

        Raises `FileError`, and `MachineError` after the longest wait. What was waited before counts, so that
        only the first case of a session waits.
        """
        if self._descriptor is not None:
            return
        file = Path(os.environ.get(LOCK_FILE) or self._file or USUAL)
        descriptor = _open(file)
        try:
            self._queue(descriptor, say)
            with contextlib.suppress(OSError):  # a full disk: the text only tells who has the lock
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _ourselves().encode(errors="replace"), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the next session measure. Nobody is named in the file any more."""
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
    """Hold the lock inside of a `with`; `say` prints for whom it waits. Raises as `MachineLock.take`."""
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
    """Without the arguments of the command, which may hold a secret: every user may read the file."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    since = datetime.now().isoformat(sep=" ", timespec="seconds")
    user = psutil.Process().username()
    return f"pid {os.getpid()} of {user}, since {since}: {name} in {os.getcwd()[:500]}"
