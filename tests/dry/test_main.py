"""Test how the program of a dry run reports errors. The program runs in the test's own process."""

import os
import sys
from pathlib import Path

import pytest

from perfsuite import DDP, documents
from perfsuite.case.case import CaseFile
from perfsuite.dry import __main__ as program
from perfsuite.dry import guard
from perfsuite.dry.machine import ANY_GPU
from perfsuite.errors import DryRunError, PrivateNameError
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash
from tests.samples import known, make_case, make_report


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return the directory of a dry run whose program can be called."""
    run_dir = RunDir(tmp_path)
    documents.write(run_dir.case, CaseFile(case=make_case(framework=DDP()), device="cpu"))
    monkeypatch.setattr(leash, "die_with_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["perfsuite.dry", str(tmp_path), "--rank", "0"])
    return run_dir


def test_reports_why_cuda_cannot_be_faked(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new torch can change the headers of C++ that the guard needs."""

    def load() -> None:
        raise DryRunError("g++ cannot build guard.cpp against torch 2.99.0")

    monkeypatch.setattr(guard, "load", load)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--gpu", ANY_GPU])
    with pytest.raises(DryRunError):
        program.main()
    failure = known(documents.read(run_dir.rank(0), RankReport).failure)
    assert failure.message == "g++ cannot build guard.cpp against torch 2.99.0"


def test_a_run_that_loaded_the_driver_counts_nothing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library can load the driver late, for example in the first step."""

    def refuse() -> None:
        raise DryRunError("this process has loaded NVIDIA's driver")

    monkeypatch.setattr("perfsuite.dry.rank.DryRank.__init__", lambda self, *arguments: None)
    monkeypatch.setattr("perfsuite.dry.rank.DryRank.counted", lambda self: make_report())
    monkeypatch.setattr(guard, "load", lambda: None)
    monkeypatch.setattr(guard, "refuse_driver", refuse)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--gpu", ANY_GPU])
    with pytest.raises(DryRunError):
        program.main()
    report = documents.read(run_dir.rank(0), RankReport)
    assert known(report.failure).message == "this process has loaded NVIDIA's driver"
    assert report.counts is None


def test_reports_a_private_name_that_torch_lacks(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rank", "script"):  # they are imported again
        monkeypatch.delitem(sys.modules, f"perfsuite.dry.{module}", raising=False)
    monkeypatch.delattr("torch._subclasses.fake_tensor.FakeTensorMode")
    with pytest.raises(PrivateNameError):
        program.main()
    failure = known(documents.read(run_dir.rank(0), RankReport).failure)
    assert failure.kind == "error"
    assert "FakeTensorMode, a private name (seen in torch" in failure.message
    assert "no case can be run dry" in failure.message
