import pytest

from perfsuite.analysis.step_time.links import Links, collective_s, is_inside, latency_s
from perfsuite.errors import PredictionError
from perfsuite.results.device_log import Communicate

LINKS = Links(inside=1e9, between=1e8, devices=8)
LATENCY_S = 1e-3  # more than the latency of any collective here


def call(kind: str, ranks: int, apart: int = 1, size: int = 8 * 10**9) -> Communicate:
    return Communicate(1, 0, "forward", kind, ranks, apart, size, is_async=False)


@pytest.mark.parametrize(
    ("kind", "ranks", "apart", "seconds"),
    [
        ("all_gather", 8, 1, 7),
        ("reduce_scatter", 8, 1, 7),
        ("all_to_all", 8, 1, 7),
        ("all_reduce", 8, 1, 14),
        ("broadcast", 8, 1, 8),
        ("send", 2, 1, 16),  # at half of the bus bandwidth
        ("barrier", 8, 1, 0),
        ("all_gather", 1, 1, 0),
        # Between machines, eight devices share a network of 0.8 GB/s. Each device has 0.1 GB/s of it.
        ("all_gather", 64, 1, 8 * 63 / 64 / 0.8),
        ("all_reduce", 8, 8, 14 / 0.1),
        ("all_gather", 32, 2, 8 * 31 / 32 / 0.4),
        ("send", 2, 8, 80),
        ("all_to_all", 64, 1, 8 * 56 / 64 / 0.1),
    ],
)
def test_bytes_over_bandwidth(kind: str, ranks: int, apart: int, seconds: float) -> None:
    assert collective_s(call(kind, ranks, apart), LINKS) == pytest.approx(seconds, abs=LATENCY_S)


def test_latency_grows_with_the_ranks_of_a_ring() -> None:
    times = [collective_s(call("all_gather", ranks, 1, 0), LINKS) for ranks in (2, 4, 8, 64, 512)]
    assert times == sorted(times)
    assert times[-1] < LATENCY_S


@pytest.mark.parametrize(("kind", "ranks"), [("all_gather", 8), ("all_reduce", 64), ("send", 2)])
def test_a_collective_without_bytes_takes_its_latency(kind: str, ranks: int) -> None:
    assert latency_s(kind, ranks, 1, LINKS.devices) == collective_s(call(kind, ranks, size=0), LINKS)


def test_machines_are_joined_no_faster_than_inside() -> None:
    fast = LINKS._replace(between=1e12)
    assert collective_s(call("all_gather", 64), fast) > 8 * 63 / 64


def test_an_unknown_network_gets_no_number() -> None:
    unknown = Links.of(1, None, 8)
    assert collective_s(call("all_gather", 8), unknown) > 0
    with pytest.raises(PredictionError, match="all_gather among 64 ranks uses the network between machines"):
        collective_s(call("all_gather", 64), unknown)


@pytest.mark.parametrize(
    ("interconnect", "gb_s"),
    [("8xib400", 40.0), ("eth100", 1.25), ("4xib200", 10.0), (None, None), ("ib", None)],
)
def test_reads_the_ports_of_a_machine(interconnect: str | None, gb_s: float | None) -> None:
    links = Links.of(225, interconnect, 8)
    assert links.inside == 225e9
    assert links.between == (None if gb_s is None else pytest.approx(1e9 * gb_s))


def test_a_group_within_a_machine_divides_it() -> None:
    assert [is_inside(ranks, apart, 8) for ranks, apart in ((8, 1), (2, 4), (1, 0))] == [True] * 3
    assert [is_inside(ranks, apart, 8) for ranks, apart in ((16, 1), (2, 8), (3, 1))] == [False] * 3
