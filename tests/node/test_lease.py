from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def agent(file: Path) -> Iterator[subprocess.Popen[str]]:
    pipe, words = subprocess.PIPE, [sys.executable, "-c", AGENT, str(file)]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a launch that is prepared, whose text changes often."""
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    file = tmp_path / "lease"
    file.write_text(lease.text_of(0, "go"))
    return file


def test_the_text_changes_until_the_driver_has_no_more_job(file: Path) -> None:
    texts: set[str] = set()
    with Beats(file):
        while len(texts) < 4:
            texts.add(file.read_text())
    assert all(text.endswith(" go \n") for text in texts)
    last = file.read_text()
    time.sleep(0.05)
    assert file.read_text() == last


def test_a_text_is_written_over_the_one_before(file: Path) -> None:
    """A file that grows needs space on the disk, and a new one may stay unseen on NFS."""
    with Beats(file) as beats:
        before = file.stat()
        beats.end_job()
        while not file.read_text().endswith(" end\n"):
            pass
        after = file.stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)


def test_a_directory_that_is_gone_ends_no_driver(file: Path) -> None:
    with Beats(file) as beats:
        file.unlink()
        beats.end_job()
        time.sleep(0.05)
        assert beats._thread.is_alive()


def test_an_agent_sees_that_its_stdin_ends(tmp_path: Path) -> None:
    with agent(tmp_path / "lease") as process:
        assert said(process) == "''", "what it starts finds nothing there"
        assert process.stdin is not None
        process.stdin.close()
        assert said(process) == "the driver is gone: its end of stdin is closed"


def test_an_agent_is_told_to_end(file: Path) -> None:
    with Beats(file) as beats, agent(file) as process:
        said(process)
        beats.end_job()
        assert said(process) == "end"


@pytest.mark.parametrize(("lost_s", "said"), [("3", ["no sign of the driver for 3 s"]), (None, ["end"])])
def test_an_agent_sees_that_the_text_changes_no_more(
    file: Path, monkeypatch: pytest.MonkeyPatch, passing: Passing, lost_s: str | None, said: list[str]
) -> None:
    """Not one on the driver's machine: Ctrl-Z is no death there, of which the kernel would tell."""
    monkeypatch.delenv(LEASE_S, raising=False)
    if lost_s is not None:
        monkeypatch.setenv(LEASE_S, lost_s)

    def drive(looks: int) -> None:
        if looks < 20 or looks == 200:
            file.write_text(lease.text_of(looks, "end" if looks == 200 else "go"))

    passing.meanwhile, heard = drive, []
    Lease(file, lambda: heard.append("end"), heard.append)._hold_text()
    assert heard == said
    changed_s = (20 if lost_s else 200) * lease.LOOK_S
    assert passing.seconds == pytest.approx(changed_s + 3 * bool(lost_s), abs=2 * lease.LOOK_S)
