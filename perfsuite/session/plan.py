"""Choose and order the cases of a session that does not have time for all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from math import ceil
from pathlib import Path
from statistics import median
from time import monotonic

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.results.outcome import UNJUDGED, Outcome
from perfsuite.results.session_file import SessionFile

SESSIONS_READ = 100  # maximum number of sessions to read, the newest of the store


@dataclass(frozen=True, kw_only=True)
class Past:
    """The last measurement of a case."""

    started_at: str  # ISO 8601, with time zone
    outcome: Outcome
    seconds: float  # total duration of all launches

    @property
    def is_open(self) -> bool:
        """Whether the case failed or was not decided."""
        return self.outcome in ("failed", "regressed", *UNJUDGED)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case and its expected cost."""

    case: Case
    past: Past | None
    # Last duration of the case or, if unknown, the median of measured cases with the same world size.
    seconds: float | None

    @property
    def gpu_hours(self) -> float | None:
        """Expected GPU hours of the case: 0 on CPUs, and None if its duration is unknown."""
        if self.seconds is None:
            return None
        devices = 0 if self.case.hardware == ("cpu",) else self.case.topology.world_size
        return self.seconds * devices / 3600


def past_of(files: Sequence[Path]) -> dict[str, Past]:
    """Return the last measurement of each case, by case id, from the newest of these results files."""
    past: dict[str, Past] = {}
    for file in files[-SESSIONS_READ:]:
        session = documents.read_or_none(file, SessionFile)
        if session is None:
            continue  # written by another version, or truncated: a plan can do without it
        for result in session.results:
            if result.runs and not result.dry and not any(run.inject for run in result.runs):
                past[result.case_id] = Past(
                    started_at=session.started_at,
                    outcome=result.outcome,
                    seconds=sum(run.duration_s for run in (*result.before, *result.runs)),
                )
    return past


def planned(cases: Iterable[Case], past: dict[str, Past], today: date) -> list[Planned]:
    """Return the cases in the order in which a budget is spent.

    Failed and undecided cases come first, then cases that were never measured, then the rest, starting with
    the oldest measurement. The order of the cases that were never measured rotates by one case a day: this
    way, no case is always left out.
    """
    by_id = sorted(cases, key=lambda case: case.id)
    turn = today.toordinal() % len(by_id) if by_id else 0
    seconds_by_size: dict[int, list[float]] = {}
    for case in by_id:
        if case.id in past:
            seconds_by_size.setdefault(case.topology.world_size, []).append(past[case.id].seconds)

    def plan(case: Case) -> Planned:
        last = past.get(case.id)
        like = seconds_by_size.get(case.topology.world_size)
        seconds = last.seconds if last is not None else median(like) if like else None
        return Planned(case=case, past=last, seconds=seconds)

    def first(entry: Planned) -> tuple[int, str]:
        if entry.past is None:
            return 1, ""
        return (0 if entry.past.is_open else 2), entry.past.started_at

    return sorted(map(plan, [*by_id[turn:], *by_id[:turn]]), key=first)


@dataclass
class Budget:
    """The time of a session, and how much of it is left."""

    seconds: float
    costs: dict[str, float] = field(default_factory=dict)  # expected seconds by case id, where known
    began: float = field(default_factory=lambda: monotonic())

    def allows(self, case: Case) -> bool:
        """Return whether a case fits into the time left. If its cost is unknown, any time left is enough."""
        left = self.seconds - (monotonic() - self.began)
        return left > 0 and self.costs.get(case.id, 0.0) <= left

    def why_not_reached(self, case: Case) -> str:
        """Explain why a case is not reached."""
        cost = self.costs.get(case.id)
        whole = _shown(self.seconds)
        if cost is not None and cost > self.seconds:
            needs = f"about {_shown(cost)}. Give {ceil(cost / 60)}min or more"
            return f"not reached: it never fits into the budget of {whole}, because it takes {needs}"
        takes = "" if cost is None else f", and it takes about {_shown(cost)}"
        return f"not reached: too little of the budget of {whole} is left{takes}"


def budget_for(order: Sequence[Planned], seconds: float) -> Budget:
    """Return a budget for these cases."""
    return Budget(seconds, {each.case.id: each.seconds for each in order if each.seconds is not None})


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:,.1f} min"


def shard(cases: Iterable[Case], number: int, of: int) -> set[str]:
    """Return the ids of the cases of job `number` (from 1), if cases are split evenly among `of` jobs."""
    return set(sorted({case.id for case in cases})[number - 1 :: of])
