import pytest

from perfsuite.analysis.step_time.links import BEGIN_INSIDE_S, HOP_INSIDE_S
from perfsuite.analysis.step_time.prediction import Replays
from perfsuite.analysis.step_time.price import (
    Group,
    kernels_alone_s,
    price,
    price_of_calls,
    price_of_kernels,
    price_of_waits,
    with_bytes,
)
from perfsuite.analysis.step_time.streams import HostTimes
from perfsuite.errors import PredictionError
from perfsuite.results.counts import Phase
from perfsuite.results.device_log import Communicate, Entry, HostWait, RecordEvent, StreamWait
from tests.analysis.step_time.steps import MACHINE, gather, kernel, matmul, prefetched

GATHER = Group("all_gather", 8, 1)
BETWEEN = Group("all_gather", 64, 1)
LATENCY_S = 1e-3
FORWARD: tuple[Phase, ...] = ("forward",)
BACKWARD: tuple[Phase, ...] = ("backward",)
BOTH = FORWARD + BACKWARD
RELATIVE = 0.05  # precision of the rate that hides bytes
UNKNOWN = MACHINE._replace(links=MACHINE.links._replace(between=None))


def in_turn(seconds: float) -> list[Entry]:
    """Return a step in which the kernel waits for the collective."""
    return [gather(1, seconds, stream=0), kernel(2)]


def test_exposed_bytes_cost_what_they_take() -> None:
    its = price(Replays(in_turn(1)), GATHER, 0.5, MACHINE)
    assert its.least_s == pytest.approx(0.5 / 1.25, abs=LATENCY_S)
    assert its.most_s == pytest.approx(0.5 / 0.5, abs=LATENCY_S)
    assert its.step_s == pytest.approx(3, abs=LATENCY_S)


def test_hidden_bytes_cost_only_what_slows_kernels() -> None:
    step: list[Entry] = [gather(1, 0.4, stream=1), kernel(2)]
    its = price(Replays(step), GATHER, 0.5, MACHINE)
    assert its.least_s == pytest.approx(0.15 * 0.2 / 1.25, abs=LATENCY_S)
    assert its.most_s == pytest.approx(0.15 * 0.2 / 0.5, abs=LATENCY_S)


def test_bytes_are_hidden_above_a_rate() -> None:
    """Sending 1 GB during 2 s of kernels costs no time if the link is faster than 0.5 GB/s."""
    step: list[Entry] = [gather(1, 1, stream=1), kernel(2)]
    its = price(Replays(step), GATHER, 0.0, MACHINE)
    assert its.hidden_above == pytest.approx(0.5e9, rel=RELATIVE)


def test_bytes_that_a_stream_waits_for_are_hidden_nowhere_near() -> None:
    its = price(Replays(prefetched(4, 1, 0.5)), GATHER, 0.5, MACHINE)
    assert its.hidden_above is not None
    assert its.hidden_above > 30e9, (
        "only above that rate do the first layer's bytes take less than 0.1% of the step"
    )


def test_bytes_that_every_link_exposes_have_no_rate() -> None:
    """Even at the fastest rate, these bytes take 4 ms of a step of 5 ms."""
    step: list[Entry] = [gather(1, 4e3, stream=0), kernel(1e-3)]
    assert price(Replays(step), GATHER, 0.0, MACHINE).hidden_above is None


def test_calls_that_the_other_side_does_not_make_are_left_out() -> None:
    assert with_bytes(in_turn(1), GATHER, 0.0) == [kernel(2)]
    other = with_bytes([*in_turn(1), RecordEvent(1, 0)], GATHER, 0.5)
    (call,) = (entry for entry in other if isinstance(entry, Communicate))
    assert call.bytes == pytest.approx(4e9 / 7, abs=1)
    assert with_bytes(in_turn(1), BETWEEN, 0.0) == in_turn(1)


def test_an_unknown_link_has_only_the_rate_that_hides() -> None:
    step: list[Entry] = [gather(1, 1, stream=1, ranks=64), kernel(2)]
    its = price(Replays(step), BETWEEN, 0.0, UNKNOWN)
    assert (its.least_s, its.most_s, its.step_s) == (None, None, None)
    assert its.hidden_above == pytest.approx(0.5e9 / 8, rel=RELATIVE), "eight devices share the network"


def test_another_unknown_link_gets_no_number() -> None:
    step = [gather(1, 1, stream=1, ranks=64), *in_turn(1)]
    with pytest.raises(PredictionError, match="network between machines"):
        price(Replays(step), GATHER, 0.5, UNKNOWN)


def test_calls_cost_the_time_to_begin_them() -> None:
    """The step makes four calls instead of two, so it pays the time to begin two unnecessary calls."""
    step: list[Entry] = [*(gather(number, 1, stream=0) for number in range(4)), kernel(2)]
    its = price_of_calls(Replays(step), GATHER, 2, MACHINE)
    one_s = BEGIN_INSIDE_S + 7 * HOP_INSIDE_S
    assert its.least_s == pytest.approx(2 * one_s, rel=0.01)
    assert its.most_s == pytest.approx(2 * one_s, rel=0.01)
    assert its.step_s == pytest.approx(6, abs=LATENCY_S)


def test_the_range_covers_both_places_of_a_merged_call() -> None:
    """A merged call in place of the first call is hidden by the kernel. In place of the last, it is not."""
    first, last = (gather(number, 1, stream=1) for number in (1, 2))
    step: list[Entry] = [first, RecordEvent(1, 0), kernel(2), RecordEvent(2, 0), StreamWait(1, 2), last]
    step += [RecordEvent(3, 1), StreamWait(0, 3)]
    its = price_of_calls(Replays(step), GATHER, 1, MACHINE)
    assert its.least_s is not None
    assert its.least_s < -0.7, "the merged call takes 2 s after the kernel"
    assert its.most_s is not None
    assert its.most_s > 0.7, "the kernel hides the merged call"


