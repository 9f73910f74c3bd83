import gzip
import json
from pathlib import Path

import pytest

from perfsuite.errors import FileError
from perfsuite.results import device_log_file
from perfsuite.results.device_log import (
    Allocate,
    CollectiveWait,
    Communicate,
    EmptyCache,
    EndOfStep,
    Entry,
    Free,
    HostCall,
    HostWait,
    Kernel,
    RecordEvent,
    StreamWait,
    UseIn,
    Workspace,
)

STEP_LOG = Path(__file__).parents[1] / "bench_cases" / "step_logs" / "blog-1-4.json.gz"
ENTRIES: tuple[Entry, ...] = (
    Allocate(0, 16, 1),
    UseIn(0, 2),
    Workspace(0),
    RecordEvent(1, 0),
    StreamWait(1, 1),
    HostWait(None),
    HostWait(1),
    Kernel(0, "forward", "aten.mm", 8, 4, 2, "bfloat16", 16, (1, 2, 2, 2, 0), is_strided=False),
    Communicate(1, 0, "backward", "all_reduce", 8, 1, 64, is_async=True),
    CollectiveWait(0, 1),
    HostCall("view"),
    Free(0),
    EmptyCache(),
    EndOfStep(4),
)


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "log.json.gz"
    device_log_file.write(path, ENTRIES)
    assert device_log_file.read(path) == ENTRIES
    assert {type(entry) for entry in device_log_file.read(path)} == {type(entry) for entry in ENTRIES}


def test_equal_logs_have_equal_files(tmp_path: Path) -> None:
    device_log_file.write(tmp_path / "one", ENTRIES)
    device_log_file.write(tmp_path / "two", ENTRIES)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_million_entries_fit_into_ten_megabytes(tmp_path: Path) -> None:
    """The log is one of nanotron's published steps. Dry runs of large models have about 80,000 entries."""
    entries = device_log_file.read(STEP_LOG)
    device_log_file.write(tmp_path / "log.json.gz", entries)
    assert (tmp_path / "log.json.gz").stat().st_size < 10 * len(entries)


def test_a_log_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.json.gz"
    device_log_file.write(path, ENTRIES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FileError, match=r"log\.json\.gz: cut short or damaged .*Repeat the dry run"):
        device_log_file.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"version": 2, "entries": []}, "version 2, but this perfsuite reads 1"),
        ([], "version None"),
        ({"version": 1}, "not the log of a dry run"),
        ({"version": 1, "entries": [["Unknown", 1]]}, "not the log of a dry run"),
        ({"version": 1, "entries": [["Free", 1, 2]]}, "not the log of a dry run"),
        ({"version": 1, "entries": [[]]}, "not the log of a dry run"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "log.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(FileError, match=message):
        device_log_file.read(path)


def test_a_missing_log_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"does not exist\. Repeat the dry run of the case"):
        device_log_file.read(tmp_path / "log.json.gz")
    with pytest.raises(FileError, match="cannot write"):
        device_log_file.write(tmp_path / "no" / "log.json.gz", ENTRIES)
