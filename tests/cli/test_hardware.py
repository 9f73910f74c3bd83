from __future__ import annotations

import pytest
from typer.testing import CliRunner

from perfsuite.case import torch_build
from perfsuite.case.hardware import ACCELERATORS
from perfsuite.cli import hardware as command
from perfsuite.cli.app import app
from perfsuite.launch.machine import gpu_machine
from tests.samples import make_machine


def hardware(
    monkeypatch: pytest.MonkeyPatch, name: str, *options: str, cuda: str | None = "13.0", status: int = 0
) -> str:
    """On eight GPUs of that name, with a torch for that CUDA: standard output, or the error."""
    machine = gpu_machine([name], count=8, memory_bytes=80 * 2**30, driver="580.1")
    monkeypatch.setattr(command, "detect", lambda: machine)
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+x", "cuda": cuda})
    result = CliRunner().invoke(app, ["hardware", *options])
    assert result.exit_code == status
    assert "hardware class  " in result.stdout
    return result.stderr or result.stdout


def test_hardware_says_class_markers_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    output = hardware(monkeypatch, "NVIDIA H100 80GB HBM3")
    assert "h100-80gb-sxm" in output
    assert "8 GPUs" in output
    assert "989.5 TFLOP/s" in output
    assert "cases run here  -m cpu, -m gpu, -m h100\n" in output
    assert f"{len(ACCELERATORS) - 3} other markers select none here; why not: --expect MARKER" in output
    assert "a100" not in output


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
    monkeypatch.setattr(command, "detect", lambda: make_machine(note=mismatch))
    result = CliRunner().invoke(app, ["hardware", "--expect", "h100"])
    assert result.exit_code == 2
    meant = "it is meant for h100, this machine is cpu-test-2c"
    assert result.stderr == f"perfsuite hardware: no h100 here: {meant}; {mismatch}\n"


def test_hardware_that_nothing_has_is_an_error() -> None:
    result = CliRunner().invoke(app, ["hardware", "--expect", "x100"])
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


def test_hardware_on_this_machine() -> None:
    result = CliRunner().invoke(app, ["hardware"])
    assert result.exit_code == 0
    assert "hardware class" in result.output
