from __future__ import annotations

import pytest
from typer.testing import CliRunner

from perfsuite import cli
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


def test_hardware_on_this_machine() -> None:
    result = CliRunner().invoke(cli.app, ["hardware"])
    assert result.exit_code == 0
    assert "hardware class" in result.output
