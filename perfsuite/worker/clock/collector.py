"""Time Python's garbage collector. Imports no torch."""

import gc
from collections.abc import Callable
from typing import Any


class CollectorClock:
    """Adds up the seconds of all garbage collections between `start` and `stop`. `now` returns the time.

    Errors are stored in `error`, because an exception raised in the collector's callback cannot be caught.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = 0.0  # total time of the collections that have ended
        self.error: Exception | None = None  # the error that made the seconds unknown, if there was one
        self._now = now
        self._begun_at: float | None = None
        self._callback = self._see  # keep one bound method, so that `stop` finds it in the list

    def start(self) -> None:
        """Start timing collections."""
        gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """Stop timing collections."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _see(self, phase: str, info: Any) -> None:
        try:
            self._time(phase)
        except Exception as error:
            self.error = error

    def _time(self, phase: str) -> None:
        if phase == "start":
            self._begun_at = self._now()
        elif self._begun_at is not None:
            self.seconds += self._now() - self._begun_at
            self._begun_at = None
