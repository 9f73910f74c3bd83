"""The cost of a changed count: its predicted effect on the time of a step."""

from perfsuite.documents import Data
from perfsuite.results.amounts import duration


class Cost(Data):
    """The predicted effect of a changed count on the time of a step, as a range. A saving is negative."""

    least_s: float | None = None  # None: unknown
    most_s: float | None = None
    step_s: float | None = None  # the predicted time of the step with the larger count
    # Rate of one device's link, in bytes/s, above which the step does not wait for the additional bytes.
    # Kernels can still be slower while the bytes are sent.
    hidden_above: float | None = None
    why_naive: str | None = None
    """Why `most_s` is only the time that the work takes by itself. None: the cost was computed from replays
    of the step with and without the change."""

    def in_words(self, unit: str) -> str:
        """Return the cost as the end of a sentence about a change in `unit`."""
        if self.why_naive is not None:
            return self._naive_words(unit, self.why_naive)
        hidden = ""
        if self.hidden_above is not None:
            rate = f"{self.hidden_above / 1e9:.2g} GB/s"
            hidden = f"the step waits for these bytes only if the link of each GPU is slower than {rate}"
        if self.least_s is None or self.most_s is None or self.step_s is None:
            but = f", but {hidden}" if hidden else ""
            return f"; predicted cost: unknown, because the speed of the network is unknown{but}"
        largest = max(abs(self.least_s), abs(self.most_s)) / self.step_s
        is_saving = self.most_s <= 0 and self.least_s < 0
        kind = "saving" if is_saving else "cost"
        ends = (-self.most_s, -self.least_s) if is_saving else (self.least_s, self.most_s)
        also = f"; {hidden}" if hidden else ""
        return (
            f"; predicted {kind}: {duration(ends[0])} to {duration(ends[1])} of a step of "
            f"{duration(self.step_s)} (at most {largest:.1%}){also}"
        )

    def _naive_words(self, unit: str, why: str) -> str:
        if self.most_s is None:
            return f"; it is unknown how long the step waits for this work: {why}"
        alone = duration(abs(self.most_s))
        of_unit = {
            "bytes": f"sending these bytes takes {alone}",
            "FLOP": f"computing these FLOPs takes at least {alone}",
        }
        work = of_unit.get(unit, f"this work takes {alone} by itself")
        return f"; {work}, but it is unknown how long the step waits for this: {why}"
