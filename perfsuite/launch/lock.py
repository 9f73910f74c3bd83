"""Let only one session measure on a machine at a time, because GPUs share cores, links and power.

The lock is flock(2) on a file that names the holder. The kernel releases the lock when the holder ends.
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

# Variable with the path of another lock file. Sessions wait only for sessions with the same file.
LOCK_FILE = "PERFSUITE_LOCK"
USUAL = Path("/tmp/perfsuite.lock")  # the same for every user, unlike `tempfile.gettempdir()`
POLL_S = 1.0
WAIT_S = 12 * 3600.0  # maximum wait, longer than a nightly run
LONGEST = 4096  # maximum number of bytes to read from the file, because any user can write to it


class MachineLock:
    """The lock of this machine, or the lock in `file`.

    `file` is given if a scheduler has allocated the nodes to this job alone.
    """

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
        """Take the lock. While waiting, call `say` with a line about the holder.

        Raises `FileError` if the file cannot be opened, and `MachineError` after the maximum wait. The
        maximum applies to all waits of a session together, not to each case.
        """
        if self._descriptor is not None:
            return
        file = Path(os.environ.get(LOCK_FILE) or self._file or USUAL)
        descriptor = _open(file)
        try:
            self._queue(descriptor, say)
            # The text of the lock only names its holder. A full disk must not end the session.
            with contextlib.suppress(OSError):
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
            holder = holder or "unknown holder"
            if self._waited_s >= self._longest_wait_s:
                raise MachineError(
                    "another session is still measuring on this machine after "
                    f"{self._waited_s:,.0f} s: {holder}. End it, wait longer (pytest's --perf-wait-lock), or "
                    f"set {LOCK_FILE} to another file"
                )
            if holder != said:
                said = holder
                say(f"waiting for another session on this machine: {holder}")
            self._sleep(POLL_S)
            self._waited_s += POLL_S


@contextlib.contextmanager
def machine_lock(say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock inside the `with`. `say` and errors are the same as for `MachineLock.take`."""
    lock = MachineLock()
    lock.take(say)
    try:
        yield
    finally:
        lock.release()


def _open(file: Path) -> int:
    """Open the lock file, and create it for all users if it does not exist.

    Try without O_CREAT first: in a protected /tmp, O_CREAT fails for a file of another user.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW
    before = os.umask(0)
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.open(file, flags)
        return os.open(file, flags | os.O_CREAT, 0o666)
    except OSError as error:
        raise FileError(
            f"cannot open {file}, the lock of this machine: {error.strerror}. "
            f"Make it writable, or set {LOCK_FILE} to another file"
        ) from None
    finally:
        os.umask(before)


def _ourselves() -> str:
    """Describe this process for the lock file. Leave out arguments: any user can read the file."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    since = datetime.now().isoformat(sep=" ", timespec="seconds")
    user = psutil.Process().username()
    return f"pid {os.getpid()} of {user}, since {since}: {name} in {os.getcwd()[:500]}"
