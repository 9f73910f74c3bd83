import math
from pathlib import Path
from statistics import stdev

import pytest

from perfsuite.frameworks import LaunchPlan, Ranks
from perfsuite.frameworks.fake import Fake
from perfsuite.worker.clock.recorder import Recorder
from perfsuite.worker.clock.timers import SimulatedTimer
from tests.samples import make_case


def simulated(framework: Fake, *, rank: int = 0, steps: int = 400) -> tuple[list[float], list[float]]:
    """Return the step times in seconds and the losses of one rank."""
    recorder = Recorder(SimulatedTimer())
    ranks = Ranks(rank=rank, world_size=2, device=None, directory=Path())
    workload = framework.build(make_case(framework=framework), ranks, recorder)
    assert workload.memory is not None
    assert workload.memory().peak == framework.memory_mb * 1_000_000
    recorder.start()
    losses = workload.run(steps)
    recorder.finish()
    return recorder.step_s, losses


def test_first_step_is_three_times_as_long() -> None:
    step_s, losses = simulated(Fake(step_ms=20, noise=0.05))
    logs = [math.log(seconds / 0.02) for seconds in step_s[1:]]
    assert sum(logs) / len(logs) == pytest.approx(0, abs=0.01)
    assert stdev(logs) == pytest.approx(0.05, rel=0.15)
    assert len(losses) == len(step_s) == 400
    assert losses[:3] == pytest.approx([7, 6.4, 5.86])
    step_s, _ = simulated(Fake(step_ms=10, noise=0), steps=5)
    assert step_s == pytest.approx([0.03, 0.01, 0.01, 0.01, 0.01])


def test_ranks_differ_and_each_repeats_itself() -> None:
    assert simulated(Fake(), steps=5) == simulated(Fake(), steps=5)
    assert simulated(Fake(), steps=5)[0] != simulated(Fake(), rank=1, steps=5)[0]


def test_needs_no_torch_and_has_the_given_memory() -> None:
    simulated(Fake(memory_mb=7), steps=1)
    assert Fake().plan(make_case()) == LaunchPlan(needs_torch=False)
