import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfsuite.case import torch_build
from perfsuite.cli import selftest
from perfsuite.doctor.rows import Row, Status
from perfsuite.launch.lock import LOCK_FILE
from tests.cli.commands import rows, run
from tests.samples import make_gpu_machine


@pytest.mark.parametrize("why", ["no [such] thing", "torch 2.13.0+cpu was built without CUDA"])
def test_the_self_test_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why.startswith("torch"):
        monkeypatch.setattr(selftest, "detect", make_gpu_machine)
        monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})
    else:
        monkeypatch.setattr(selftest, "unsupported", lambda case, machine: why)
    result = run("selftest", status=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"perfsuite selftest: the self-test cannot run here: {why}")


@pytest.mark.parametrize(
    ("answer", "code", "last"),
    [
        ("pass", 0, "every fault was caught, and a clean run passed"),
        ("fail", 1, "the gate missed a fault or failed a clean run: do not trust its verdicts here"),
        ("unknown", 3, "part of the gate could not be tested"),
    ],
)
def test_the_self_test_ends_with_its_answer(
    answer: Status, code: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []

    def answered(*tried: object) -> Iterator[Row]:
        held.append(Path(os.environ[LOCK_FILE]).read_text() != "")
        yield Row(check="inject nan", status=answer, found="x")

    for faults in ("inject_all", "inject_structural"):
        monkeypatch.setattr(selftest, faults, answered)
    assert run("selftest", status=code).stdout.splitlines()[-1].startswith(last)
    row = {"check": "inject nan", "status": answer, "found": "x", "advice": None}
    assert rows(run("selftest", "--json", status=code).stdout) == [row, row]
    assert rows(run("selftest", "--framework", "fake", "--json", status=code).stdout) == [row]
    assert held == [True] * 5, "no other session measured meanwhile"
