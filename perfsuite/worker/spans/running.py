"""Tells the driver in which event or phase a rank is, so that one that takes long is no hang. No torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

TOLD_AFTER_S = 5.0  # seconds in a span after which it is told: most are shorter, and cost no file
LOOKS_EVERY_S = 1.0


class Running:
    """Writes the name of the span in which a rank has been for long into a file, which is gone when it ends.

    A thread of its own looks at the spans, from the first one on: on a slow file system the training would
    wait. `name_of` returns the name of the span that has run for so many seconds; None if there is none.
    """

    def __init__(
        self,
        file: Path,
        name_of: Callable[[float], str | None],
        *,
        after_s: float = TOLD_AFTER_S,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._file = file
        self._name_of = name_of
        self._after_s = after_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._told: str | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Look from now on. Later calls change nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_on, daemon=True, name="perfsuite-spans")
            self._thread.start()

    def look(self) -> None:
        """Write or remove the file, if it is time to."""
        with self._lock, contextlib.suppress(OSError):  # a disk that is full: the report will say it
            name = self._name_of(self._after_s)
            if name == self._told:
                return
            if name is None:
                self._file.unlink(missing_ok=True)
            else:
                self._file.write_text(name)
            self._told = name

    def ended(self) -> None:
        """Remove the file of a span that has ended: the process may be about to."""
        if self._told is not None:
            self.look()

    def _look_on(self) -> None:
        while True:
            self._sleep(min(LOOKS_EVERY_S, self._after_s))
            self.look()
