"""Read step times of jobs that perfsuite did not launch, from TensorBoard event files.

The values can be in any unit of time. Only their ratios matter, so all logs must use the same unit.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.base import require
from perfsuite.inputs.files import open_file

EVENT_FILES = "*tfevents*"  # pattern of the names of TensorBoard's event files
MEGATRON_TAG = "iteration-time"
"""Megatron-LM logs its seconds per iteration with this tag. Each value is a mean over `--log-interval`
iterations. The tag is logged only with `--log-timers-to-tensorboard`."""
LARGEST_LOG = 2_000_000_000
"""Maximum size of a log, in bytes. It is this large because a log can contain pictures. A log is read record
by record."""
LONGEST = 1e15  # upper limit of a time, in any unit


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """The step times in the log of one launch."""

    path: Path
    series: Sequence[float]  # in the order of training; all values are greater than 0


def read_log(path: Path, tag: str) -> StepLog:
    """Read a scalar of one launch from an event file, or from all event files in a directory.

    There are several files if training was resumed. Raises `FileError`, which names the log, and
    `PackageError` if tensorboard is not installed.
    """
    require("tensorboard", purpose=f"reading {path}")
    files = sorted(path.glob(EVENT_FILES)) if path.is_dir() else [path]
    if not files:
        raise FileError(
            f"{path}: no event file ({EVENT_FILES}) in this directory. Give the directory of one launch, "
            "such as Megatron's --tensorboard-dir"
        )
    tags: set[str] = set()
    values: dict[int, float] = {}
    for file in files:
        check_readable(file, LARGEST_LOG)
        for event in _events(file):
            tags |= {summary.tag for summary in event.summary.value}
            for summary in (summary for summary in event.summary.value if summary.tag == tag):
                value = _scalar(summary)
                if value is None:
                    raise FileError(f"{file}: {tag!r} is not a scalar. Give one with --tag. {_known(tags)}")
                if not 0 < value < LONGEST:
                    expected = f"a time above 0 and below {LONGEST:g}"
                    raise FileError(f"{file}: {tag!r} is {value} in step {event.step}, expected {expected}")
                if event.step in values:
                    raise FileError(
                        f"{path}: step {event.step} of {tag!r} appears twice. Several launches may have "
                        "written to one directory. Give the event file of one launch"
                    )
                values[event.step] = value
    if not values:
        raise FileError(f"{path}: no scalar {tag!r}. Give another with --tag. {_known(tags)}")
    return StepLog(path=path, series=[values[step] for step in sorted(values)])


def _events(file: Path) -> Iterator[Any]:
    """Read every event of a file. Raises `FileError` if a record is damaged or incomplete.

    TensorBoard's own loaders stop silently at the first damaged record, as if the log ended there. A slowdown
    after that record would be missed. A record consists of the length of the event (8 bytes), a checksum of
    the length (4 bytes), the event, and a checksum of the event (4 bytes). Numbers are little-endian.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    # A private name, seen in tensorboard 2.21. Without it, checksums cannot be verified, and no log can be
    # read.
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open_file(file, LARGEST_LOG) as stream:
        while header := stream.read(12):
            at = stream.tell() - len(header)
            if len(header) < 12:
                raise _unfinished(file, at)
            length, length_checksum = struct.unpack("<QI", header)
            if masked_crc32c(header[:8]) != length_checksum or length > LARGEST_LOG:
                raise _damaged(file, at)
            record = stream.read(length + 4)
            if len(record) < length + 4:
                raise _unfinished(file, at)
            content = record[:length]
            if masked_crc32c(content) != struct.unpack("<I", record[length:])[0]:
                raise _damaged(file, at)
            try:
                event = Event.FromString(content)
            except DecodeError:
                raise _damaged(file, at) from None
            yield event


def _unfinished(file: Path, at: int) -> FileError:
    return FileError(
        f"{file}: the file ends in the middle of the record at byte {at}. Either it is still being written, "
        "or its job was killed, or it was truncated. Give the complete log of a launch"
    )


def _damaged(file: Path, at: int) -> FileError:
    return FileError(
        f"{file}: the record at byte {at} is damaged, or this is not a TensorBoard event file. "
        "Copy the file again"
    )


def check_different(logs: Sequence[StepLog]) -> None:
    """Raise `CaseError` if a log is given twice."""
    seen: set[Path] = set()
    for log in logs:
        real = log.path.resolve()
        if real in seen:
            raise CaseError(f"{log.path} is given twice: give a different log for each launch")
        seen.add(real)


def _scalar(summary: Any) -> float | None:
    """Return the number in a `Summary.Value` of torch or TensorFlow 2. None if it is not a scalar."""
    from tensorboard.util.tensor_util import make_ndarray

    if summary.HasField("simple_value"):
        return float(summary.simple_value)
    array = make_ndarray(summary.tensor) if summary.HasField("tensor") else None
    return float(array) if array is not None and array.shape == () and array.dtype.kind in "fiu" else None


def _known(tags: set[str]) -> str:
    names = ", ".join(map(repr, sorted(tags)[:20]))
    return f"Its tags: {names}{', ...' if len(tags) > 20 else ''}" if tags else "It has no tags at all"


def check_readable(path: Path, most: int) -> None:
    """Raise `FileError` if a file cannot be read or is larger than `most` bytes."""
    try:
        open_file(path, most).close()
    except (OSError, ValueError) as error:  # ValueError: the name contains NUL
        raise FileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