@pytest.mark.parametrize("fewer", [0, 4, 5])
def test_calls_that_the_log_lacks_get_no_number(fewer: int) -> None:
    step: list[Entry] = [*(gather(number, 1, stream=0) for number in range(4)), kernel(2)]
    with pytest.raises(PredictionError, match=f"makes {fewer} calls, but must make .* the 4 calls"):
        price_of_calls(Replays(step), GATHER, fewer, MACHINE)


WAIT: list[Entry] = [RecordEvent(1, 0), HostWait(1)]
WITH_HOST = MACHINE._replace(host=HostTimes(forward_s=1, launch_s=0, event_s=0, read_s=0))


def test_a_wait_costs_what_the_host_was_ahead() -> None:
    """Each of two kernels takes the GPU 3 s and the host 1 s.

    After the wait, the GPU is idle until the host has given it the next kernel.
    """
    step: list[Entry] = [kernel(3), kernel(3), *WAIT]
    its = price_of_waits(Replays(step), 1, WITH_HOST)
    assert its.step_s == pytest.approx(7)
    assert its.least_s == pytest.approx(0.5)
    assert its.most_s == pytest.approx(2)


def test_a_wait_costs_nothing_if_the_host_sets_the_pace() -> None:
    step: list[Entry] = [kernel(0.1), kernel(0.1), *WAIT]
    its = price_of_waits(Replays(step), 1, WITH_HOST)
    assert its.most_s == pytest.approx(0.125), "the slow GPU has its last kernel left when the host is done"
    assert its.least_s == pytest.approx(0.08)


def test_the_range_covers_all_places_of_a_wait() -> None:
    """Without the first wait, the GPU gets its second kernel earlier. The last wait has no effect."""
    step: list[Entry] = [kernel(9), *WAIT, kernel(1), *WAIT, *WAIT]
    its = price_of_waits(Replays(step), 1, WITH_HOST)
    assert its.least_s == pytest.approx(0)
    assert its.most_s == pytest.approx(2)
    every = price_of_waits(Replays(step), 3, WITH_HOST)
    assert every.most_s is not None
    assert every.most_s > 2


def test_waits_that_the_log_lacks_get_no_number() -> None:
    with pytest.raises(PredictionError, match="waited for the GPU more often than the log"):
        price_of_waits(Replays([kernel(1), *WAIT]), 2, MACHINE)


def test_additional_kernels_cost_their_time() -> None:
    before: list[Entry] = [kernel(1)]
    now: list[Entry] = [kernel(1), kernel(2), kernel(1)]
    its = price_of_kernels(Replays(before), Replays(now), FORWARD, MACHINE, with_flops=False)
    assert its.least_s == pytest.approx(0.8 * 3)
    assert its.most_s == pytest.approx(1.25 * 3)
    assert its.step_s == pytest.approx(4)
    fewer = price_of_kernels(Replays(now), Replays(before), FORWARD, MACHINE, with_flops=False)
    assert fewer.least_s == pytest.approx(-1.25 * 3)


def test_replaced_kernels_cost_the_difference() -> None:
    its = price_of_kernels(Replays([kernel(1)]), Replays([kernel(3)]), FORWARD, MACHINE, with_flops=False)
    assert its.most_s == pytest.approx(1.25 * 2)


def test_kernels_of_another_phase_or_without_flops_are_left_out() -> None:
    now: list[Entry] = [kernel(1), matmul(2), kernel(4)._replace(phase="backward")]
    products = price_of_kernels(Replays([kernel(1)]), Replays(now), FORWARD, MACHINE, with_flops=True)
    assert products.most_s == pytest.approx(1.25 * 2, rel=0.01)
    backward = price_of_kernels(Replays([kernel(1)]), Replays(now), BACKWARD, MACHINE, with_flops=False)
    assert backward.most_s == pytest.approx(1.25 * 4)
    of_both = price_of_kernels(Replays([kernel(1)]), Replays(now), BOTH, MACHINE, with_flops=False)
    assert of_both.most_s == pytest.approx(1.25 * (2 + 4), rel=0.01)


def test_changed_kernels_by_themselves_are_not_replayed() -> None:
    """In a replay, the other kernels would cost nothing, because the kernel of 9 s hides them."""
    before: list[Entry] = [kernel(9, stream=1), kernel(3)]
    now: list[Entry] = [kernel(9, stream=1), kernel(1), kernel(2), kernel(4)._replace(phase="backward")]
    assert kernels_alone_s(before, now, FORWARD, MACHINE) == pytest.approx(1 + 2 - 3)
    assert kernels_alone_s(before[:1], now, FORWARD, MACHINE) == pytest.approx(3)
    assert kernels_alone_s(now, before, BACKWARD, MACHINE) == pytest.approx(-4)


def test_kernels_that_only_changed_their_stream_cost_nothing() -> None:
    its = price_of_kernels(
        Replays([kernel(1)]), Replays([kernel(1, stream=3)]), FORWARD, MACHINE, with_flops=False
    )
    assert (its.least_s, its.most_s) == (0, 0)


def test_kernels_beside_others_are_hidden() -> None:
    """A second stream computes for 1 s while the first one does for 3 s."""
    its = price_of_kernels(
        Replays([kernel(3)]),
        Replays([kernel(3), kernel(1, stream=1)]),
        FORWARD,
        MACHINE,
        with_flops=False,
    )
    assert its.most_s == pytest.approx(0)
