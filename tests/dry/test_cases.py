import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite.dry import cases
from perfsuite.errors import CaseError

FILE = """
import pytest
from perfsuite import DDP, FSDP2, Case, Topology

DDP_CASE = Case(model="llama-tiny", framework=DDP(), sequence_length=64, micro_batch=4,
                topology=Topology(processes_per_node=2), hardware="h100")

@pytest.mark.parametrize("case", [DDP_CASE, DDP_CASE.replace(framework=FSDP2())])
def test_it(bench, case):
    bench(case)
"""


@pytest.fixture
def directory(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with the file `FILE`. pytest collects its cases in this process."""

    def collected(command: list[str]) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "pytest"]
        done = pytester.runpytest_inprocess(*command[3:], "-p", "no:hypothesispytest")
        return subprocess.CompletedProcess(command, done.ret, str(done.stdout), str(done.stderr))

    monkeypatch.setattr(cases, "captured", collected)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the inner session is not a worker of xdist
    pytester.makepyfile(test_it=FILE)
    return pytester.path


def test_cases_are_found_by_id_and_by_expression(directory: Path) -> None:
    ids = ["fsdp2-llama-tiny-s64-b4-fp32-1x2", "ddp-llama-tiny-s64-b4-fp32-1x2"]
    assert [case.id for case in cases.by_id(directory, ids)] == ids
    assert [case.id for case in cases.by_expression(directory, "fsdp2")] == ids[:1]


def test_missing_name_suggests_similar_ones(directory: Path) -> None:
    with pytest.raises(CaseError, match=r"called 'fsdp2-llama-tiny'\. Did you mean fsdp2-llama-tiny-s64"):
        cases.by_id(directory, ["fsdp2-llama-tiny"])
    with pytest.raises(
        CaseError, match=r"-k nosuch selects no case in .*\. The directory has 2 case\(s\): ddp-llama-tiny-"
    ):
        cases.by_expression(directory, "nosuch")


def test_says_how_to_get_cases(directory: Path) -> None:
    with pytest.raises(
        CaseError, match=r"there is no .*/missing: name the directory .* or write a first case"
    ):
        cases.by_expression(directory / "missing", "")
    (directory / "empty").mkdir()
    with pytest.raises(CaseError, match=r"^.*/empty has no cases: name the directory of your cases"):
        cases.by_expression(directory / "empty", "")
    with pytest.raises(CaseError, match=r"-k ddp selects no case in .*/empty, because it has no cases: name"):
        cases.by_expression(directory / "empty", "ddp")


@pytest.mark.parametrize("expression", ["ddp or nosuch", "fsdp2 and llama or nosuch", "ddp or (nosuch)"])
def test_refuses_an_alternative_without_a_case(directory: Path, expression: str) -> None:
    with pytest.raises(CaseError, match=r"no test in .* matches nosuch\. Correct or remove it"):
        cases.by_expression(directory, expression)


@pytest.mark.parametrize("expression", ["ddp or FSDP2", "ddp and not nosuch", "ddp and not (nosuch)", "h100"])
def test_accepts_names_that_match_or_exclude(directory: Path, expression: str) -> None:
    assert cases.by_expression(directory, expression)


def test_reports_what_pytest_cannot_read(directory: Path) -> None:
    with pytest.raises(CaseError, match=r"(?s)pytest cannot collect the cases in .*Wrong expression"):
        cases.by_expression(directory, "a or or")
    (directory / "test_it.py").write_text("import nosuch_module")
    with pytest.raises(CaseError, match=r"(?s)pytest cannot collect .*nosuch_module"):
        cases.by_id(directory, ["a"])
