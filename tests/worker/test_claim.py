from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash
from perfsuite.worker.claim import Claim
from tests.samples import make_report

HERE = socket.gethostname()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def trained(run_dir: RunDir, pid: int, host: str = HERE) -> Claim:
    """The claim of rank 0, which another process has made."""
    with run_dir.training(0).open("a") as file:
        file.write(f"trains {pid} {host}\n")
    return Claim(run_dir, 0)


def dead() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_the_first_process_that_trains_as_a_rank_is_measured(run_dir: RunDir) -> None:
    assert Claim(run_dir, 0).stand() == "first"
    assert Claim(run_dir, 1).stand() == "first", "of another rank"


def test_another_process_is_a_child_of_the_rank_or_the_second(run_dir: RunDir) -> None:
    assert os.getppid() in leash.ancestors()
    assert trained(run_dir, leash.ancestors()[-1]).stand() == "child"
    run_dir.training(0).unlink()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert trained(run_dir, process.pid).stand() == "second"
    run_dir.training(0).unlink()
    assert trained(run_dir, dead(), host="another").stand() == "second", "it may live there"


@pytest.mark.parametrize(
    ("kind", "standing"),
    [
        ("none", "second"),
        ("mismatch", "second"),
        ("error", "second"),
        ("crash", "next"),
        ("out_of_memory", "next"),
        ("killed", "next"),
    ],
)
def test_one_that_ended_by_itself_has_a_successor(run_dir: RunDir, kind: Any, standing: str) -> None:
    if kind != "killed":
        failure = None if kind == "none" else Failure(kind=kind, message="")
        documents.write(run_dir.rank(0), make_report(0, failure=failure))
    assert trained(run_dir, dead()).stand() == standing


def test_what_one_process_tells_another_one_reads(run_dir: RunDir) -> None:
    claim = Claim(run_dir, 0)
    claim.stand()
    assert not claim.is_over()
    assert not claim.is_twice()
    claim.told_twice()
    claim.over()
    assert Claim(run_dir, 0).is_over()
    assert Claim(run_dir, 0).is_twice()
    assert not trained(run_dir, 1).is_over(), "another process trains as this rank now"


def test_a_rank_that_cannot_say_that_its_report_is_written_goes_on(run_dir: RunDir) -> None:
    run_dir.training(0).mkdir()
    Claim(run_dir, 0).over()
