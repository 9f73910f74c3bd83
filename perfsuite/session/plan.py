"""Choose and order the cases of a session that does not have time for all of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from math import ceil
from pathlib import Path
from statistics import median
from time import monotonic

from perfsuite.case.case import Case
from perfsuite.results.outcome import UNJUDGED, Outcome
from perfsuite.results.session_file import readable

SESSIONS_READ = 100  # only this many of the newest sessions in the store are read


@dataclass(frozen=True, kw_only=True)
class Past:
    """The last measurement of a case."""

    started_at: str  # ISO 8601, with time zone
    outcome: Outcome
    seconds: float  # total duration of all launches
    launch_s: float  # duration of the longest launch; in a comparison, of all launches together

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
    launch_s: float | None  # duration of one launch or, if unknown, the median as above

    @property
    def gpu_hours(self) -> float | None:
        """Expected GPU hours of the case: 0 on CPUs, and None if its duration is unknown."""
        return None if self.seconds is None else self.seconds * self.gpus / 3600

    @property
    def gpus(self) -> int:
        """Number of GPUs that the case uses: 0 on CPUs."""
        return 0 if self.case.hardware == ("cpu",) else self.case.topology.world_size


def past_of(files: Sequence[Path]) -> dict[str, Past]:
    """Return the last measurement of each case in the newest `SESSIONS_READ` results files, by case id."""
    past: dict[str, Past] = {}
    for session in readable(files[-SESSIONS_READ:]):
        for result in session.results:
            if result.runs and not result.dry and not any(run.inject for run in result.runs):
                seconds = sum(run.duration_s for run in (*result.before, *result.runs))
                longest_s = max(run.duration_s for run in result.runs)
                past[result.case_id] = Past(
                    started_at=session.started_at,
                    outcome=result.outcome,
                    seconds=seconds,
                    # One pair of launches shows nothing: a comparison needs all of its pairs.
                    launch_s=seconds if result.before else longest_s,
                )
    return past


def planned(cases: Iterable[Case], past: dict[str, Past], today: date) -> list[Planned]:
    """Return the cases in the order in which they use up a budget.

    Failed and undecided cases come first, then cases that were never measured, and then all others, starting
    with the oldest measurement. The order of the cases that were never measured rotates by one case a day, so
    that no case is always left out.
    """
    by_id = sorted(cases, key=lambda case: case.id)
    turn = today.toordinal() % len(by_id) if by_id else 0
    past_by_size: dict[int, list[Past]] = {}
    for case in by_id:
        if case.id in past:
            past_by_size.setdefault(case.topology.world_size, []).append(past[case.id])

    def plan(case: Case) -> Planned:
        last = past.get(case.id)
        similar = [last] if last is not None else past_by_size.get(case.topology.world_size, [])
        return Planned(
            case=case,
            past=last,
            seconds=median(past_case.seconds for past_case in similar) if similar else None,
            launch_s=median(past_case.launch_s for past_case in similar) if similar else None,
        )

    def first(entry: Planned) -> tuple[int, str]:
        if entry.past is None:
            return 1, ""
        return (0 if entry.past.is_open else 2), entry.past.started_at

    return sorted(map(plan, [*by_id[turn:], *by_id[:turn]]), key=first)


@dataclass
class Budget:
    """The time of a session, and how much of it is left.

    A case is launched a second time only if there is time for the first launch of every other case. This way,
    counts are judged for as many cases as possible, and times are judged for the cases that come first.
    """

    seconds: float
    launch_s: dict[str, float] = field(default_factory=dict)  # seconds of a launch in the past, where known
    waiting: set[str] = field(default_factory=set)  # ids of the cases that have not begun
    fewest: int = 1  # minimum number of launches of a case (--perf-min-launches)
    now: Callable[[], float] = monotonic  # the clock, in seconds
    began: float = field(init=False)  # the time at which the session began
    # Seconds of the longest launch of each case in this session. Has only cases that have been launched.
    measured_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin the session."""
        self.began = self.now()

    def allows(self, case: Case) -> bool:
        """Return whether there is time for the minimum number of launches of a case.

        From this call on, the case no longer counts as waiting. A launch of unknown duration is expected to
        take as long as the median launch of other cases. If no duration is known, any remaining time is
        enough.
        """
        self.waiting.discard(case.id)
        left = self._left()
        return left > 0 and self._needed_s(case.id) <= left

    def allows_another(self, case: Case, longest_s: float) -> bool:
        """Return whether there is time to launch a case again, after reserving time for all waiting cases.

        `longest_s` is the duration of the longest launch of the case so far, in seconds.
        """
        self.note(case, longest_s)
        return self.has_time_for(case, 1)

    def note(self, case: Case, longest_s: float) -> None:
        """Note the duration of a case's longest launch: the machine can be slower than in the past."""
        self.measured_s[case.id] = longest_s

    def has_time_for(self, case: Case, launches: int) -> bool:
        """Return whether there is time for this many launches of a case.

        Time for the minimum number of launches of each waiting case is reserved.
        """
        others = self.waiting - {case.id}
        return launches * self._launch_s(case.id) + sum(map(self._needed_s, others)) <= self._left()

    def why_not_reached(self, case: Case) -> str:
        """Explain why a case is not reached."""
        whole = _shown(self.seconds)
        least_s = self.fewest * self.launch_s.get(case.id, 0.0)  # on a machine as fast as in the past
        if least_s > self.seconds:
            needs = f"about {_shown(least_s)}. Give {ceil(least_s / 60)}min or more"
            return f"not reached: it never fits into the budget of {whole}, because it takes {needs}"
        takes = f", and it takes about {_shown(self._needed_s(case.id))}" if case.id in self.launch_s else ""
        return f"not reached: too little of the budget of {whole} is left{takes}"

    def _left(self) -> float:
        return self.seconds - (self.now() - self.began)

    def _needed_s(self, case_id: str) -> float:
        """Return how long the minimum number of launches of a case should take; 0 if that is unknown."""
        return self.fewest * self._launch_s(case_id)

    def _launch_s(self, case_id: str) -> float:
        """Return the expected duration of a launch of a case; 0 if it is unknown."""
        slower = self._slower()
        expected_s = {name: slower * past_s for name, past_s in self.launch_s.items()} | self.measured_s
        if case_id in expected_s:
            return expected_s[case_id]
        return median(expected_s.values()) if expected_s else 0.0

    def _slower(self) -> float:
        """Return the duration of launches as a multiple of their duration in the past; 1 if it is unknown."""
        ratios = [
            measured_s / self.launch_s[case_id]
            for case_id, measured_s in self.measured_s.items()
            if self.launch_s.get(case_id)
        ]
        return median(ratios) if ratios else 1.0


def budget_for(order: Sequence[Planned], seconds: float, fewest: int = 1) -> Budget:
    """Return a budget for these cases, each of which is launched at least `fewest` times."""
    launch_s = {
        case_plan.case.id: case_plan.launch_s for case_plan in order if case_plan.launch_s is not None
    }
    return Budget(seconds, launch_s, {case_plan.case.id for case_plan in order}, fewest)


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:,.1f} min"


def shard(cases: Iterable[Case], number: int, of: int) -> set[str]:
    """Split the cases evenly among `of` jobs, and return the case ids of job `number` (from 1)."""
    return set(sorted({case.id for case in cases})[number - 1 :: of])
