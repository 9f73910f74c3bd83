import subprocess
import sys
import time
from pathlib import Path, PosixPath

import pytest

from perfsuite.node import lease
from perfsuite.node.lease import LEASE_S, Beats, Lease
from tests.node.conftest import Passing

AGENT = """
import sys, time
from pathlib import Path
from perfsuite.node.lease import Lease
Lease(Path(sys.argv[1]), lambda: print("end", flush=True), lambda why: print(why, flush=True)).hold()
print(repr(sys.stdin.read()), flush=True)
time.sleep(600)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the lease of a launch that is being prepared."""
    file = tmp_path / "lease"
    file.write_text(lease.text_of(0, "go"))
    return file


def test_lease_changes_until_the_job_is_gone(file: Path) -> None:
    texts: set[str] = set()
    with Beats(file, beat_s=0.01):
        while len(texts) < 4:
            texts.add(file.read_text())
    assert all(text.endswith(" go \n") for text in texts)
    last = file.read_text()
    time.sleep(0.05)
    assert file.read_text() == last


def test_a_text_is_written_over_the_one_before(file: Path) -> None:
    """A growing file could fill the disk, and on NFS a new file might not be seen.

    If the file is gone, the driver continues.
    """
    with Beats(file, beat_s=0.01) as beats:
        before = file.stat()
        beats.end_job()
        while not file.read_text().endswith(" end\n"):
            pass
        after = file.stat()
        file.unlink()
        time.sleep(0.05)
        assert beats._thread.is_alive()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)


def test_agent_sees_the_end_and_a_closed_stdin(file: Path) -> None:
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", AGENT, str(file)]
    driver = Beats(file, beat_s=0.01)
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process, driver as beats:
        assert process.stdin is not None
        assert process.stdout is not None
        said = map(str.strip, process.stdout)
        assert next(said) == "''", "processes that it starts find nothing on stdin"
        beats.end_job()
        assert next(said) == "end"
        process.stdin.close()
        assert next(said) == "perfsuite's driver is gone: its end of stdin is closed"
        process.kill()


@pytest.mark.parametrize(
    ("lost_s", "said"), [("3", ["no sign of perfsuite's driver for 3 s"]), (None, ["end"])]
)
def test_agent_sees_a_lease_that_stops_changing(
    file: Path, monkeypatch: pytest.MonkeyPatch, passing: Passing, lost_s: str | None, said: list[str]
) -> None:
    """On the driver's machine, the lease is ignored.

    There the kernel reports the driver's death, and a driver that is stopped with Ctrl-Z is not dead.
    """
    monkeypatch.delenv(LEASE_S, raising=False)
    if lost_s is not None:
        monkeypatch.setenv(LEASE_S, lost_s)

    def drive(looks: int) -> None:
        if looks < 20 or looks == 200:
            file.write_text(lease.text_of(looks, "end" if looks == 200 else "go"))

    passing.meanwhile = drive
    heard = []
    Lease(file, lambda: heard.append("end"), heard.append)._hold_text()
    assert heard == said
    changed_s = (20 if lost_s else 200) * lease.LOOK_S
    assert passing.seconds == pytest.approx(changed_s + 3 * bool(lost_s), abs=2 * lease.LOOK_S)


def test_a_stalled_file_system_does_not_end_the_job(
    file: Path, monkeypatch: pytest.MonkeyPatch, passing: Passing
) -> None:
    """The agent's read and the driver's write hang at the same time, and return at the same time."""

    class Stalled(PosixPath):
        """A file that cannot be opened for two minutes."""

        def __fspath__(self) -> str:
            if passing.count == 20:
                passing.seconds += 120
            return super().__fspath__()

    def drive(looks: int) -> None:
        if looks != 20:
            file.write_text(lease.text_of(looks, "end" if looks == 40 else "go"))

    monkeypatch.setenv(LEASE_S, "30")
    passing.meanwhile = drive
    heard: list[str] = []
    Lease(Stalled(file), lambda: heard.append("end"), heard.append)._hold_text()
    assert heard == ["end"]
    assert passing.seconds > 120


def test_a_driver_whose_writes_stall_is_not_lost(
    file: Path, monkeypatch: pytest.MonkeyPatch, passing: Passing
) -> None:
    """For two minutes, the agent's reads return at once, but with the same text. Its stdin stays open."""
    stalled_looks = int(120 / lease.LOOK_S)

    def drive(looks: int) -> None:
        if looks < 20 or looks > 20 + stalled_looks:
            file.write_text(lease.text_of(looks, "end" if looks > 40 + stalled_looks else "go"))

    monkeypatch.setenv(LEASE_S, str(lease.LOST_S))
    passing.meanwhile = drive
    heard: list[str] = []
    Lease(file, lambda: heard.append("end"), heard.append)._hold_text()
    assert heard == ["end"]
