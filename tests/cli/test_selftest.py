import pytest

from perfsuite.case import torch_build
from perfsuite.cli.selftest import injections, refuse_unrunnable, report
from perfsuite.doctor.injected import small_case
from perfsuite.doctor.rows import Row, Status
from perfsuite.errors import CaseError
from perfsuite.launch.lock import LOCK_FILE
from tests.cli.commands import rows, run
from tests.packages import MINE, Packages
from tests.samples import make_gpu_machine, make_machine

UNSUPPORTED = """
    def unsupported(self, case: Any, machine: Any) -> str | None:
        return "no [such] thing"
"""
BROKEN = f"""
    def build(self, *of_case: Any) -> Workload:
        import os
        from pathlib import Path
        raise RuntimeError("the lock has " + Path(os.environ["{LOCK_FILE}"]).read_text())
"""
"""Code of a framework whose ranks fail. Their message names the process that has the lock."""


def test_the_self_test_says_why_it_cannot_run(packages: Packages) -> None:
    packages.install("perf-mine", MINE + UNSUPPORTED, frameworks="mine = perf_mine:Mine")
    result = run("selftest", "--framework", "mine", status=2)
    assert result.stdout == ""
    assert result.stderr.startswith("perfsuite selftest: the self-test cannot run here: no [such] thing")


def test_the_self_test_needs_a_torch_for_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})
    machine = make_gpu_machine()
    with pytest.raises(CaseError, match=r"cannot run here: torch 2\.13\.0\+cpu was built without CUDA"):
        refuse_unrunnable(small_case(machine), machine)


@pytest.mark.parametrize(
    ("answer", "code", "last"),
    [
        ("pass", 0, "every fault was caught, and a clean run passed"),
        ("fail", 1, "the gate missed a fault or failed a clean run: do not trust its verdicts here"),
        ("unknown", 3, "part of the gate could not be tested"),
    ],
)
def test_the_self_test_ends_with_its_answer(
    answer: Status, code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row(check="inject nan", status=answer, found="x")
    assert report(iter([row, row]), as_json=False) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    assert report(iter([row, row]), as_json=True) == code
    shown = {"check": "inject nan", "status": answer, "found": "x", "advice": None}
    assert rows(capsys.readouterr().out) == [shown, shown]


@pytest.mark.parametrize(("framework", "kinds"), [("ddp", 2), ("fake", 1)])
def test_only_real_training_has_structural_faults(framework: str, kinds: int) -> None:
    machine = make_machine()
    assert len(injections(small_case(machine).replace(framework=framework), machine)) == kinds


def test_training_that_fails_ends_the_self_test(packages: Packages, simulated: None) -> None:
    packages.install("perf-mine", MINE + BROKEN, frameworks="mine = perf_mine:Mine")
    said = run("selftest", "--framework", "mine", status=1).stdout
    assert said.splitlines()[-1].startswith("the gate missed a fault")


def test_no_other_session_measures_meanwhile(packages: Packages, simulated: None) -> None:
    packages.install("perf-mine", MINE + BROKEN, frameworks="mine = perf_mine:Mine")
    [row] = rows(run("selftest", "--framework", "mine", "--json", status=1).stdout)
    assert (row["check"], row["status"]) == ("baseline", "fail")
    assert "the lock has pid " in row["advice"]
