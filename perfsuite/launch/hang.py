"""Decide when a job that makes no step counts as hanging. Pure; imports nothing from perfsuite."""

HANG_S = 120
"""Minimum number of seconds without a step in a job that hangs. It is longer than a rank may take at its end,
when it waits `WAIT_S` for the others and then has `LEAVE_S` to exit (`perfsuite.worker.rank`)."""
# Multiples of the longest step that may pass without one, as in an evaluation or checkpoint.
LONGEST_STEPS = 20
# First steps that do not predict later ones, because libraries load and kernels are compiled.
WARM_UP_STEPS = 2
LONGEST_WARM_UPS = 3  # multiples of the longest of these that may pass, until a later step has been timed


class HangDetector:
    """Detects a hanging job: no sign of life for max(`hang_s`, `longest_steps` times the longest step)."""

    def __init__(
        self,
        *,
        hang_s: float = HANG_S,
        longest_steps: float = LONGEST_STEPS,
        longest_warm_ups: float = LONGEST_WARM_UPS,
    ) -> None:
        self._hang_s = hang_s
        self._longest_steps = longest_steps
        self._longest_warm_ups = longest_warm_ups
        self._longest_s = 0.0  # the longest time between two signs of life after the warm-up steps
        # pragma: no mutate 0.0: three times as long is less than `hang_s`
        self._longest_warm_up_s = 0.0  # the same from the beginning of training to the end of warm-up
        self._last: tuple[bool, int, int] | None = None  # the last new sign of life passed to `quiet_s`
        self._last_at = 0.0  # pragma: no mutate 0.0: the first sign of life sets it before it is read

    def quiet_s(
        self, now: float, *, is_training: bool, steps: int, reports: int, is_in_event: bool = False
    ) -> float | None:
        """Return for how many seconds the job has been quiet if that is a hang, otherwise None.

        `now` is a time in seconds; `steps` have ended so far, and `reports` of ranks are written. Before the
        first step nothing counts as a hang, because a model may take long to load and to compile. Nothing
        does while a rank is in an event, such as a checkpoint, or in a phase.
        """
        sign = (is_training, steps, reports)
        if sign != self._last:
            if self._last is not None:
                self._learn(now - self._last_at, self._last)
            self._last = sign
            self._last_at = now
        elif is_in_event:
            self._last_at = now
        quiet_s = now - self._last_at
        is_watched = steps > 0 or reports > 0
        return quiet_s if is_watched and quiet_s > self.allowed_s else None

    def _learn(self, seconds: float, since: tuple[bool, int, int]) -> None:
        was_training, steps, _ = since
        if steps >= WARM_UP_STEPS:
            self._longest_s = max(self._longest_s, seconds)
        elif was_training:
            self._longest_warm_up_s = max(self._longest_warm_up_s, seconds)

    @property
    def allowed_s(self) -> float:
        """The number of seconds that may pass without a sign of life."""
        # pragma: no mutate 0.0: three times as long is less than `hang_s`
        warm_up_s = 0.0 if self._longest_s else self._longest_warm_up_s
        of_steps = self._longest_steps * self._longest_s
        return max(self._hang_s, of_steps, self._longest_warm_ups * warm_up_s)
