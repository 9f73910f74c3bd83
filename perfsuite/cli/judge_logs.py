"""Reads the step times of jobs that perfsuite did not launch: TensorBoard event files, MLPerf logs.

What a log tells is proportional to the time of a step: enough for ratios, if every log tells the same.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.base import require

EVENT_FILES = "*tfevents*"  # the names of TensorBoard's event files
MEGATRON_TAG = "iteration-time"
"""The scalar of Megatron-LM: seconds of an iteration, the mean over `--log-interval` of them. Megatron writes
it with `--log-timers-to-tensorboard`."""

MLLOG = ":::MLLOG"
"""Begins what a line of an MLPerf log says, whatever stands before it (`srun --label` writes the rank). Where
several ranks write one file, two such lines may meet in one."""
LONGEST = 1e15  # times are below it, whatever their unit
MLPERF_KINDS = ("train_step_time", "throughput")  # what an MLPerf log may tell, the best first. See `_mlperf`


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """What one launch logged about its steps."""

    path: Path
    what: str  # the tag of a scalar, or what an MLPerf log's times are: one of `MLPERF_KINDS`, with its unit
    series: Sequence[float]  # in the order of training; above 0


def read_log(path: Path, tag: str | None) -> StepLog:
    """Read the log of one launch: an event file, a directory of event files, or an MLPerf log.

    `tag`: the scalar to read, or one of `MLPERF_KINDS`. Raises `FileError` naming the log, or `PackageError`
    without tensorboard.
    """
    is_tensorboard = path.is_dir() or path.match(EVENT_FILES)
    what, series = _tensorboard(path, tag or MEGATRON_TAG) if is_tensorboard else _mlperf(path, tag)
    for number, value in enumerate(series, start=1):
        if not 0 < value < LONGEST:
            expected = f"a time above 0 and below {LONGEST:g}"
            raise FileError(f"{path}: value {number} of {what} is {value}, expected {expected}")
    return StepLog(path=path, what=what, series=series)


def check_comparable(logs: Sequence[StepLog]) -> None:
    """Raise `CaseError` if a log is named twice, or if two tell different things: times and throughputs."""
    first = logs[0]
    seen: set[Path] = set()
    for log in logs:
        if (real := log.path.resolve()) in seen:
            raise CaseError(f"{log.path} is named twice: name a log of its own for each launch")
        seen.add(real)
        if log.what != first.what:
            raise CaseError(
                f"{first.path} tells {first.what!r} and {log.path} tells {log.what!r}, which cannot be "
                "compared: name by --tag what all logs have in the same unit"
            )


def _tensorboard(path: Path, tag: str) -> tuple[str, list[float]]:
    """Read a scalar of one launch. Its event files follow each other, as where training was resumed."""
    require("tensorboard", purpose=f"reading {path}")
    # What EventAccumulator reads with. Its successor converts every value of every tag: six times slower.
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    files = sorted(path.glob(EVENT_FILES)) if path.is_dir() else [path]
    if not files:
        raise FileError(
            f"{path}: no event file ({EVENT_FILES}) in this directory. Name the directory of one launch, "
            "such as Megatron's --tensorboard-dir"
        )
    tags: set[str] = set()
    values: dict[int, float] = {}
    for file in files:
        check_readable(file)
        for event in LegacyEventFileLoader(str(file)).Load():
            tags |= {summary.tag for summary in event.summary.value}
            for summary in (each for each in event.summary.value if each.tag == tag):
                if (value := _scalar(summary)) is None:
                    raise FileError(f"{file}: {tag!r} is no scalar: name one by --tag. {_known(tags)}")
                if event.step in values:
                    raise FileError(
                        f"{path}: step {event.step} of {tag!r} stands there twice, as where several launches "
                        "wrote to one directory. Name the event file of one launch"
                    )
                values[event.step] = value
    if not values:
        raise FileError(f"{path}: no scalar {tag!r}: name another by --tag. {_known(tags)}")
    return tag, [values[step] for step in sorted(values)]


def _scalar(summary: Any) -> float | None:
    """Return the number of a `Summary.Value` as torch or TensorFlow 2 writes it; None if it is no scalar."""
    from tensorboard.util.tensor_util import make_ndarray

    if summary.HasField("simple_value"):
        return float(summary.simple_value)
    array = make_ndarray(summary.tensor) if summary.HasField("tensor") else None
    return float(array) if array is not None and array.shape == () and array.dtype.kind in "fiu" else None


def _known(tags: set[str]) -> str:
    names = ", ".join(map(repr, sorted(tags)[:20]))
    return f"Its tags: {names}{', ...' if len(tags) > 20 else ''}" if tags else "It has no tags at all"


def _mlperf(path: Path, kind: str | None) -> tuple[str, list[float]]:
    """Read what the statistics of an MLPerf log tell, by default the first of `MLPERF_KINDS` that it has.

    `train_step_time` is NVIDIA's, in seconds per step. `throughput`, whose unit the log does not say, is
    inverted. Formats: github.com/mlcommons/logging, github.com/NVIDIA/mlperf-common.
    """
    if kind is not None and kind not in MLPERF_KINDS:
        raise FileError(f"{path}: an MLPerf log has no {kind!r}: --tag may be {', '.join(MLPERF_KINDS)}")
    events = list(_mllog_events(path))
    if not events:
        raise FileError(
            f"{path}: no line with :::MLLOG, and its name is no event file's ({EVENT_FILES}): expected an "
            "MLPerf log, a TensorBoard event file or a directory of them"
        )
    for name in [kind] if kind else MLPERF_KINDS:
        if values := _statistic(events, name):
            if name == "throughput":
                return f"1/{name}", [1 / value if value else math.inf for value in values]
            return name, values
    raise FileError(f"{path}: no step times. Expected {kind or ' or '.join(MLPERF_KINDS)} in 'tracked_stats'")


def _mllog_events(path: Path) -> Iterator[Mapping[str, Any]]:
    check_readable(path)
    read = json.JSONDecoder(parse_int=float)  # float(10**400) would raise
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            for said in line.split(f"{MLLOG} {{")[1:]:
                with contextlib.suppress(ValueError, RecursionError):  # cut off, as where a job was killed
                    yield read.raw_decode("{" + said)[0]


def _statistic(events: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    tracked = [event.get("value") for event in events if event.get("key") == "tracked_stats"]
    values = [each.get(name) for each in tracked if isinstance(each, dict)]
    return [value for value in values if isinstance(value, float) and not math.isnan(value)]


def check_readable(path: Path) -> None:
    """Raise `FileError` if a file cannot be read."""
    try:
        path.open("rb").close()
    except (OSError, ValueError) as error:  # the latter: a NUL in the name
        raise FileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
