"""Report a long event or phase to the driver, so that it is not mistaken for a hang. Imports no torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

TOLD_AFTER_S = 5.0  # seconds after which a span is reported. Most spans are shorter and need no file
LOOKS_EVERY_S = 1.0


class Running:
    """Writes the name of a long-running span into a file, and removes the file when the span ends.

    When the first span begins, a separate thread is started for this, so that the training does not wait for
    a slow file system. `name_of` gets a number of seconds, and returns the name of a span that has run for at
    least that time, or None if there is none.
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
        self._reported: str | None = None
        self._is_over = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread. Later calls have no effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_on, daemon=True, name="perfsuite-spans")
            self._thread.start()

    def stop(self) -> None:
        """Let the thread remove the file and end. Do not wait for it, because the file system can be slow."""
        self._is_over = True

    def look(self) -> None:
        """Write or remove the file if the name to report has changed."""
        with self._lock, contextlib.suppress(OSError):  # if the disk is full, writing the report will show it
            name = None if self._is_over else self._name_of(self._after_s)
            if name == self._reported:
                return
            if name is None:
                self._file.unlink(missing_ok=True)
            else:
                self._file.write_text(name)
            self._reported = name

    def ended(self) -> None:
        """Remove the file of a span that has ended: the process might end before the thread removes it."""
        if self._reported is not None:
            self.look()

    def _look_on(self) -> None:
        while not self._is_over:
            self._sleep(min(LOOKS_EVERY_S, self._after_s))
            self.look()
        self.look()  # `stop` can be called after the last look
