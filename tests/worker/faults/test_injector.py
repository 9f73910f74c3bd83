import math
import os
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from perfsuite.case.fault import AT_STEP, Fault
from perfsuite.results.rank_report import Memory, RankReport
from perfsuite.worker.clock.memory import HostMemory
from perfsuite.worker.clock.recorder import Recorder
from perfsuite.worker.clock.timers import SimulatedTimer
from perfsuite.worker.faults.injector import Injector
from tests.processes import Left, leave
from tests.samples import make_report
from tests.worker.clock.test_recorder import after_steps


def series(text: str | None, *, is_last_rank: bool = True, steps: int = 12) -> Recorder:
    """Return the recorder after simulated steps of 1 s under a fault."""
    before_end = None if text is None else Injector(Fault.parse(text), is_last_rank=is_last_rank).before_end
    return after_steps(Recorder(SimulatedTimer(), before_end=before_end), *[1] * steps)


@pytest.mark.parametrize(
    ("text", "step_s"),
    [
        (None, [1.0] * 12),
        ("slowdown=30%", [1.0] * 3 + [1.3] * 9),
        ("slowdown=90%", [1.0] * 3 + [1.9] * 9),
        ("stall=4", [1.0, 1.0, 1.0, 3.0] * 3),
        ("stall=1", [1.0] * 3 + [3.0] * 9),
        ("nan", [1.0] * 12),
        ("missing-rank", [1.0] * 12),
    ],
)
@pytest.mark.parametrize("is_last_rank", [True, False])
def test_effect_on_the_steps(text: str | None, step_s: list[float], is_last_rank: bool) -> None:
    recorder = series(text, is_last_rank=is_last_rank)
    assert recorder.step_s == pytest.approx(step_s)
    assert recorder.wall_s == pytest.approx(sum(step_s))


def test_structural_fault_starts_after_two_steps() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    injector = Injector(Fault.parse("host-read"), is_last_rank=False, training=lambda: (model, optimizer))
    recorder = Recorder(SimulatedTimer())
    hooks = []
    for step in range(12):
        injector.before_end(step, recorder)
        hooks.append(len(model._forward_hooks))
    assert hooks == [0] + [1] * 11, "the fault reads from the device in a hook"


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("crash", RuntimeError, "injected crash"),
        ("oom", MemoryError, "out of memory"),
        ("exit", Left, "^with 13$"),
        ("hang", Left, "^with 1$"),
    ],
)
def test_breakdown_is_only_the_last_ranks(
    text: str, error: type[BaseException], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((os, "_exit"), (time, "sleep")):  # otherwise the process would end or sleep for ever
        monkeypatch.setattr(owner, name, leave)
    assert len(series(text, is_last_rank=False).step_s) == 12
    assert len(series(text, steps=AT_STEP).step_s) == AT_STEP
    with pytest.raises(error, match=said):
        series(text, steps=AT_STEP + 1)


@pytest.mark.parametrize("text", ["crash", "exit", "oom", "hang"])
def test_last_rank_says_that_it_reached_the_fault(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((os, "_exit"), (time, "sleep")):
        monkeypatch.setattr(owner, name, leave)
    reached = Mock()
    injector = Injector(Fault.parse(text), is_last_rank=True, on_reached=reached)
    recorder = Recorder(SimulatedTimer())
    injector.before_end(AT_STEP - 1, recorder)
    reached.assert_not_called()
    with pytest.raises((RuntimeError, MemoryError, Left)):
        injector.before_end(AT_STEP, recorder)
    reached.assert_called_once_with()


def test_other_faults_are_not_reached_in_a_step() -> None:
    """A rank whose report is missing reaches its fault when it would write the report."""
    reached = Mock()
    injector = Injector(Fault.parse("missing-rank"), is_last_rank=True, on_reached=reached)
    injector.before_end(AT_STEP, Recorder(SimulatedTimer()))
    reached.assert_not_called()
    assert injector.report(make_report()) is None
    reached.assert_called_once_with()


def test_gpu_runs_out_of_its_allocators_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 100))
    monkeypatch.setattr(torch, "empty", empty)
    recorder: Any = SimpleNamespace(memory=SimpleNamespace(device="cuda:0"))
    with pytest.raises(torch.OutOfMemoryError):
        Injector(Fault.parse("oom"), is_last_rank=True).before_end(AT_STEP, recorder)
    empty.assert_called_once_with(200, dtype=torch.uint8, device="cuda:0")


@pytest.mark.parametrize("is_last_rank", [True, False])
def test_effect_on_the_report(is_last_rank: bool) -> None:
    report = make_report(memory=Memory(peak=1000, method="simulated"))

    def changed(text: str, report: RankReport = report) -> Any:
        return Injector(Fault.parse(text), is_last_rank=is_last_rank).report(report)

    nan = changed("nan").loss
    assert nan[:-1] == report.loss[:-1]
    assert math.isnan(nan[-1])
    assert changed("loss").loss == (7.0,) * 25
    assert changed("missing-metric") == report.replace(memory=None)
    assert changed("leak=20%").memory.peak == 1200
    # A leak of real memory is really held, so it is already part of the measured memory.
    for memory in (Memory(peak=1000, method="torch.cuda.memory_stats"), None):
        measured = make_report(memory=memory)
        assert changed("leak=20%", measured) == measured
    assert changed("slowdown=30%") == changed("crash") == report
    assert changed("missing-rank") == (None if is_last_rank else report)


def test_leak_is_a_share_of_the_gated_peak() -> None:
    """The leak is not a share of the process's whole memory. torch alone needs hundreds of megabytes."""
    memory = HostMemory()
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    before = memory.read().peak
    injector = Injector(Fault.parse("leak=50%"), is_last_rank=False)
    injector.before_end(AT_STEP, Recorder(SimulatedTimer(), memory=memory))
    assert held.numel() == 64 * 2**20
    assert memory.read().peak == pytest.approx(1.5 * before, rel=0.1)


def test_a_leak_is_held_on_the_device_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Mock(device="cuda:3")
    ones = Mock()
    memory.read.return_value = Memory(peak=1000, method="said")
    monkeypatch.setattr(torch, "ones", ones)
    recorder = Recorder(SimulatedTimer(), memory=memory)
    Injector(Fault.parse("leak=50%"), is_last_rank=False).before_end(AT_STEP, recorder)
    ones.assert_called_once_with(500, dtype=torch.uint8, device="cuda:3")
