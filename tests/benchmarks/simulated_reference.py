"""Simulates nights with and without a reference, on machines whose speed differs between sessions.

The launches are judged by the same code as real launches. The logarithm of a launch's cost is the sum of
three normal effects: of the session, of the case within the session, and of the launch. A night judges
tokens/s of 20 cases, each against a baseline of 10 launches. Five of the cases are canaries. On each night,
one case is also judged with a regression. If a case looks slower than the reference, the reference is also
launched on this case, as often as the case.

    python -m tests.benchmarks.simulated_reference   # docs/evidence/statistics.md, "A reference"
"""

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from perfsuite.results.metric import TOKENS_PER_S, Metric
from perfsuite.results.outcome import Check
from perfsuite.session.canaries import CANARIES, is_due
from perfsuite.verdict.metric_checks import SequentialCheck
from perfsuite.verdict.noise import LaunchesBySession, at_one_level, pooled_over_sessions
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import MAX_LAUNCHES, Noise
from perfsuite.verdict.shift import Shift, canary_change, correction, estimated_shift, own_correction, shares
from perfsuite.verdict.tonight import looks_slower
from tests.benchmarks import show_table

CASES = 20
BASELINE_LAUNCHES = 10  # number of launches of a baseline, divided evenly among its sessions
CHANGED = 10  # number of the case that is also judged with a regression
USUAL = 0.03  # tolerance of tokens/s on a GPU
BEYOND = {USUAL: 0.05, 0.01: 0.02}
"""Tolerance -> the injected regression, as growth of the seconds per token."""
BASELINE_SESSIONS = (2, 1)
SESSIONS = (0.0, 0.003, 0.01, 0.02)
WITHIN = (0.0, 0.002, 0.005)
LAUNCHES = (0.003, 0.01)


COLUMNS = (
    *("launch", "within", "session", "alarms", "with reference", "found", "with reference"),
    *("passed", "with reference", "launches", "with reference"),
)


@dataclass(frozen=True)
class Setting:
    """The standard deviations of a simulated machine, and the baselines that were measured on it."""

    launch: float
    within: float  # standard deviation of the effect of a case within a session
    session: float
    _: KW_ONLY
    baseline_sessions: int
    tolerance: float = USUAL
    canaries: int = CANARIES


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Results of some nights. Shares are from 0 to 1."""

    alarms: float  # false alarms per night
    found: float  # share of the nights on which the regression was found
    passed: float  # share of the unchanged cases that passed
    launches: float  # launches of cases per night
    reference: float  # launches of the reference per night


class Night:
    """The launches of a night, drawn when they are needed."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self._draw = random.Random(seed)
        sessions = [str(number) for number in range(setting.baseline_sessions)]
        shifts = {name: self._draw.gauss(0, setting.session) for name in sessions}
        each = BASELINE_LAUNCHES // len(sessions)
        self.baselines: list[LaunchesBySession] = [
            {name: self._costs(shift + self._within(), each) for name, shift in shifts.items()}
            for _ in range(CASES)
        ]
        tonight = self._draw.gauss(0, setting.session)
        self._levels = [tonight + self._within() for _ in range(CASES)]
        self.launches = [self._costs(level, MAX_LAUNCHES) for level in self._levels]
        self.confirming = [self._costs(level, MAX_LAUNCHES) for level in self._levels]  # of the reference

    def reference(self, case: int) -> float:
        """Return the cost of one more launch of the reference."""
        return self._costs(self._levels[case], 1)[0]

    def _within(self) -> float:
        return self._draw.gauss(0, self.setting.within)

    def _costs(self, level: float, count: int) -> list[float]:
        return [math.exp(level + self._draw.gauss(0, self.setting.launch)) for _ in range(count)]


def simulate(setting: Setting, *, nights: int, has_reference: bool, seed: int = 0) -> Shares:
    """Simulate nights. Equal arguments give equal results."""
    total = Counter[str]()
    metric = replace(TOKENS_PER_S, tolerances={"cpu": 0.15, "cuda": setting.tolerance})
    for number in range(nights):
        night = Night(setting, 1_000_003 * seed + number)
        noise = pooled_over_sessions(night.baselines)
        assert noise is not None
        reference = _Reference(night, noise, setting.canaries if has_reference else 0)
        made = 0
        for case in range(CASES):
            reference.keep_up(made)
            check, used, confirming = reference.judged(metric, case)
            total["alarms"] += check.outcome == "regressed"
            total["passed"] += check.outcome in ("passed", "improved")
            total["confirming"] += confirming
            made += used
            if case == CHANGED:
                check, *_ = reference.judged(metric, case, slower=1 + BEYOND[setting.tolerance])
                total["found"] += check.outcome == "regressed"
        total["launches"] += made
        total["reference"] += reference.count
    return Shares(
        alarms=total["alarms"] / nights,
        found=total["found"] / nights,
        passed=total["passed"] / nights / CASES,
        launches=total["launches"] / nights,
        reference=(total["reference"] + total["confirming"]) / nights,
    )


