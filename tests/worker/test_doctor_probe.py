"""What trains in it is launched by `tests.cli.test_doctor_checks`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from perfsuite import documents
from perfsuite.worker import doctor_probe
from perfsuite.worker.doctor_facts import ClockFacts, DoctorFile, MemoryFacts, TorchFacts
from perfsuite.worker.doctor_probe import BLOCK_BYTES, memory_facts, torch_facts

CPU = torch.device("cpu")
CLOCK = ClockFacts(overhead=(1.0,), wall=(1.0,), step_s=0.1)
MEMORY = MemoryFacts(expected=1, read=1, method="said")


def test_without_gpus_torch_is_not_asked_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("asked"))
    assert torch_facts(wants_gpu=False) == TorchFacts(
        version=torch.__version__, cuda=torch.version.cuda, nccl=None, devices=0
    )


def test_gpus_that_torch_reaches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    facts = torch_facts(wants_gpu=True)
    assert (facts.nccl, facts.devices, facts.error) == ("2.29.3", 4, None)


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_why_no_gpu_is_reached_is_kept_in_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fails() -> NoReturn:
        raise kind("The NVIDIA driver on your system is too old.\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", fails)
    facts = torch_facts(wants_gpu=True)
    assert (facts.nccl, facts.devices) == (None, 0)
    assert facts.error == "The NVIDIA driver on your system is too old."


def test_the_peak_that_a_rank_reads_moves_by_what_is_allocated() -> None:
    facts = memory_facts(CPU)
    assert facts.expected == BLOCK_BYTES
    assert facts.read == pytest.approx(BLOCK_BYTES, rel=0.1)
    assert facts.method == "VmHWM above VmRSS before the model"


@pytest.mark.parametrize(
    ("kind", "quick", "devices", "trains_on"),
    [
        ("cpu", True, 0, None),
        ("cpu", False, 0, CPU),
        ("cuda", True, 2, None),
        ("cuda", False, 2, torch.device("cuda", 0)),
        ("cuda", False, 0, None),
    ],
)
def test_what_is_probed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    quick: bool,
    devices: int,
    trains_on: torch.device | None,
) -> None:
    seen: list[torch.device] = []

    def on(facts: Any) -> Callable[[torch.device], Any]:
        def measured(device: torch.device) -> Any:
            seen.append(device)
            return facts

        return measured

    told = TorchFacts(version="2.13.0", cuda="13.0", nccl=None, devices=devices)
    monkeypatch.setattr(doctor_probe, "torch_facts", lambda wants_gpu: told)
    monkeypatch.setattr(doctor_probe, "memory_facts", on(MEMORY))
    monkeypatch.setattr(doctor_probe, "clock_facts", on(CLOCK))
    file = tmp_path / "probe.json"
    doctor_probe.main(str(file), kind=kind, quick=quick)
    measured = trains_on is not None
    assert documents.read(file, DoctorFile) == DoctorFile(
        torch=told, memory=MEMORY if measured else None, clock=CLOCK if measured else None
    )
    assert seen == ([trains_on] * 2 if measured else [])
