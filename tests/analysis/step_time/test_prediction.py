from collections.abc import Callable
from itertools import pairwise

import pytest

from perfsuite.analysis.step_time.kernels import Device
from perfsuite.analysis.step_time.links import Links
from perfsuite.analysis.step_time.prediction import Replays, StepTime, by_host, step_time
from perfsuite.analysis.step_time.price import Group, with_bytes
from perfsuite.analysis.step_time.streams import HostTimes, MachineSpeeds
from perfsuite.errors import PredictionError
from perfsuite.results.device_log import Entry
from tests.analysis.step_time.steps import (
    DEVICE,
    MACHINE,
    PLAIN,
    gather,
    kernel,
    matmul,
    of_layers,
    prefetched,
)

LATENCY_S = 1e-3
ROUNDING = 1e-12


def test_the_parts_add_up() -> None:
    parts = step_time(prefetched(4, compute_s=1, gather_s=2), MACHINE)
    assert parts.memory_s == pytest.approx(4)
    assert parts.exposed_s == pytest.approx(9 - 4, abs=LATENCY_S), "first + 3 x max(1, 2) + last - kernels"
    assert parts.slowed_s == pytest.approx(0.15 * (8 - 5), abs=LATENCY_S), "15% of the 3 s that are hidden"
    assert (parts.matmul_s, parts.attention_s, parts.host_s) == (0, 0, 0)
    assert parts.total_s == pytest.approx(9 + 0.45, abs=LATENCY_S)


def test_a_slow_host_is_a_part() -> None:
    slow = MACHINE._replace(host=HostTimes(forward_s=3.0, launch_s=0.0))
    parts = step_time([kernel(1), matmul(1)], slow)
    assert parts.total_s == pytest.approx(6)
    assert parts.host_s == pytest.approx(4, abs=0.01)


def test_streams_that_compute_together_count_once() -> None:
    parts = step_time([kernel(1, stream=1), kernel(3)], MACHINE)
    assert parts.memory_s == parts.total_s == pytest.approx(3)


@pytest.mark.parametrize("compute_s", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("gather_s", [0.0, 0.5, 2.0])
def test_no_step_is_below_the_roofline(compute_s: float, gather_s: float) -> None:
    step: list[Entry] = [*prefetched(4, 0.1, gather_s), matmul(compute_s), gather(99, gather_s, stream=3)]
    assert step_time(step, MACHINE).total_s >= max(compute_s, 5 * gather_s)


def faster_device(times: float) -> MachineSpeeds:
    return MACHINE._replace(device=Device(times * 1e12, times * 1e11, PLAIN._replace(memory_gb_s=times)))


def faster_matmuls(times: float) -> MachineSpeeds:
    return MACHINE._replace(device=DEVICE._replace(peak_16bit=times * 1e12))


def faster_link(times: float) -> MachineSpeeds:
    return MACHINE._replace(links=Links(times * 1e9, 1e8, 8))


def faster_network(times: float) -> MachineSpeeds:
    return MACHINE._replace(links=Links(1e9, times * 1e8, 8))


def faster_host(times: float) -> MachineSpeeds:
    return MACHINE._replace(host=HostTimes(forward_s=1.0, event_s=0.3, launch_s=0.1, factor=1 / times))


@pytest.mark.parametrize("faster", [faster_device, faster_matmuls, faster_link, faster_network, faster_host])
@pytest.mark.parametrize(("compute_s", "gather_s"), [(1, 2), (2, 1), (0.1, 3), (3, 0.1)])
def test_more_bandwidth_never_costs_time(
    faster: Callable[[float], MachineSpeeds], compute_s: float, gather_s: float
) -> None:
    step = [*prefetched(4, compute_s, gather_s), matmul(1), gather(99, 3, stream=2, ranks=64), kernel(0.2)]
    times = [step_time(step, faster(times)).total_s for times in (0.1, 0.3, 0.9, 1, 1.1, 2, 5, 30)]
    assert all(later <= earlier * (1 + ROUNDING) for earlier, later in pairwise(times))
    assert times[0] > times[-1]


def test_time_is_linear_in_layers_if_the_gpu_sets_the_pace() -> None:
    of = {layers: step_time(prefetched(layers, 2, 1), MACHINE) for layers in (2, 4, 96)}
    assert of_layers(of[2], of[4], 2, 4, 96).total_s == pytest.approx(of[96].total_s, rel=1e-3)


def test_few_layers_do_not_tell_how_the_host_keeps_up() -> None:
    few = StepTime(1, 0, 0, 0, 0, host_s=0.001)
    more = StepTime(2, 0, 0, 0, 0, host_s=0.1)
    with pytest.raises(PredictionError, match="4 layers, the device waits for the host for 5% of a step"):
        of_layers(few, more, 2, 4, 32)


def test_a_slower_host_is_hidden_until_it_sets_the_pace() -> None:
    """The GPU needs 3 s, and the host 1 s for its kernel."""
    machine = MACHINE._replace(host=HostTimes(forward_s=1, launch_s=0))
    times = dict(by_host([kernel(3)], machine))
    assert times == pytest.approx({0: 3, 0.5: 3, 1: 3, 2: 3, 4: 4})
    assert times[1] == step_time([kernel(3)], machine).total_s


def test_steps_with_other_bytes_share_a_replay() -> None:
    step = prefetched(4, compute_s=1, gather_s=2)
    other = with_bytes(step, Group("all_gather", 8, 1), 0.25)
    replays = Replays(step)
    for machine in (MACHINE, MACHINE.with_device(2), MACHINE._replace(host=HostTimes(forward_s=3))):
        replays.total_s(machine)
        shared = Replays(other, same_calls=replays).total_s(machine)
        assert shared == Replays(other).total_s(machine)
        assert shared < replays.total_s(machine)


def test_a_machine_is_replayed_again_only_if_it_differs() -> None:
    replays = Replays([*prefetched(4, compute_s=1, gather_s=2), matmul(1)])
    first = replays.total_s(MACHINE)
    assert replays.total_s(faster_device(0.5)) > first
    assert replays.total_s(faster_link(0.5)) > first
    assert replays.total_s(faster_host(0.1)) > first
    assert replays.total_s(MACHINE) == first
    assert replays.durations(MACHINE) is replays.durations(MACHINE)