class _Reference:
    """The launches of the reference so far, and the shift that they show."""

    def __init__(self, night: Night, noise: Noise, canaries: int) -> None:
        self._night = night
        self._noise = noise
        step = CASES // canaries if canaries else 1
        self._costs: Mapping[int, list[float]] = {number * step: [] for number in range(canaries)}
        self._turn: Iterator[int] = itertools.cycle(self._costs)
        self.shift: Shift | None = None

    @property
    def count(self) -> int:
        return sum(map(len, self._costs.values()))

    def keep_up(self, launches: int) -> None:
        """Launch the reference as often as is due after `launches` launches of cases."""
        before = self.count
        while self._costs and is_due(len(self._costs), self.count, launches):
            case = next(self._turn)
            self._costs[case].append(self._night.reference(case))
        if self.count > before:
            changes = {
                str(case): canary_change(costs, self._night.baselines[case], self._noise, str(case))
                for case, costs in self._costs.items()
            }
            self.shift = estimated_shift(changes, self._noise)

    def judged(self, metric: Metric, case: int, *, slower: float = 1.0) -> tuple[Check, int, int]:
        """Judge a case after its costs are multiplied by `slower`. Returns what `judged` returns."""
        launches = [slower * cost for cost in self._night.launches[case]]
        baseline = self._night.baselines[case]
        of_reference = [*self._costs.get(case, []), *self._night.confirming[case]] if self.count else []
        return judged(metric, baseline, launches, self._noise, self.shift, of_reference)


def judged(
    metric: Metric,
    baseline: LaunchesBySession,
    available: Sequence[float],
    noise: Noise,
    shift: Shift | None,
    of_reference: Sequence[float],
) -> tuple[Check, int, int]:
    """Judge a case launch by launch, and also against the reference on this case if it looks slower.

    `of_reference` has the costs of the reference on this case, as many as for the case or more; empty: there
    is no reference. Returns the check, the number of launches of the case, and how many of these were used.
    """
    then = at_one_level(baseline, noise.sigma)
    corrects = None if shift is None else correction(noise, shares(baseline, "a case"), shift)
    sequential = SequentialCheck(
        metric=metric,
        check=UNJUDGED.replace(allowed=metric.bound(metric.tolerance("cuda"))),
        device="cuda",
        policy=Policy(max_launches=len(available)),
        sessions=[len(launches) for launches in baseline.values()],
    )
    used = 1
    confirming = 0
    while True:
        check = sequential.decided(available[:used], then, noise, corrects)
        if looks_slower(check) and of_reference and not confirming:
            confirming = used
            corrects = own_correction(noise, baseline, [*of_reference[:used]], "a case")
        elif check.outcome == "undecided":
            used += 1
        else:
            return check, used, confirming


UNJUDGED = Check(
    metric=TOKENS_PER_S.name,
    label=TOKENS_PER_S.label,
    unit=TOKENS_PER_S.unit,
    outcome="recorded",
    measured=1.0,
    baseline=1.0,
    allowed=0.03,
)


def rows(settings: Iterable[Setting], nights: int) -> Iterator[list[str]]:
    """Yield a row for each setting. Without a reference, a fifth of the nights is enough."""
    for setting in settings:
        alone = simulate(setting, nights=nights // 5, has_reference=False)
        beside = simulate(setting, nights=nights, has_reference=True)
        yield [
            *(f"{100 * sigma:g}%" for sigma in (setting.launch, setting.within, setting.session)),
            *(f"{100 * made.alarms:.1f}%" for made in (alone, beside)),
            *(f"{100 * made.found:.1f}%" for made in (alone, beside)),
            *(f"{100 * made.passed:.1f}%" for made in (alone, beside)),
            f"{alone.launches:.1f}",
            f"{beside.launches:.1f} + {beside.reference:.1f}",
        ]


def main(nights: int = 1_000) -> None:
    """Print a table for each combination of tolerance and number of sessions in a baseline."""
    for sessions, (tolerance, regression) in itertools.product(BASELINE_SESSIONS, BEYOND.items()):
        machines = itertools.product(LAUNCHES, WITHIN, SESSIONS if tolerance == USUAL else SESSIONS[2:3])
        settings = [
            Setting(launch, within, session, baseline_sessions=sessions, tolerance=tolerance)
            for launch, within, session in machines
        ]
        print(f"\nbaselines of {sessions}, tolerance {tolerance:.0%}, regression {regression:.0%}\n")
        show_table(COLUMNS, rows(settings, nights))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
