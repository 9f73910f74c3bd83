"""Test how the program of a dry run reports errors. The program runs in the test's own process."""

import sys
from pathlib import Path

import pytest

from perfsuite import DDP, documents
from perfsuite.case.case import CaseFile
from perfsuite.dry import __main__ as program
from perfsuite.errors import PrivateNameError
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash
from tests.samples import known, make_case


def test_reports_a_private_name_that_torch_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    documents.write(run_dir.case, CaseFile(case=make_case(framework=DDP()), device="cpu"))
    monkeypatch.setattr(leash, "die_with_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["perfsuite.dry", str(tmp_path), "--rank", "0"])
    for module in ("rank", "script"):  # they are imported again
        monkeypatch.delitem(sys.modules, f"perfsuite.dry.{module}", raising=False)
    monkeypatch.delattr("torch._subclasses.fake_tensor.FakeTensorMode")
    with pytest.raises(PrivateNameError):
        program.main()
    failure = known(documents.read(run_dir.rank(0), RankReport).failure)
    assert failure.kind == "error"
    assert "FakeTensorMode, a private name (seen in torch" in failure.message
    assert "no case can be run dry" in failure.message
