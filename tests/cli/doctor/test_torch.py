from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.case import torch_build
from perfsuite.cli.checks import Row
from perfsuite.cli.doctor.torch import clock_rows, memory_row, probe, torch_rows
from perfsuite.node.machine import detect
from perfsuite.worker.doctor_facts import ClockFacts, DoctorFile, MemoryFacts, TorchFacts
from tests.samples import make_gpu_machine, make_machine

TORCH = TorchFacts(version="2.13.0", cuda="13.0", nccl="2.29.3", devices=8)
CLOCK = ClockFacts(overhead=(1.001,) * 5, wall=(1.0002,) * 5, step_s=0.1)
H100 = make_gpu_machine()


def statuses(rows: list[Row]) -> dict[str, str]:
    return {row.check: row.status for row in rows}


def test_torch_must_reach_the_gpus_that_nvml_sees() -> None:
    assert statuses(torch_rows(TORCH, H100)) == {"torch": "pass", "torch and GPUs": "pass"}
    old = TORCH.replace(devices=0, error="The NVIDIA driver on your system is too old", nccl=None)
    row = torch_rows(old, H100)[1]
    assert row.status == "fail"
    assert row.found == "NVML sees 8 GPUs (driver 580.1), The NVIDIA driver on your system is too old"
    assert torch_rows(TORCH.replace(devices=7), H100)[1].found.endswith("torch reaches 7 GPUs")
    assert statuses(torch_rows(TORCH.replace(devices=0), make_machine())) == {"torch": "pass"}


@pytest.mark.parametrize(
    ("read", "status"), [(100, "pass"), (102, "pass"), (40, "fail"), (0, "fail"), (110, "fail")]
)
def test_the_peak_is_what_was_allocated(read: int, status: str) -> None:
    facts = MemoryFacts(expected=100 * 2**20, read=read * 2**20, method="x")
    assert memory_row(facts).status == status


def test_the_clock_agrees_with_the_hosts_and_the_profilers() -> None:
    assert statuses(clock_rows(CLOCK)) == {"clock": "pass", "cost of measuring": "pass"}
    assert statuses(clock_rows(CLOCK.replace(wall=(1.02,) * 5)))["clock"] == "fail"
    for profiler_s, status in ((0.101, "pass"), (0.09, "fail")):
        found = statuses(clock_rows(CLOCK.replace(profiler_s=profiler_s)))
        assert found["clock and profiler"] == status


@pytest.mark.parametrize(
    ("overhead", "status"),
    [((1.0,) * 5, "pass"), ((1.05,) * 5, "fail"), ((0.8, 0.9, 1.1, 1.2, 1.3), "unknown")],
)
def test_what_measuring_costs(overhead: tuple[float, ...], status: str) -> None:
    row = clock_rows(CLOCK.replace(overhead=overhead))[-1]
    assert row.status == status
    assert (row.advice is None) == (status == "pass")


@pytest.mark.launch
def test_the_probe_trains_on_this_machine(tmp_path: Path) -> None:
    probed = probe(detect(), quick=False)
    assert isinstance(probed, DoctorFile)
    assert probed.clock is not None
    assert len(probed.clock.overhead) == len(probed.clock.wall) > 1
    assert probed.clock.step_s > 0
    assert probed.memory is not None
    assert memory_row(probed.memory).status == "pass"


def test_gpus_that_the_installed_torch_cannot_use_are_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+x", "cuda": None})
    row = probe(make_gpu_machine("NVIDIA H200"), quick=True)
    assert isinstance(row, Row)
    assert (row.check, row.status) == ("torch", "fail")
    assert row.found.startswith("torch 2.13.0+x is built without CUDA and cannot use the GPUs")
    assert "(8 x NVIDIA H200)" in row.found
    assert "pip install torch==2.13.0;" in row.found
