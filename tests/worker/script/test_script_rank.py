import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import MismatchError
from perfsuite.frameworks.fake import Fake
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash
from perfsuite.worker.hooks.named import Search
from perfsuite.worker.observation.optimizers import Optimizers
from perfsuite.worker.rank import empty_report, failure_of, write_failure
from perfsuite.worker.script.script_rank import Claim, ScriptRank
from tests.samples import make_case, make_report

HERE = socket.gethostname()
OTHER = empty_report(1, 2)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def rank(run_dir: RunDir) -> ScriptRank:
    """Return the first of two ranks."""
    request = CaseFile(case=make_case(framework=Fake()), device="cpu")
    report = empty_report(0, 2)
    search = Search([])
    return ScriptRank(run_dir, request, report, losses=None, optimizers=Optimizers(), search=search)


def test_all_are_measured_when_none_has_failed(rank: ScriptRank) -> None:
    write_failure(rank.run_dir, OTHER, failure_of(ValueError("x"), 1))
    assert not rank.are_all_measured(), "rank 0 has not reported"
    rank.write(rank.report)
    assert not rank.are_all_measured()
    documents.write(rank.run_dir.rank(1), OTHER)
    assert rank.are_all_measured()


def test_a_rank_waits_for_others_but_not_for_ever(rank: ScriptRank, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = Mock()
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + 20 * sleep.call_count)
    monkeypatch.setattr(time, "sleep", sleep)
    rank.write(rank.report)
    rank.wait_for_others()
    assert sleep.call_count == 3, "the rank waits for 60 s"
    documents.write(rank.run_dir.rank(1), OTHER)
    rank.wait_for_others()
    assert sleep.call_count == 3


def trained(run_dir: RunDir, pid: int, host: str = HERE) -> Claim:
    """Return this process's claim of rank 0 after another process has claimed it."""
    with run_dir.training(0).open("a") as file:
        file.write(f"trains {pid} {host}\n")
    return Claim(run_dir, 0)


def dead() -> int:
    """Return the id of a process that has ended."""
    with subprocess.Popen("true") as process:
        return process.pid


def is_refused() -> Any:
    return pytest.raises(MismatchError, match=r"^two processes of this command trained as rank 0, ")


def test_measures_a_ranks_first_process(run_dir: RunDir) -> None:
    assert Claim(run_dir, 0).stand() == "first"
    assert Claim(run_dir, 1).stand() == "first", "this is the first process of another rank"


def test_other_process_is_a_child_or_is_refused(run_dir: RunDir) -> None:
    assert os.getppid() in leash.ancestors()
    assert trained(run_dir, leash.ancestors()[-1]).stand() == "child"
    run_dir.training(0).unlink()
    with subprocess.Popen("cat", stdin=subprocess.PIPE) as process, is_refused():
        trained(run_dir, process.pid).stand()
    run_dir.training(0).unlink()
    with is_refused():  # the process could still run on the other host
        trained(run_dir, dead(), host="another").stand()


@pytest.mark.parametrize("kind", ["none", "mismatch", "error", "crash", "out_of_memory", "killed"])
def test_one_that_ended_by_itself_has_a_successor(run_dir: RunDir, kind: Any) -> None:
    if kind != "killed":
        failure = None if kind == "none" else Failure(kind=kind, message="")
        documents.write(run_dir.rank(0), make_report(0, failure=failure))
    is_next = kind in ("crash", "out_of_memory", "killed")
    with contextlib.nullcontext() if is_next else is_refused():
        assert trained(run_dir, dead()).stand() == "next"
