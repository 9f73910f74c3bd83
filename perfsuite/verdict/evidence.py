"""Separate the launches (or pairs) that count as evidence from those with an unhealthy machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run

T = TypeVar("T")


@dataclass(frozen=True)
class Evidence(Generic[T]):
    """The healthy launches (or pairs of launches), and the problems of the others, which are set aside."""

    healthy: Sequence[T]
    set_aside: Mapping[int, Sequence[str]]  # problems of each launch or pair, by its number (from 1)

    @classmethod
    def of(cls, launches: Sequence[T], problems: Mapping[int, Sequence[str]]) -> "Evidence[T]":
        """Set aside the launches that have problems. `problems` has the problems by number of the launch."""
        set_aside = {number: why for number, why in problems.items() if why}
        healthy = [launch for number, launch in enumerate(launches, 1) if number not in set_aside]
        return cls(healthy, set_aside)

    def is_too_little(self, max_unhealthy: int, *, is_last: bool = False) -> bool:
        """Return whether too many launches are set aside: `max_unhealthy` or more, and at least half of all.

        After the last possible launch (`is_last`), also return True if no launch is healthy.
        """
        if is_last and not self.healthy:
            return True
        return len(self.set_aside) >= max(max_unhealthy, len(self.healthy))

    def named_in(self, verdict: Verdict, unit: str) -> Verdict:
        """Return the verdict with the launches (or pairs) that were set aside, and the reasons."""
        why = [
            f"{unit} {number} set aside: {'; '.join(reasons)}" for number, reasons in self.set_aside.items()
        ]
        return verdict.replace(unhealthy_launches=tuple(self.set_aside), reasons=(*verdict.reasons, *why))


def counted(runs: Sequence[Run]) -> list[Run]:
    """Return the launches whose counts are evidence. A busy or slow machine does not change counts."""
    return [run for run in runs if run.failure is None and run.counts]
