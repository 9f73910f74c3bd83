"""Test the probe of `perfsuite doctor`. `tests.cli.test_doctor_checks` launches its training."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from perfsuite import documents
from perfsuite.results.rank_report import Memory
from perfsuite.worker.probes import doctor_probe
from perfsuite.worker.probes.doctor_facts import ClockFacts, DoctorFile
from perfsuite.worker.probes.doctor_probe import BLOCK_BYTES, peak_memory, reached_gpus

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
CLOCK = ClockFacts(overhead=(1.0,), wall=(1.0,), step_s=0.1)


def test_counts_gpus_or_says_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
    assert reached_gpus() == DoctorFile(devices=4, nccl="2.29.3")
    for kind in (RuntimeError, AssertionError):
        error = kind("The NVIDIA driver on your system is too old.\nPlease update")
        monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
        assert reached_gpus() == DoctorFile(error="The NVIDIA driver on your system is too old.")


def test_names_a_gpu_for_which_torch_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch can reach a card even if its kernels are for older or newer cards."""

    def ones(size: int, device: str) -> torch.Tensor:
        if device == "cuda:2":
            raise RuntimeError("CUDA error: no kernel image is available\nSearch for more")
        return torch.zeros(size)

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(torch, "ones", ones)
    assert reached_gpus().kernel_error == "GPU 2: CUDA error: no kernel image is available"


def test_peak_moves_by_what_is_allocated() -> None:
    memory, expected = peak_memory(CPU)
    assert expected == BLOCK_BYTES
    assert memory.peak == pytest.approx(BLOCK_BYTES, rel=0.1)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(("kind", "devices", "on"), [("cpu", 0, CPU), ("cuda", 2, GPU), ("cuda", 0, None)])
def test_what_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, quick: bool, devices: int, on: Any
) -> None:
    """On a machine without GPUs, torch is not asked for GPUs."""
    answer = DoctorFile(devices=devices)
    memory = Memory(peak=1, method="said")
    asked = {"reached_gpus": answer, "peak_memory": (memory, 1), "clock_facts": CLOCK}
    probes = {name: Mock(return_value=value) for name, value in asked.items()}
    for name, probe in probes.items():
        monkeypatch.setattr(doctor_probe, name, probe)
    doctor_probe.main(str(tmp_path / "probe.json"), kind=kind, quick=quick)
    trained = answer.replace(memory=memory, expected_peak=1, clock=CLOCK)
    trains = on is not None and not quick
    assert documents.read(tmp_path / "probe.json", DoctorFile) == (trained if trains else answer)
    for name in ("peak_memory", "clock_facts"):
        assert probes[name].call_args_list == ([call(on)] if trains else [])
    assert probes["reached_gpus"].called == (kind == "cuda")
