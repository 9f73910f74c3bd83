"""When a job that makes no step counts as hanging."""

from __future__ import annotations

STALL_S = 120
"""Without a step, at the least, in a job that hangs. More than a rank may take at its end: it waits
`worker.WAIT_S` for the others, then has `worker.LEAVE_S` to leave in."""


STALL_STEPS = 20
"""Or so many times the longest step before: room for an evaluation or a checkpoint between steps."""


STALL_AFTER = 2
"""Steps that are no measure of the others: libraries load and kernels are compiled in them."""


STALL_EARLY = 3
"""Or so many times the longer of those, until a later step has shown how long one takes."""


class Stall:
    """Tells a job that hangs by the absence of steps, and of rank reports at its end."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        """Seconds between two signs of life since step `STALL_AFTER` had ended."""
        self._early_s = 0.0
        """The same before that, since training began."""
        self._last: tuple[bool, int, int] | None = None
        self._at = 0.0

    def after(self, now: float, *, is_training: bool, steps: int, reports: int) -> float | None:
        """How many seconds it has stood still, if that is a hang. Before the first step nothing is."""
        sign = (is_training, steps, reports)
        if sign != self._last:
            if self._last is not None and self._last[1] >= STALL_AFTER:
                self.longest_s = max(self.longest_s, now - self._at)
            elif self._last is not None and self._last[0]:
                self._early_s = max(self._early_s, now - self._at)
            self._last, self._at = sign, now
        quiet_s = now - self._at
        is_watched = steps > 0 or reports > 0
        return quiet_s if is_watched and quiet_s > self.allowed_s else None

    @property
    def allowed_s(self) -> float:
        """Seconds that may pass without a sign of life."""
        early_s = 0.0 if self.longest_s else self._early_s
        return max(STALL_S, STALL_STEPS * self.longest_s, STALL_EARLY * early_s)
