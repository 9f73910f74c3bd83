from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from perfsuite import Case
from perfsuite.case import torch_build
from perfsuite.case.hardware import Machine
from perfsuite.cli.app import app
from perfsuite.cli.checks import Row, Status
from perfsuite.cli.selftest import command
from perfsuite.errors import BusyError
from perfsuite.launch.lock import MachineLock
from tests.samples import make_gpu_machine


def test_no_self_test_with_a_torch_that_cannot_use_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "detect", make_gpu_machine)
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})
    result = CliRunner().invoke(app, ["selftest"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the self-test cannot run here: torch 2.13.0+cpu is built without CUDA" in result.stderr


def test_the_self_test_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "unsupported", lambda case, machine: "no [such] thing")
    result = CliRunner().invoke(app, ["selftest"])
    assert result.exit_code == 2
    assert result.stderr == "perfsuite selftest: the self-test cannot run here: no [such] thing\n"


@pytest.mark.parametrize(
    ("answer", "code", "last"),
    [
        ("pass", 0, "every fault was caught, and a clean run was not"),
        ("fail", 1, "the gate does not catch what it must: do not trust its verdicts here"),
        ("unknown", 3, "part of the gate could not be tried"),
    ],
)
def test_the_self_test_ends_with_its_answer(
    answer: Status, code: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []

    def answered(case: Case, machine: Machine) -> Iterator[Row]:
        with pytest.raises(BusyError):
            MachineLock().take(print, wait=False)
        held.append(True)
        yield Row(check="inject nan", status=answer, found="x")

    monkeypatch.setattr(command, "inject_all", answered)
    result = CliRunner().invoke(app, ["selftest", "--framework", "fake"])
    assert result.exit_code == code
    assert result.stdout.splitlines()[-1].startswith(last)
    assert held, "no session measured beside it"
    again = MachineLock()
    again.take(print, wait=False)
    again.release()
