"""Read files of unknown origin safely: only regular files, and only up to a size limit.

This module imports only `errors` from perfsuite.

A FIFO or a device can be endless, so reading it could hang or fill the machine's memory. A pipe that a shell
opened for this process (`<(command)`, `/dev/stdin`) is allowed, because it has a writer and an end.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from perfsuite.errors import FileError

OPEN_FILES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
"""Directories that list this process's open files. Pipes in these directories may be read. Another process
writes to them, so reading does not wait forever for a writer."""
LARGEST = 200_000_000
"""Maximum size of a file with settings, or of a line of a trace, in bytes."""
LARGEST_DOCUMENT = 1_000_000_000
"""Maximum size of a perfsuite document, in bytes. Reading a document takes four times its size in memory. The
results of 1,000 cases with 8 launches on 2 ranks take 216 MB."""
LARGEST_OWN = 1_000_000
"""Maximum size of one of perfsuite's own small files, such as a lease or a rank's progress, in bytes."""
_CHUNK = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: Path, most: int = LARGEST) -> BinaryIO:
    """Open a regular file of at most `most` bytes, or a pipe of this process, for reading.

    Raises `FileError` for anything else, and OSError for the same reasons as `open`.
    """
    # Check the file before opening it, because opening a device can have effects, and opening a socket fails.
    _check(path, os.stat(path), most)
    return _open_checked(path, most)


def _open_checked(path: Path, most: int) -> BinaryIO:
    """Open a file that was checked. Check it again, because another file might have replaced it meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check(path, status, most)
        if stat.S_ISFIFO(status.st_mode):
            os.set_blocking(descriptor, True)  # wait for the writer
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Return the contents of a file. Raises the same errors as `open_file`."""
    with open_file(path, most) as file:
        return _read_open(file, path, most)


def _read_open(file: BinaryIO, path: Path, most: int) -> bytes:
    """Return the contents of an open file. Raises `FileError` if it has more than `most` bytes.

    The bytes are counted while they are read. The size that the kernel reports is not enough, because a file
    can grow, and files in /proc have size 0.
    """
    content = io.BytesIO()
    while part := file.read(_CHUNK):
        content.write(part)
        if content.tell() > most:
            raise _too_large(path, f"more than {_size(most)}", most)
    return content.getvalue()


def read_text(path: Path, most: int = LARGEST, *, errors: str = "strict") -> str:
    """Return the UTF-8 text of a file, with `\\n` at the ends of lines.

    Raises UnicodeDecodeError, and the same errors as `read_bytes`.
    """
    text = read_bytes(path, most).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check(path: Path, status: os.stat_result, most: int) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind == stat.S_IFIFO and path.parent in OPEN_FILES:
        return
    if kind != stat.S_IFREG:
        raise FileError(
            f"cannot read {path}: it is {_KINDS.get(kind, 'not a regular file')}, but only regular files are "
            "read. Copy its content into a regular file, and give the path of that file"
        )
    if status.st_size > most:
        raise _too_large(path, _size(status.st_size), most)


def _too_large(path: Path, size: str, most: int) -> FileError:
    return FileError(
        f"cannot read {path}: it has {size}, but at most {_size(most)} are read. Is it the right file? "
        "Restore it, or make it smaller"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count:,} bytes"
