from perfsuite.results.device_log import (
    Allocate,
    DeviceLog,
    EndOfStep,
    Entry,
    Free,
    HostWait,
    RecordEvent,
    peak_of_live,
)


def test_closed_log_ignores_entries() -> None:
    log = DeviceLog()
    log.add(Allocate(0, 8, 0))
    log.close()
    log.add(Free(0))
    assert log.entries == [Allocate(0, 8, 0)]


def test_numbers_streams_and_events_from_one() -> None:
    log = DeviceLog()
    assert [log.new_stream(), log.new_stream()] == [1, 2]
    assert [log.record_event(2), log.record_event(0)] == [1, 2]
    assert log.entries == [RecordEvent(1, 2), RecordEvent(2, 0)]


def test_a_read_waits_for_the_current_stream() -> None:
    log = DeviceLog()
    log.stream = 3
    log.read_on_host()
    assert log.entries == [RecordEvent(1, 3), HostWait(1)]


def test_peak_of_live_bytes_begins_after_the_first_step() -> None:
    first: list[Entry] = [Allocate(0, 10, 0), Allocate(1, 90, 1), Free(1), EndOfStep(1)]
    assert peak_of_live(first) == 10
    assert peak_of_live([*first, Allocate(2, 5, 0), Free(0), Allocate(3, 7, 0), EndOfStep(2)]) == 15
    assert peak_of_live([*first, Allocate(0, 30, 0)]) == 30, "a storage that was resized counts only once"
    assert peak_of_live([]) == 0
