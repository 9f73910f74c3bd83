"""Decide from the signs of life of a job whether it hangs. Pure; imports nothing from perfsuite."""

HANG_S = 120
"""A job counts as hanging only after this many seconds without a step. A rank that has finished training does
not reach this limit: it waits up to `WAIT_S` for the other ranks, and then has `LEAVE_S` to exit
(`perfsuite.worker.rank`)."""
# The maximum time without a step, as a multiple of the job's longest step. An evaluation or a checkpoint can
# take the time of many steps.
LONGEST_STEPS = 20
# The first steps do not predict later ones, because they load libraries and compile kernels.
WARM_UP_STEPS = 2
# The limit while only warm-up steps have been timed, as a multiple of the longest warm-up step.
LONGEST_WARM_UPS = 3


class HangDetector:
    """Detects a hanging job: one with no sign of life for a long time.

    A long time is `hang_s` seconds or `longest_steps` times the longest step, whichever is longer. A sign of
    life is the start of training, a step, or the report of a rank.
    """

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
        # pragma: no mutate 0.0: three times the mutated value (1 s) is still less than `hang_s`
        self._longest_warm_up_s = 0.0  # the longest time between two signs of life during warm-up
        self._last: tuple[bool, int, int] | None = None  # the last sign of life passed to `quiet_s`
        self._last_at = 0.0  # pragma: no mutate 0.0: the first sign of life sets it before it is read

    def quiet_s(
        self, now: float, *, is_training: bool, steps: int, reports: int, is_in_event: bool = False
    ) -> float | None:
        """Return the number of seconds without a sign of life if the job hangs, and None if it does not.

        `now` is the time in seconds. `steps` is the number of steps so far, and `reports` is the number of
        ranks that have reported. Before the first step, a job never counts as hanging, because models can
        take long to load and compile. A job also does not count as hanging while a rank is in an event, such
        as a checkpoint, or in a phase: a function or block of a script that the case or the script has named.
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
        """Maximum number of seconds without a sign of life."""
        # pragma: no mutate 0.0: three times the mutated value (1 s) is still less than `hang_s`
        warm_up_s = 0.0 if self._longest_s else self._longest_warm_up_s
        of_steps = self._longest_steps * self._longest_s
        return max(self._hang_s, of_steps, self._longest_warm_ups * warm_up_s)
