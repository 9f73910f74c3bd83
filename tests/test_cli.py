from __future__ import annotations

import pytest
from typer.testing import CliRunner

from perfsuite import cli, selftest
from perfsuite.hardware import ACCELERATORS, gpu_machine


def hardware(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    machine = gpu_machine([name], count=8, memory_bytes=80 * 2**30, driver="580.1")
    monkeypatch.setattr(cli, "detect", lambda: machine)
    result = CliRunner().invoke(cli.app, ["hardware"])
    assert result.exit_code == 0
    return result.output


def test_hardware_says_class_markers_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    output = hardware(monkeypatch, "NVIDIA H100 80GB HBM3")
    assert "h100-80gb-sxm" in output
    assert "8 GPUs" in output
    assert "989.5 TFLOP/s" in output
    lines = {line.split()[1]: line for line in output.splitlines() if line.startswith("-m ")}
    assert set(lines) == set(ACCELERATORS)
    assert " yes" in lines["h100"]
    assert "it is meant for a100, this machine is h100-80gb-sxm" in lines["a100"]


def test_hardware_says_that_an_unknown_gpu_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    output = hardware(monkeypatch, "NVIDIA Imaginary X1")
    assert "unknown peak, no MFU" in output
    assert "add it to PRODUCTS in perfsuite/hardware.py" in output


@pytest.mark.parametrize("framework", ["nosuch", "fsdp", "script"])
def test_an_error_is_one_line_and_status_2(framework: str) -> None:
    result = CliRunner().invoke(cli.app, ["selftest", "--framework", framework])
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("perfsuite selftest: Case: framework: ")


def test_the_self_test_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "unsupported", lambda case, machine: "no [such] thing")
    result = CliRunner().invoke(cli.app, ["selftest"])
    assert result.exit_code == 2
    assert result.stderr == "perfsuite selftest: the self-test cannot run here: no [such] thing\n"


@pytest.mark.parametrize(
    ("answer", "status", "last"),
    [
        ("caught", 0, "every fault was caught, and a clean run was not"),
        ("missed", 1, "the gate does not catch what it must: do not trust its verdicts here"),
        ("untried", 3, "the machine was unhealthy, so that part of the gate could not be tried"),
    ],
)
def test_the_self_test_ends_with_its_answer(
    answer: selftest.Answer, status: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "selftest", lambda case, machine, say: answer)
    result = CliRunner().invoke(cli.app, ["selftest", "--framework", "fake"])
    assert result.exit_code == status
    assert result.stdout.splitlines()[-1].startswith(last)


def test_help_names_the_exit_statuses() -> None:
    shown = " ".join(CliRunner().invoke(cli.app, ["--help"]).stdout.split())
    assert "Exit status: 0, or 1 for a finding" in shown


def test_hardware_on_this_machine() -> None:
    result = CliRunner().invoke(cli.app, ["hardware"])
    assert result.exit_code == 0
    assert "hardware class" in result.output
