from typing import Any

import pytest
import torch

from perfsuite.dry.streams import stand_ins
from perfsuite.results.device_log import DeviceLog, HostWait, RecordEvent, StreamWait

OF_OTHER_PROCESSES = {"from_ipc_handle", "ipc_handle"}


@pytest.fixture
def cuda(log: DeviceLog) -> dict[str, Any]:
    """Return the replacements for names in torch.cuda."""
    return stand_ins(log)


@pytest.mark.parametrize("name", ["Stream", "Event"])
def test_stand_ins_have_every_public_attribute(cuda: dict[str, Any], name: str) -> None:
    """Libraries can read any of them. Events of other processes cannot be simulated."""
    real = getattr(torch.cuda, name)
    names = {attribute for attribute in dir(real) if not attribute.startswith("_")}
    ours = cuda[name]()
    assert {attribute for attribute in names if not hasattr(ours, attribute)} - OF_OTHER_PROCESSES == set()


def test_a_stand_in_has_every_attribute_of_torch_stream(cuda: dict[str, Any]) -> None:
    names = {attribute for attribute in dir(torch.Stream) if not attribute.startswith("_")}
    assert {attribute for attribute in names if not hasattr(cuda["Stream"](), attribute)} == set()


def test_entered_stream_is_current(log: DeviceLog, cuda: dict[str, Any]) -> None:
    first, second = cuda["Stream"](), cuda["Stream"](priority=-1)
    assert cuda["current_stream"]() == cuda["default_stream"]()
    with cuda["stream"](first):
        assert cuda["current_stream"](0) == first
        with second:
            assert (cuda["current_stream"](), log.stream) == (second, 2)
        with cuda["stream"](first), cuda["stream"](None):
            assert log.stream == 1
        assert log.stream == 1
    assert log.stream == 0


def test_a_stream_that_is_set_stays_current(log: DeviceLog, cuda: dict[str, Any]) -> None:
    stream = cuda["Stream"]()
    cuda["set_stream"](stream)
    cuda["set_stream"](None)
    assert log.stream == stream.number == stream.cuda_stream == 1


def test_streams_of_one_number_are_equal(cuda: dict[str, Any]) -> None:
    stream = cuda["Stream"]()
    with stream:
        assert {stream, cuda["current_stream"]()} == {stream}
    assert stream != cuda["default_stream"]()
    assert stream != 1


def test_events_are_logged_where_they_are_recorded(log: DeviceLog, cuda: dict[str, Any]) -> None:
    stream = cuda["Stream"]()
    event = cuda["Event"](enable_timing=True)
    assert event.record() is event
    stream.record_event(event)
    stream.record_event()
    event.record(stream)
    assert log.entries == [RecordEvent(1, 0), RecordEvent(2, 1), RecordEvent(3, 1), RecordEvent(4, 1)]


def test_waits_name_the_last_record(log: DeviceLog, cuda: dict[str, Any]) -> None:
    stream = cuda["Stream"]()
    event = cuda["Event"]()
    event.wait()
    stream.wait_event(event)
    event.synchronize()
    assert log.entries == [], "an event that was never recorded"
    event.record()
    stream.wait_event(event)
    event.wait()
    event.wait(stream)
    event.synchronize()
    assert log.entries[1:] == [StreamWait(1, 1), StreamWait(0, 1), StreamWait(1, 1), HostWait(1)]


def test_waiting_for_a_stream_records_an_event(log: DeviceLog, cuda: dict[str, Any]) -> None:
    first, second = cuda["Stream"](), cuda["Stream"]()
    first.wait_stream(second)
    second.synchronize()
    cuda["synchronize"](0)
    waits = [RecordEvent(1, 2), StreamWait(1, 1), RecordEvent(2, 2), HostWait(2), HostWait(None)]
    assert log.entries == waits


def test_work_on_a_stream_takes_no_time(cuda: dict[str, Any]) -> None:
    stream, event = cuda["Stream"](), cuda["Event"]()
    assert stream.query()
    assert not stream.is_capturing()
    assert event.query()
    assert event.elapsed_time(cuda["Event"]()) == 0
