from collections.abc import Sequence

import pytest

from perfsuite.analysis.step_time.streams import Durations, HostTimes, MachineSpeeds, period_s, reported_step
from perfsuite.errors import PredictionError
from perfsuite.results.device_log import (
    CollectiveWait,
    Communicate,
    EndOfStep,
    Entry,
    Free,
    HostCall,
    HostWait,
    RecordEvent,
    StreamWait,
)
from tests.analysis.step_time.steps import MACHINE, gather, kernel, prefetched

LATENCY_S = 1e-3


def seconds(step: Sequence[Entry], machine: MachineSpeeds = MACHINE) -> float:
    return period_s(step, Durations(step, machine), machine)


def test_one_stream_runs_its_kernels_in_turn() -> None:
    assert seconds([kernel(1), kernel(2)]) == pytest.approx(3)


def test_streams_run_side_by_side() -> None:
    assert seconds([kernel(1, stream=1), kernel(3)]) == pytest.approx(3)


def test_the_slower_of_independent_streams_sets_the_pace() -> None:
    late: list[Entry] = [kernel(1, stream=2), RecordEvent(1, 2), StreamWait(1, 1)]
    ahead: list[Entry] = [*late, kernel(2, stream=1), kernel(3), kernel(0.5, stream=3)]
    assert seconds(ahead) == pytest.approx(3)


def test_an_event_orders_streams() -> None:
    step: list[Entry] = [kernel(1, stream=1), RecordEvent(1, 1), StreamWait(0, 1), kernel(3)]
    both = [*step, RecordEvent(2, 0), StreamWait(1, 2)]
    assert seconds(both) == pytest.approx(4)


@pytest.mark.parametrize(("compute_s", "gather_s"), [(2, 1), (1, 2), (1, 1)])
def test_prefetched_layers_take_the_longer_of_both(compute_s: float, gather_s: float) -> None:
    first = gather_s
    last = compute_s
    expected = first + 3 * max(compute_s, gather_s) + last
    assert seconds(prefetched(4, compute_s, gather_s)) == pytest.approx(expected, abs=LATENCY_S)


def test_a_synchronous_collective_holds_its_stream() -> None:
    step: list[Entry] = [gather(1, 1, stream=0), kernel(2)]
    assert seconds(step) == pytest.approx(3, abs=LATENCY_S)


def test_an_asynchronous_one_holds_who_waits() -> None:
    call = gather(1, 3, stream=0)._replace(is_async=True)
    hidden: list[Entry] = [call, kernel(2), kernel(2), CollectiveWait(0, 1)]
    exposed: list[Entry] = [call, CollectiveWait(0, 1), kernel(2), kernel(2)]
    assert seconds(hidden) == pytest.approx(4, abs=LATENCY_S)
    assert seconds(exposed) == pytest.approx(7, abs=LATENCY_S)


def test_collectives_share_their_link() -> None:
    same: list[Entry] = [gather(1, 1, stream=1), gather(2, 1, stream=2)]
    between = Communicate(2, 2, "forward", "all_gather", 64, 1, 8 * 10**8, is_async=False)
    assert seconds(same) == pytest.approx(2, abs=LATENCY_S)
    assert seconds([same[0], between]) == pytest.approx(1, abs=0.02), "the second uses another link"


def test_a_slow_host_sets_the_pace() -> None:
    host = HostTimes(forward_s=2.0, launch_s=0.0)
    assert seconds([kernel(1), kernel(1)], MACHINE._replace(host=host)) == pytest.approx(4)
    half = host._replace(factor=0.25)
    assert seconds([kernel(1), kernel(1)], MACHINE._replace(host=half)) == pytest.approx(2)


def test_every_entry_has_its_price_on_the_host() -> None:
    host = HostTimes(
        forward_s=1, backward_s=2, optimizer_s=4, tensor_s=0, view_s=8, host_operator_s=16,
        wrapper_s=32, collective_s=64, event_s=128, launch_s=0, read_s=0,
    )  # fmt: skip
    entries: list[Entry] = [
        kernel(0),
        kernel(0)._replace(phase="backward"),
        kernel(0)._replace(phase="optimizer"),
        *(HostCall("view"), HostCall("host"), HostCall("wrapper")),
        gather(1, 0),
        StreamWait(0, 1),
        *(RecordEvent(1, 0), Free(1), HostWait(None)),
    ]
    assert [host.call_s(entry) for entry in entries] == [1, 2, 4, 8, 16, 32, 64, 128, 128, 0, 0]
    assert host._replace(factor=2.0).call_s(entries[0]) == 2


def test_the_host_also_takes_time_between_kernels_and_at_the_end() -> None:
    machine = MACHINE._replace(host=HostTimes(forward_s=1.0, view_s=2.0, launch_s=0.0))
    view = HostCall("view")
    assert seconds([view, kernel(1), view, Free(1), view, kernel(1)], machine) == pytest.approx(8)
    assert seconds([kernel(1), kernel(1), view, view, Free(1)], machine) == pytest.approx(6)


def test_a_read_holds_the_host_until_the_device_is_done() -> None:
    host = HostTimes(forward_s=1.0, launch_s=0.0, read_s=0.0)
    machine = MACHINE._replace(host=host)
    work: list[Entry] = [kernel(3), kernel(3)]
    assert seconds(work, machine) == pytest.approx(6)
    assert seconds([*work, RecordEvent(1, 0), HostWait(1)], machine) == pytest.approx(7)
    assert seconds([*work, HostWait(None)], machine) == pytest.approx(7)


def whole(step: Sequence[Entry]) -> list[Entry]:
    return [kernel(1), EndOfStep(3), *step, EndOfStep(4)]


def test_the_fourth_step_is_reported() -> None:
    step: list[Entry] = [kernel(2), HostWait(None)]
    assert reported_step(whole(step)) == step


@pytest.mark.parametrize(
    ("entries", "missing"),
    [
        ([], "end of step 3"),
        (whole([kernel(1)])[:-1], "end of step 4"),
        (whole([kernel(1), StreamWait(0, 7)]), "event 7 is awaited but not recorded"),
        (whole([kernel(1), HostWait(7)]), "event 7 is awaited but not recorded"),
        (whole([kernel(1), CollectiveWait(0, 7)]), "collective 7 is awaited but not begun"),
    ],
)
def test_a_truncated_log_gets_no_number(entries: list[Entry], missing: str) -> None:
    with pytest.raises(PredictionError, match=rf"cut short: .*{missing}\. Repeat the dry run of the case"):
        reported_step(entries)


def test_a_log_of_a_cpu_gets_no_number() -> None:
    with pytest.raises(PredictionError, match="has no kernels"):
        reported_step(whole([HostCall("host")]))
