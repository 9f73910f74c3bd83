"""Read the step times of jobs that perfsuite did not launch from TensorBoard event files.

Values in a log are proportional to the time of a step: enough for ratios, if all logs have the same unit.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.base import require
from perfsuite.inputs.files import LARGEST_LOG, open_file

EVENT_FILES = "*tfevents*"  # pattern of the names of TensorBoard's event files
MEGATRON_TAG = "iteration-time"
"""Megatron-LM's seconds per iteration, means over `--log-interval`, from `--log-timers-to-tensorboard`."""
LONGEST = 1e15  # upper limit of times in any unit


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """The step times in the log of one launch."""

    path: Path
    series: Sequence[float]  # in the order of training; above 0


def read_log(path: Path, tag: str) -> StepLog:
    """Read a scalar of one launch from an event file, or from a directory with consecutive ones.

    There are several if training was resumed. Raises `FileError` with the log, or `PackageError` without
    tensorboard.
    """
    require("tensorboard", purpose=f"reading {path}")
    files = sorted(path.glob(EVENT_FILES)) if path.is_dir() else [path]
    if not files:
        raise FileError(
            f"{path}: no event file ({EVENT_FILES}) in this directory. Name the directory of one launch, "
            "such as Megatron's --tensorboard-dir"
        )
    tags: set[str] = set()
    values: dict[int, float] = {}
    for file in files:
        check_readable(file, LARGEST_LOG)
        for event in _events(file):
            tags |= {summary.tag for summary in event.summary.value}
            for summary in (each for each in event.summary.value if each.tag == tag):
                value = _scalar(summary)
                if value is None:
                    raise FileError(f"{file}: {tag!r} is no scalar: name one by --tag. {_known(tags)}")
                if not 0 < value < LONGEST:
                    expected = f"a time above 0 and below {LONGEST:g}"
                    raise FileError(f"{file}: {tag!r} is {value} in step {event.step}, expected {expected}")
                if event.step in values:
                    raise FileError(
                        f"{path}: step {event.step} of {tag!r} appears twice, as where several launches "
                        "wrote to one directory. Name the event file of one launch"
                    )
                values[event.step] = value
    if not values:
        raise FileError(f"{path}: no scalar {tag!r}: name another by --tag. {_known(tags)}")
    return StepLog(path=path, series=[values[step] for step in sorted(values)])


def _events(file: Path) -> Iterator[Any]:
    """Read every event of a file. Raises `FileError` unless all of its bytes are whole records.

    TensorBoard's own loaders stop silently at the first damaged record, as if the log ended there: a slowdown
    after it would be missed. A record is its length (8 bytes), a checksum of the length (4 bytes), the event,
    and a checksum of the event (4 bytes); numbers are little-endian.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    # Private, seen in tensorboard 2.21: without it, checksums cannot be verified, and no log can be read.
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
        f"{file}: it ends in the middle of the record at byte {at}: it is still being written, or its job "
        "was killed, or it was cut short. Name the whole log of a launch that ended"
    )


def _damaged(file: Path, at: int) -> FileError:
    return FileError(
        f"{file}: the record at byte {at} is damaged, or this is not an event file of TensorBoard. "
        "Copy it again"
    )


def check_different(logs: Sequence[StepLog]) -> None:
    """Raise `CaseError` if a log is named twice."""
    seen: set[Path] = set()
    for log in logs:
        real = log.path.resolve()
        if real in seen:
            raise CaseError(f"{log.path} is named twice: name a log of its own for each launch")
        seen.add(real)


def _scalar(summary: Any) -> float | None:
    """Return the number of a `Summary.Value` of torch or TensorFlow 2; None if it is not a scalar."""
    from tensorboard.util.tensor_util import make_ndarray

    if summary.HasField("simple_value"):
        return float(summary.simple_value)
    array = make_ndarray(summary.tensor) if summary.HasField("tensor") else None
    return float(array) if array is not None and array.shape == () and array.dtype.kind in "fiu" else None


def _known(tags: set[str]) -> str:
    names = ", ".join(map(repr, sorted(tags)[:20]))
    return f"Its tags: {names}{', ...' if len(tags) > 20 else ''}" if tags else "It has no tags at all"


def check_readable(path: Path, most: int) -> None:
    """Raise `FileError` if a file cannot be read, or is larger than `most` bytes."""
    try:
        open_file(path, most).close()
    except (OSError, ValueError) as error:  # the latter: a NUL in the name
        raise FileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
