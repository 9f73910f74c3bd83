import sys
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case import torch_build
from perfsuite.doctor.rows import Row
from perfsuite.doctor.torch_checks import clock_rows, memory_row, probe, torch_rows
from perfsuite.node.machine import detect
from perfsuite.results.rank_report import Memory
from perfsuite.worker.probes.doctor_facts import ClockFacts, DoctorFile
from tests.fake_torch import install_torch
from tests.processes import executable
from tests.samples import make_gpu_machine, make_machine

PROBED = DoctorFile(devices=8, nccl="2.29.3")
CLOCK = ClockFacts(overhead=(1.001,) * 5, wall=(1.0002,) * 5, step_s=0.1)
USUAL = {"clock": "pass", "cost of measuring": "pass"}


def test_torch_reaches_the_gpus_that_nvml_sees() -> None:
    torch, reached = torch_rows(PROBED, make_gpu_machine())
    assert (torch.status, torch.found) == ("pass", torch_build.summary())
    assert (reached.status, reached.found) == ("pass", "torch reaches 8 GPUs, driver 580.1, NCCL 2.29.3")


@pytest.mark.parametrize(
    ("probed", "why"),
    [
        (DoctorFile(error="The NVIDIA driver is too old"), "The NVIDIA driver is too old"),
        (PROBED.replace(devices=7), "torch reaches 7 GPUs"),
    ],
    ids=["none", "too few"],
)
def test_torch_must_reach_the_gpus_that_nvml_sees(probed: DoctorFile, why: str) -> None:
    row = torch_rows(probed, make_gpu_machine())[1]
    assert (row.status, row.found) == ("fail", f"NVML sees 8 GPUs (driver 580.1), {why}")


def test_without_a_gpu_torch_has_one_row() -> None:
    assert [row.check for row in torch_rows(DoctorFile(), make_machine())] == ["torch"]


def test_torch_must_run_kernels_on_the_gpus() -> None:
    row = torch_rows(PROBED.replace(kernel_error="GPU 2: CUDA error: no kernel image"), make_gpu_machine())[1]
    assert row.status == "fail"
    assert row.found == "torch reaches 8 GPUs, but runs no kernel on GPU 2: CUDA error: no kernel image"


@pytest.mark.parametrize(
    ("read", "status"), [(100, "pass"), (102, "pass"), (40, "fail"), (0, "fail"), (110, "fail")]
)
def test_the_peak_is_what_was_allocated(read: int, status: str) -> None:
    row = memory_row(Memory(peak=read * 2**20, method="x"), 100 * 2**20)
    assert (row.status, row.found) == (status, f"{read}.0 MiB, expected 100.0 MiB (x)")


@pytest.mark.parametrize(
    ("changes", "check", "status"),
    [
        ({"wall": (1.02,) * 5}, "clock", "fail"),
        ({"profiler_s": 0.101}, "clock and profiler", "pass"),
        ({"profiler_s": 0.09}, "clock and profiler", "fail"),
        ({"overhead": (1.05,) * 5}, "cost of measuring", "fail"),
        ({"overhead": (0.8, 0.9, 1.1, 1.2, 1.3)}, "cost of measuring", "unknown"),
    ],
    ids=str,
)
def test_clock_agrees_with_others_cheaply(changes: Any, check: str, status: str) -> None:
    assert {row.check: row.status for row in clock_rows(CLOCK)} == USUAL
    rows = clock_rows(CLOCK.replace(**changes))
    assert {row.check: row.status for row in rows} == {**USUAL, check: status}
    assert all((row.advice is None) == (row.status == "pass") for row in rows)


SHORT = """
import sys
from perfsuite.worker.probes import doctor_probe
doctor_probe.STEPS = 4
doctor_probe.main(sys.argv[3], kind=sys.argv[4], quick=False)
"""
"""Runs the whole probe in blocks of fewer steps."""


@pytest.mark.launch
@pytest.mark.nightly
def test_the_probe_trains_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short.py").write_text(SHORT)
    python = executable(tmp_path / "python", f'exec {sys.executable} {tmp_path / "short.py"} "$@"')
    monkeypatch.setattr(sys, "executable", str(python))
    probed = probe(detect(), quick=False)
    assert isinstance(probed, DoctorFile)
    assert probed.clock is not None
    assert len(probed.clock.overhead) == len(probed.clock.wall) > 1
    assert probed.clock.step_s > 0
    assert probed.memory is not None
    assert memory_row(probed.memory, probed.expected_peak).status == "pass"


def test_reports_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(tmp_path, monkeypatch, version="2.13.0+cpu")
    row = probe(make_gpu_machine("NVIDIA H200"), quick=True)
    assert isinstance(row, Row)
    assert (row.check, row.status) == ("torch", "fail")
    why = "torch 2.13.0+cpu was built without CUDA and cannot use the GPUs of this machine (8 x NVIDIA H200)."
    assert row.found.startswith(why)


def test_a_probe_that_does_not_start_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "removed"))
    row = probe(make_machine(), quick=True)
    assert isinstance(row, Row)
    assert (row.check, row.status) == ("torch", "fail")
    assert "No such file or directory" in row.found
