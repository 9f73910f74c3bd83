"""Test how the program of a dry run reports errors. The rank runs in the test's own process."""

import sys
from pathlib import Path
from typing import Any

import pytest

from perfsuite import DDP, documents
from perfsuite.case.case import CaseFile
from perfsuite.dry.__main__ import run_rank
from perfsuite.dry.machine import ANY_GPU
from perfsuite.errors import DryRunError, PrivateNameError
from perfsuite.results.counts import Counts
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from tests.samples import known, make_case, make_report


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Return the directory of a dry run."""
    run_dir = RunDir(tmp_path)
    documents.write(run_dir.case, CaseFile(case=make_case(framework=DDP()), device="cpu"))
    return run_dir


def counted(*given: Any) -> RankReport:
    """Return the report of a rank that has counted its steps."""
    return make_report(counts=Counts(flops={"forward": 7}))


def test_reports_why_cuda_cannot_be_faked(run_dir: RunDir) -> None:
    """A new torch can change the headers of C++ that the guard needs."""

    def load() -> None:
        raise DryRunError("g++ cannot build guard.cpp against torch 2.99.0")

    with pytest.raises(DryRunError):
        run_rank(run_dir, 0, ANY_GPU, load_guard=load, count=counted)
    failure = known(documents.read(run_dir.rank(0), RankReport).failure)
    assert failure.message == "g++ cannot build guard.cpp against torch 2.99.0"


def test_a_run_that_loaded_the_driver_counts_nothing(run_dir: RunDir) -> None:
    """A library can load the driver late, for example in the first step."""

    def refuse() -> None:
        raise DryRunError("this process has loaded NVIDIA's driver")

    with pytest.raises(DryRunError):
        run_rank(run_dir, 0, ANY_GPU, load_guard=lambda: None, refuse_driver=refuse, count=counted)
    report = documents.read(run_dir.rank(0), RankReport)
    assert known(report.failure).message == "this process has loaded NVIDIA's driver"
    assert report.counts is None


def test_reports_a_private_name_that_torch_lacks(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rank", "script"):  # they are imported again
        monkeypatch.delitem(sys.modules, f"perfsuite.dry.{module}", raising=False)
    monkeypatch.delattr("torch._subclasses.fake_tensor.FakeTensorMode")
    with pytest.raises(PrivateNameError):
        run_rank(run_dir, 0, None)
    failure = known(documents.read(run_dir.rank(0), RankReport).failure)
    assert failure.kind == "error"
    assert "FakeTensorMode, a private name (seen in torch" in failure.message
    assert "no case can be run dry" in failure.message
