"""Tests that only regular files are read, and only up to a limit."""

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.inputs import files, ini
from perfsuite.results import waivers
from perfsuite.results.baseline import Baseline
from perfsuite.results.session_file import SessionFile
from perfsuite.session.option_table import report

Make = Callable[[Path], object]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def own_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**12)


ODD: dict[str, tuple[Make, str]] = {
    "fifo": (fifo, "it is a FIFO, but only regular files are read"),
    "device": (device, "it is a device, but only regular files are read"),
    "socket": (own_socket, "it is a socket, but only regular files are read"),
    "sparse": (sparse, "it has 1,000,000 MB, but at most "),
}
READERS: dict[str, Callable[[Path], object]] = {
    "results.json": lambda path: documents.read(path, SessionFile),
    "baseline.json": lambda path: documents.read(path, Baseline),
    "perf-waivers.toml": waivers.read,
    "pytest.ini": lambda path: ini.read_ini(path.parent),
    "pyproject.toml": lambda path: ini.read_ini(path.parent),
    "setup.cfg": lambda path: ini.read_ini(path.parent),
}


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Limit the memory of this process, so that endless reading fails before it harms other processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def within(seconds: float, do: Callable[[], object]) -> BaseException | None:
    """Return the exception of `do`, or None. Fail if `do` takes longer than this."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            do()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert raised, "it hangs"
    return raised[0]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_an_irregular_file(tmp_path: Path, name: str, kind: str) -> None:
    make, said = ODD[kind]
    make(tmp_path / name)
    error = within(30, lambda: READERS[name](tmp_path / name))
    assert isinstance(error, FileError)
    assert said in str(error)
    assert str(tmp_path / name) in str(error)


@pytest.mark.parametrize("kind", ODD)
def test_refuses_an_irregular_file_as_a_page(tmp_path: Path, kind: str) -> None:
    ODD[kind][0](tmp_path / "index.html")
    assert isinstance(within(30, lambda: report(str(tmp_path))), ValueError)


def test_the_results_of_many_cases_are_read(tmp_path: Path) -> None:
    """The results of 1,000 cases, 8 launches each, exceed the limit of settings, but not that of
    documents."""
    (tmp_path / "results.json").write_bytes(b" " * (files.LARGEST + 1))
    with pytest.raises(FileError, match="not JSON"):
        documents.read(tmp_path / "results.json", SessionFile)
    with (tmp_path / "results.json").open("wb") as file:
        file.truncate(files.LARGEST_DOCUMENT + 1)
    with pytest.raises(FileError, match="it has 1,000 MB, but at most 1,000 MB are read"):
        documents.read(tmp_path / "results.json", SessionFile)


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        files.read_bytes(tmp_path)


def test_reads_a_sizeless_kernel_file_to_its_end() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    assert files.read_text(Path("/proc/self/status")).startswith("Name:")


def test_limits_a_file_that_reports_no_size() -> None:
    with pytest.raises(FileError, match="more than 100 bytes, but at most 100 bytes are read"):
        files.read_bytes(Path("/proc/self/status"), 100)


def test_the_limit_holds_for_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    path.write_bytes(b"x")
    with files.open_file(path, 1000) as file:
        path.write_bytes(b"x" * 5000)
        with pytest.raises(FileError, match="more than 1,000 bytes"):
            files._read_open(file, path, 1000)


def test_a_file_of_just_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    assert len(files.read_bytes(path, 1000)) == 1000
    with pytest.raises(FileError, match="it has 1,000 bytes, but at most 999 bytes are read"):
        files.read_bytes(path, 999)


def test_no_race_lets_a_fifo_in(tmp_path: Path) -> None:
    """Between the check of the path and its opening, another file might take its place."""
    fifo(tmp_path / "fifo")
    before = os.listdir("/proc/self/fd")
    error = within(30, lambda: files._open_checked(tmp_path / "fifo", 1000))
    assert isinstance(error, FileError)
    assert os.listdir("/proc/self/fd") == before


def test_text_has_the_same_line_ends_everywhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb\rc\n")
    assert files.read_text(tmp_path / "file") == "a\nb\nc\n"


def test_reads_a_shell_pipe_up_to_the_limit() -> None:
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        try:
            path = Path(f"/proc/self/fd/{writer.stdout.fileno()}")
            with pytest.raises(FileError, match="more than 3 MB"):
                files.read_bytes(path, 3_000_000)
        finally:
            writer.kill()


def test_a_slow_writer_of_a_pipe_is_waited_for() -> None:
    """The second line is written only after the first line was read."""
    code = "import sys; print('a', flush=True); sys.stdin.readline(); print('b')"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        with files.open_file(Path(f"/dev/fd/{writer.stdout.fileno()}")) as pipe:
            assert pipe.readline() == b"a\n"
            threading.Timer(0.1, writer.stdin.close).start()
            assert pipe.readline() == b"b\n", "the reader waits for more input"
