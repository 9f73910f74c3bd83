import gc

from perfsuite.worker.clock.collector import CollectorClock
from perfsuite.worker.clock.timers import SimulatedTimer


def test_times_collections_until_stopped() -> None:
    timer = SimulatedTimer()
    clock = CollectorClock(timer.host)

    def takes_time(phase: str, info: object) -> None:
        if phase == "start":
            timer.sleep(3)

    before = [*gc.callbacks]
    clock.start()
    gc.callbacks.append(takes_time)
    try:
        gc.collect(0)
        gc.collect(0)
        assert clock.seconds == 6
        clock.stop()
        clock.stop()
        gc.collect(0)
    finally:
        gc.callbacks.remove(takes_time)
    assert clock.seconds == 6
    assert gc.callbacks == before


def test_an_error_of_the_clock_is_kept() -> None:
    def fails() -> float:
        raise LookupError("no clock")

    clock = CollectorClock(fails)
    clock.start()
    gc.collect(0)
    clock.stop()
    assert isinstance(clock.error, LookupError)
