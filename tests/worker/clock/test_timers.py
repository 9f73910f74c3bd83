import time
from unittest.mock import Mock

import pytest
import torch

from perfsuite.worker.clock.timers import CudaTimer, HostTimer, SimulatedTimer, clock_for
from tests.worker.fake_gpu import GPU, FakeGPU


class Ticking(CudaTimer):
    """A timer whose host clock advances by a millisecond whenever it is read."""

    ticks = 0

    def host(self) -> float:
        self.ticks += 1
        return self.ticks / 1000


def test_injected_slowdown_keeps_the_host_busy(gpu: FakeGPU) -> None:
    """If the host is the bottleneck, a delay of only the device would end before the host sends more work."""
    timer = Ticking(GPU)
    timer.sleep(0.25)
    assert timer.ticks == pytest.approx(250, abs=2)
    assert gpu.queued_ms - gpu.waits[-1] == pytest.approx(250)


@pytest.mark.parametrize("timer", [HostTimer(), SimulatedTimer()], ids=lambda timer: timer.name)
def test_host_clock_knows_every_mark_at_once(timer: HostTimer) -> None:
    start = timer.stamp()
    timer.sleep(1e-3)
    end = timer.stamp()
    timer.settle()
    assert timer.is_past(end)
    assert timer.seconds(start, end) >= 1e-3
    before = timer.host()
    assert timer.host() >= before
    if isinstance(timer, SimulatedTimer):
        time.sleep(1e-3)
        assert timer.stamp() == timer.host() == 1e-3, "a simulated clock does not advance by itself"


def test_clock_replaced_by_a_script_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("perf_counter", "process_time", "monotonic", "clock_gettime", "time"):
        monkeypatch.setattr(time, name, lambda *args: 0.0)
    timer = HostTimer()
    start = timer.stamp()
    cpu = timer.cpu()
    timer.sleep(1e-3)
    assert timer.seconds(start, timer.stamp()) >= 1e-3
    assert timer.host() > 0
    assert cpu is not None
    assert (timer.cpu() or 0) > cpu


def test_reads_the_kernels_uptime_if_any(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = HostTimer()
    assert 0 < (timer.uptime() or 0) <= (timer.uptime() or 0)
    assert SimulatedTimer().uptime() is None
    assert clock_for(torch.device("cpu"))[0].name == timer.name == "perf_counter"
    monkeypatch.setattr("builtins.open", Mock(side_effect=FileNotFoundError))
    assert timer.uptime() is None
