"""What trains in it is launched by `tests.cli.test_doctor_checks`."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from perfsuite import documents
from perfsuite.results.rank_report import Memory
from perfsuite.worker import doctor_probe
from perfsuite.worker.doctor_facts import ClockFacts, DoctorFile
from perfsuite.worker.doctor_probe import BLOCK_BYTES, peak_memory, reached_gpus

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CLOCK = ClockFacts(overhead=(1.0,), wall=(1.0,), step_s=0.1)
MEMORY = Memory(peak=1, method="said")


def test_gpus_that_torch_reaches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    assert reached_gpus() == DoctorFile(devices=4, nccl="2.29.3")


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_why_no_gpu_is_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    error = kind("The NVIDIA driver on your system is too old.\nPlease update")
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    assert reached_gpus() == DoctorFile(error="The NVIDIA driver on your system is too old.")


def test_the_peak_that_a_rank_reads_moves_by_what_is_allocated() -> None:
    memory, expected = peak_memory(CPU)
    assert expected == BLOCK_BYTES
    assert memory.peak == pytest.approx(BLOCK_BYTES, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "quick", "devices", "trains_on"),
    [
        ("cpu", True, 0, []),
        ("cpu", False, 0, [call(CPU)]),
        ("cuda", True, 2, []),
        ("cuda", False, 2, [call(GPU)]),
        ("cuda", False, 0, []),
    ],
)
def test_what_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, quick: bool, devices: int, trains_on: Any
) -> None:
    """Without GPUs torch is not asked for any."""
    found = DoctorFile(devices=devices)
    asked, memory, clock = Mock(return_value=found), Mock(return_value=(MEMORY, 1)), Mock(return_value=CLOCK)
    monkeypatch.setattr(doctor_probe, "reached_gpus", asked)
    monkeypatch.setattr(doctor_probe, "peak_memory", memory)
    monkeypatch.setattr(doctor_probe, "clock_facts", clock)
    file = tmp_path / "probe.json"
    doctor_probe.main(str(file), kind=kind, quick=quick)
    trained = found.replace(memory=MEMORY, expected_peak=1, clock=CLOCK)
    assert documents.read(file, DoctorFile) == (trained if trains_on else found)
    assert memory.call_args_list == clock.call_args_list == trains_on
    assert asked.called == (kind == "cuda")
