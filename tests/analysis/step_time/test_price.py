import pytest

from perfsuite.analysis.step_time.price import Group, price, with_bytes
from perfsuite.errors import PredictionError
from perfsuite.results.device_log import Communicate, Entry, RecordEvent
from tests.analysis.step_time.steps import MACHINE, gather, kernel, prefetched

GATHER = Group("all_gather", 8, 1)
BETWEEN = Group("all_gather", 64, 1)
LATENCY_S = 1e-3
RELATIVE = 0.05  # precision of the rate that hides bytes
UNKNOWN = MACHINE._replace(links=MACHINE.links._replace(between=None))


def in_turn(seconds: float) -> list[Entry]:
    """Return a step in which the kernel waits for the collective."""
    return [gather(1, seconds, stream=0), kernel(2)]


def test_exposed_bytes_cost_what_they_take() -> None:
    its = price(in_turn(1), GATHER, 0.5, MACHINE)
    assert its.least_s == pytest.approx(0.5 / 1.25, abs=LATENCY_S)
    assert its.most_s == pytest.approx(0.5 / 0.5, abs=LATENCY_S)
    assert its.step_s == pytest.approx(3, abs=LATENCY_S)


def test_hidden_bytes_cost_only_what_slows_kernels() -> None:
    step: list[Entry] = [gather(1, 0.4, stream=1), kernel(2)]
    its = price(step, GATHER, 0.5, MACHINE)
    assert its.least_s == pytest.approx(0.15 * 0.2 / 1.25, abs=LATENCY_S)
    assert its.most_s == pytest.approx(0.15 * 0.2 / 0.5, abs=LATENCY_S)


def test_bytes_are_hidden_above_a_rate() -> None:
    """Sending 1 GB during 2 s of kernels costs no time if the link is faster than 0.5 GB/s."""
    step: list[Entry] = [gather(1, 1, stream=1), kernel(2)]
    its = price(step, GATHER, 0.0, MACHINE)
    assert its.hidden_above == pytest.approx(0.5e9, rel=RELATIVE)


def test_bytes_that_a_stream_waits_for_are_hidden_nowhere_near() -> None:
    its = price(prefetched(4, 1, 0.5), GATHER, 0.5, MACHINE)
    assert its.hidden_above is not None
    assert its.hidden_above > 30e9, (
        "only above that rate do the first layer's bytes take less than 0.1% of the step"
    )


def test_calls_that_the_other_side_does_not_make_are_left_out() -> None:
    assert with_bytes(in_turn(1), GATHER, 0.0) == [kernel(2)]
    other = with_bytes([*in_turn(1), RecordEvent(1, 0)], GATHER, 0.5)
    (call,) = (entry for entry in other if isinstance(entry, Communicate))
    assert call.bytes == pytest.approx(4e9 / 7, abs=1)
    assert with_bytes(in_turn(1), BETWEEN, 0.0) == in_turn(1)


def test_an_unknown_link_has_only_the_rate_that_hides() -> None:
    step: list[Entry] = [gather(1, 1, stream=1, ranks=64), kernel(2)]
    its = price(step, BETWEEN, 0.0, UNKNOWN)
    assert (its.least_s, its.most_s, its.step_s) == (None, None, None)
    assert its.hidden_above == pytest.approx(0.5e9 / 8, rel=RELATIVE), "eight devices share the network"


def test_another_unknown_link_gets_no_number() -> None:
    step = [gather(1, 1, stream=1, ranks=64), *in_turn(1)]
    with pytest.raises(PredictionError, match="network between machines"):
        price(step, GATHER, 0.5, UNKNOWN)
