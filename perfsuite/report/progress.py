"""Show the progress of a session: a live line on a terminal, plain lines in a log. Runs in the driver."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from perfsuite.case.case import Unit
from perfsuite.report.text import plural
from perfsuite.results.amounts import rate

ID_WIDTH = 30
WAITING_EVERY_S = 30  # seconds between two lines about a wait if there is no live line


def silent(text: str | None) -> None:
    """Show nothing."""


@dataclass
class Progress:
    """The progress of a session of `cases` cases. `line` prints a permanent line, `live` sets the live line.

    `live(None)` clears the live line. If there is no live line (`is_live` is False), a permanent line
    announces each launch. `rich.progress` is not used, because it cannot bypass pytest's capture.
    """

    line: Callable[[str], None]
    live: Callable[[str | None], None] = silent
    cases: int = 0
    is_live: bool = False
    clock: Callable[[], float] = time.monotonic
    _number: int = 0
    _finished_s: list[float] = field(default_factory=list)
    _case_began: float = 0
    _began: float = 0
    _silent_since: float | None = None
    _first: tuple[float, int] | None = None

    def begin(self, case_id: str, total_steps: int, launch: int, unit: Unit = "tokens") -> None:
        """Announce launch number `launch` of a case, whose speed is in `unit` per second."""
        self._began = self.clock()
        self._first = None
        if launch == 1:
            self._number += 1
            self._case_began = self._began
        self._case_id = case_id
        self._total = total_steps
        self._launch = launch
        self._unit = unit
        if not self.is_live:
            self.say(f"{self._where()} begins")

    def step(self, step: int, tokens_per_step: int) -> None:
        """Show that rank 0 has finished `step` steps, or that it is still starting if `step` is 0."""
        if not self.is_live:
            return
        now = self.clock()
        if step == 0:
            self.live(f"{self._where()} starting for {now - self._began:.0f} s{self._time_left()}")
            return
        if self._first is None:
            self._first = (now, step)
        since = now - self._first[0]
        done = step - self._first[1]
        line = f"{self._where()} step {step} of {self._total}"
        if done and since > 0:
            left = f"{(self._total - step) * since / done:.0f} s left{self._time_left()}"
            line += f", {rate(done * tokens_per_step / since)} {self._unit}/s, {left}"
        self.live(line)

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self.waiting(None)
        self.line(f"perfsuite: {text}")

    def waiting(self, text: str | None) -> None:
        """Show the reason for a wait; None clears it. Without a live line, print the reason at intervals."""
        if self.is_live:
            self.live(text)
        elif text is None or self._silent_since is None:
            self._silent_since = None if text is None else self.clock()
        elif self.clock() - self._silent_since >= WAITING_EVERY_S:
            self.say(text)

    def end(self, outcome: str, *, is_same_work: bool = False) -> None:
        """Print the outcome of the case, whether its counts changed, and an estimate of the time left."""
        spent = self.clock() - self._case_began
        self._finished_s.append(spent)
        launches = f"after {self._launch} launches " if self._launch > 1 else ""
        which = f"[{self._number}/{self.cases}] {self._case_id}"
        work = ", same work as before" if is_same_work else ""
        self.say(f"{which} {outcome} {launches}in {spent:.1f} s{work}{self._time_left()}")

    def _where(self) -> str:
        """Return the number and the id of the case. On the live line, long ids are cut to leave room."""
        launch = f" launch {self._launch}" if self._launch > 1 else ""
        name = self._case_id if len(self._case_id) <= ID_WIDTH else self._case_id[: ID_WIDTH - 1] + "…"
        return f"[{self._number}/{self.cases}] {name if self.is_live else self._case_id}{launch}"

    def _time_left(self) -> str:
        left = self.cases - self._number
        if not self._finished_s or left <= 0:
            return ""
        seconds = left * sum(self._finished_s) / len(self._finished_s)
        shown = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        return f"; about {shown} for {plural(left, 'more case')}"
