from __future__ import annotations

import pytest
from typer.testing import CliRunner

from perfsuite import Case
from perfsuite.case import torch_build
from perfsuite.case.hardware import ACCELERATORS, Machine
from perfsuite.cli import app as cli
from perfsuite.cli import selftest
from perfsuite.errors import BusyError
from perfsuite.launch.lock import MachineLock
from perfsuite.launch.machine import gpu_machine
from tests.samples import make_gpu_machine, make_machine


def hardware(
    monkeypatch: pytest.MonkeyPatch, name: str, *options: str, cuda: str | None = "13.0", status: int = 0
) -> str:
    """On eight GPUs of that name, with a torch for that CUDA: standard output, or the error."""
    machine = gpu_machine([name], count=8, memory_bytes=80 * 2**30, driver="580.1")
    monkeypatch.setattr(cli, "detect", lambda: machine)
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+x", "cuda": cuda})
    result = CliRunner().invoke(cli.app, ["hardware", *options])
    assert result.exit_code == status
    assert "hardware class  " in result.stdout
    return result.stderr or result.stdout


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
    assert "add it to PRODUCTS in perfsuite/case/hardware.py" in output


@pytest.mark.parametrize("expected", ["h100", "h100-80gb", "gpu", "cpu"])
def test_hardware_is_what_is_expected(monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    output = hardware(monkeypatch, "NVIDIA H100 80GB HBM3", "--expect", expected)
    assert "torch           2.13.0+x, built for CUDA 13.0" in output


def test_hardware_that_is_not_what_is_expected_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = hardware(monkeypatch, "NVIDIA H200", "--expect", "h100", status=2)
    meant = "it is meant for h100, this machine is h200-141gb-sxm"
    assert error == f"perfsuite hardware: no h100 here: {meant}\n"


def test_a_driver_that_fails_is_the_reason_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mismatch = "NVML found no GPU: RM has detected an NVML/RM version mismatch."
    monkeypatch.setattr(cli, "detect", lambda: make_machine(note=mismatch))
    result = CliRunner().invoke(cli.app, ["hardware", "--expect", "h100"])
    assert result.exit_code == 2
    meant = "it is meant for h100, this machine is cpu-test-2c"
    assert result.stderr == f"perfsuite hardware: no h100 here: {meant}; {mismatch}\n"


def test_hardware_that_nothing_has_is_an_error() -> None:
    result = CliRunner().invoke(cli.app, ["hardware", "--expect", "x100"])
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "perfsuite hardware: --expect x100: did you mean 'v100'? begin with one of cpu, "
    )


def test_gpus_that_the_installed_torch_cannot_use_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = hardware(monkeypatch, "NVIDIA H200", cuda=None, status=2)
    assert error.startswith(
        "perfsuite hardware: torch 2.13.0+x is built without CUDA and cannot use the GPUs"
    )
    assert "(8 x NVIDIA H200)" in error
    assert "pip install torch==2.13.0;" in error
    hardware(monkeypatch, "NVIDIA H200", "--expect", "cpu", cuda=None)


def test_no_self_test_with_a_torch_that_cannot_use_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "detect", make_gpu_machine)
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})
    result = CliRunner().invoke(cli.app, ["selftest"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the self-test cannot run here: torch 2.13.0+cpu is built without CUDA" in result.stderr


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
    held: list[bool] = []

    def answered(case: Case, machine: Machine, say: object) -> selftest.Answer:
        with pytest.raises(BusyError):
            MachineLock().take(print, wait=False)
        held.append(True)
        return answer

    monkeypatch.setattr(selftest, "selftest", answered)
    result = CliRunner().invoke(cli.app, ["selftest", "--framework", "fake"])
    assert result.exit_code == status
    assert result.stdout.splitlines()[-1].startswith(last)
    assert held, "no session measured beside it"
    again = MachineLock()
    again.take(print, wait=False)
    again.release()


def test_help_names_the_exit_statuses() -> None:
    shown = " ".join(CliRunner().invoke(cli.app, ["--help"]).stdout.split())
    assert "Exit status: 0, or 1 for a finding" in shown


def test_hardware_on_this_machine() -> None:
    result = CliRunner().invoke(cli.app, ["hardware"])
    assert result.exit_code == 0
    assert "hardware class" in result.output
