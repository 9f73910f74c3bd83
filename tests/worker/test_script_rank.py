from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile, Topology
from perfsuite.frameworks.fake import Fake
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.claim import Claim
from perfsuite.worker.optimizers import Optimizers
from perfsuite.worker.rank import empty_report, failure_of, write_failure
from perfsuite.worker.script_rank import ScriptRank
from tests.samples import make_case


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
    Claim(rank.run_dir, 0).over()
    rank.wait_for_others()
    assert sleep.call_count == 3, "60 s"
    Claim(rank.run_dir, 1).over()
    rank.wait_for_others()
    assert sleep.call_count == 3
