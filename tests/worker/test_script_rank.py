from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile, Topology
from perfsuite.errors import MismatchError
from perfsuite.frameworks.fake import Fake
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash
from perfsuite.worker.optimizers import Optimizers
from perfsuite.worker.rank import empty_report, failure_of, write_failure
from perfsuite.worker.script_rank import Claim, ScriptRank
from tests.samples import make_case, make_report


def made(directory: Path) -> ScriptRank:
    """The first rank of two."""
    request = CaseFile(case=make_case(framework=Fake()), device="cpu")
    report = empty_report(0, 2)
    return ScriptRank(RunDir(directory), request, report, losses=None, optimizers=Optimizers())


def test_all_are_measured_when_each_has_reported_no_failure(tmp_path: Path) -> None:
    rank = made(tmp_path)
    assert rank.case.topology == Topology(processes_per_node=2)
    failed = empty_report(1, 2)
    write_failure(rank.run_dir, failed, failure_of(ValueError("x"), 1))
    assert not rank.are_all_measured(), "rank 0 has not reported"
    rank.write(rank.report)
    assert not rank.are_all_measured()
    documents.write(rank.run_dir.rank(1), failed)
    assert rank.are_all_measured()


def test_a_rank_waits_for_the_reports_of_the_others_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, sleep = made(tmp_path), Mock()
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + 20 * sleep.call_count)
    monkeypatch.setattr(time, "sleep", sleep)
    rank.write(rank.report)
    rank.wait_for_others()
    assert sleep.call_count == 3, "60 s"
    documents.write(rank.run_dir.rank(1), empty_report(1, 2))
    rank.wait_for_others()
    assert sleep.call_count == 3


HERE = socket.gethostname()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def trained(run_dir: RunDir, pid: int, host: str = HERE) -> Claim:
    """The claim of rank 0, which another process has made."""
    with run_dir.training(0).open("a") as file:
        file.write(f"trains {pid} {host}\n")
    return Claim(run_dir, 0)


def test_the_first_process_that_trains_as_a_rank_is_measured(run_dir: RunDir) -> None:
    assert Claim(run_dir, 0).take()
    assert Claim(run_dir, 1).take(), "of another rank"


def test_another_process_is_a_child_of_the_rank_or_the_second(run_dir: RunDir) -> None:
    assert os.getppid() in leash.ancestors()
    assert not trained(run_dir, leash.ancestors()[-1]).take()
    run_dir.training(0).unlink()
    with pytest.raises(MismatchError, match=r"^two processes of this command trained as rank 0: "):
        trained(run_dir, 1, host="another").take()  # though a process of that number lives here


@pytest.mark.parametrize("kind", [None, "mismatch", "crash"])
def test_one_that_has_failed_stays_the_one_that_is_told(run_dir: RunDir, kind: Any) -> None:
    failure = None if kind is None else Failure(kind=kind, message="")
    documents.write(run_dir.rank(0), make_report(0, failure=failure))
    with contextlib.nullcontext() if failure else pytest.raises(MismatchError):
        assert not trained(run_dir, 1, host="another").take()


def test_that_a_second_process_trains_is_told_to_the_first(run_dir: RunDir) -> None:
    claim = trained(run_dir, 1, host="another")
    assert not claim.is_twice()
    with pytest.raises(MismatchError):
        claim.take()
    assert Claim(run_dir, 0).is_twice()
