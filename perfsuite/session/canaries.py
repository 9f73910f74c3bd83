"""Choose the canaries, which are the cases that a session also launches with its reference. Pure.

Also decide when a canary is launched with the reference again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from statistics import median, stdev

from perfsuite.case.case import Case
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.verdict.noise import costs_by_session
from perfsuite.verdict.planning import EXTRA
from perfsuite.verdict.robust import sorted_logs

CANARIES = 5
"""Number of canaries. With five, one canary that changes differently from the others can be recognised."""
_NOISY = 2.0  # a case whose scatter is above this multiple of the median scatter is chosen last


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A case that can be a canary, because it has a baseline on this hardware class."""

    case: Case
    baseline: Baseline
    baseline_file: str
    launch_s: float | None = None  # expected duration of a launch; None: unknown

    @property
    def kind(self) -> tuple[str, int]:
        """The framework and the world size. A canary represents all cases of the same kind."""
        return self.case.framework.name, self.case.topology.world_size

    @property
    def sessions(self) -> tuple[str, ...]:
        """The names of the sessions of the baseline, sorted."""
        return tuple(sorted({name or "" for name, _ in self.baseline.by_session()}))

    @property
    def scatter(self) -> float:
        """The largest standard deviation between launches of one session of the baseline; 0 if unknown."""
        logs = [sorted_logs(launches) for launches in costs_by_session(self.baseline, TOKENS_PER_S).values()]
        return max((stdev(of_session) for of_session in logs if len(of_session) > 1), default=0.0)


def is_due(canaries: int, made: int, launches: int) -> bool:
    """Return whether another launch with the reference is due.

    `launches` is the number of launches of the session's cases so far, and `made` is the number of launches
    with the reference so far. Each canary is launched once with the reference before the first case is
    judged, because the first case is also judged against the reference.
    """
    return made < canaries or made < int(EXTRA * launches)


def chosen(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the canaries that represent these cases best. The same cases always give the same canaries.

    The changes of two canaries can be compared only if their baselines are from the same sessions. So the
    cases whose baselines are from the most frequent set of sessions come first. Among these cases, the kinds
    (framework and world size) take turns, the most common kind first. Within a kind, cases that scatter much
    more than others come last. Apart from this, the fastest cases of a kind come first.
    """
    by_sessions = Counter(candidate.sessions for candidate in candidates)
    most_common = max(by_sessions, key=lambda names: (by_sessions[names], names), default=())
    first = [candidate for candidate in candidates if candidate.sessions == most_common]
    others = [candidate for candidate in candidates if candidate.sessions != most_common]
    return [*_in_turn(first), *_in_turn(others)][:count]


def _in_turn(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in an order in which their kinds take turns."""
    if not candidates:
        return []
    usual = median(candidate.scatter for candidate in candidates)

    def place(candidate: Candidate) -> tuple[bool, float, str]:
        seconds = float("inf") if candidate.launch_s is None else candidate.launch_s
        return candidate.scatter > _NOISY * usual, seconds, candidate.case.id

    by_kind: dict[tuple[str, int], list[Candidate]] = {}
    for candidate in sorted(candidates, key=place):
        by_kind.setdefault(candidate.kind, []).append(candidate)
    kinds = sorted(by_kind, key=lambda kind: (-len(by_kind[kind]), kind))
    rounds = zip_longest(*(by_kind[kind] for kind in kinds))
    return [candidate for candidate in chain.from_iterable(rounds) if candidate is not None]
