"""What a verdict says: the outcome of a case, how each outcome is shown, the check of each metric. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perfsuite.documents import Data
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.run import Run

Outcome = Literal[
    "passed", "improved", "regressed", "inconclusive", "recorded", "unhealthy", "failed", "undecided"
]
Excuse = Literal["known issue", "out of memory", "waived"]
"""Why a failure is no surprise (`Case.known_issue`, `.may_run_out_of_memory`), or a regression tolerated."""


@dataclass(frozen=True, kw_only=True)
class OutcomeStyle:
    """How one outcome, or one excuse, is shown in every report."""

    word: Outcome | Excuse
    sign: str  # stands before the word on the HTML page
    colour: Literal["green", "cyan", "yellow", "red"]  # in the terminal; the HTML page has a style sheet
    letter: str | None = None  # pytest's letter for such a test; None: pytest's own (`.`, `F`, `x`) says it
    quiet: bool = False  # whether nobody needs to act upon it


STYLES: dict[str, OutcomeStyle] = {  # worst first: reports list cases so, a verdict is its worst check's
    style.word: style
    for style in (
        OutcomeStyle(word="failed", sign="✕", colour="red"),
        OutcomeStyle(word="regressed", sign="▼", colour="red", letter="R"),
        OutcomeStyle(word="unhealthy", sign="!", colour="yellow", letter="U"),
        OutcomeStyle(word="undecided", sign="?", colour="yellow"),
        OutcomeStyle(word="inconclusive", sign="?", colour="yellow", letter="I"),
        OutcomeStyle(word="improved", sign="▲", colour="green", letter="i"),
        OutcomeStyle(word="waived", sign="○", colour="yellow", quiet=True),
        OutcomeStyle(word="known issue", sign="○", colour="yellow", quiet=True),
        OutcomeStyle(word="out of memory", sign="○", colour="yellow", quiet=True),
        OutcomeStyle(word="recorded", sign="●", colour="cyan", letter="r", quiet=True),
        OutcomeStyle(word="passed", sign="✓", colour="green", quiet=True),
    )
}
WORST_FIRST = tuple(STYLES)
QUIET = frozenset(word for word, style in STYLES.items() if style.quiet)  # nobody needs to act upon them
UNMEASURED: frozenset[Outcome] = frozenset({"failed", "unhealthy"})  # they say nothing of the code's speed
UNJUDGED: frozenset[Outcome] = frozenset({"inconclusive", "unhealthy", "recorded"})
"""Outcomes that say neither that the code is as good as before nor that it is worse."""


class Check(Data):
    """One metric of the launches, judged against the baseline.

    All changes are those of the figure itself: of tokens/s -0.2 is 20 % fewer, which is worse, and of memory
    +0.2 is 20 % more, which is worse. The statistics judge costs; see `Metric.change`.
    """

    metric: str
    label: str
    unit: str
    outcome: Outcome
    measured: float | None  # median of the launches
    baseline: float | None  # median of the baseline's launches
    allowed: float  # largest change for the worse that passes: 0.13 is 13 % fewer tokens/s, 13 % more bytes
    change: float | None = None  # estimated relative change of the figure
    interval: tuple[float, float] | None = None  # of `change`, 99 %, with the baseline's uncertainty
    minimum_detectable: float | None = None  # smallest change for the worse found 95 times in 100
    probe_exponent: float | None = None  # of the correction by the probe for the machine's speed; None: none
    note: str | None = None

    @property
    def blind(self) -> bool:
        """Whether this gate would often miss a change as large as what is allowed."""
        return self.minimum_detectable is not None and self.minimum_detectable > self.allowed


def in_span(span: str, text: str) -> str:
    """Return a text with the span that it is of; the text alone where that is empty."""
    return f"{span}: {text}" if span else text


class Finding(Data):
    """One count that is not what it is in the baseline."""

    field: str  # what is counted, as `all_gather of 2 ranks: bytes`
    quantity: str  # what is judged, as `all_gather of 2 ranks`: several fields may have changed
    unit: Literal["bytes", "FLOP", "calls", "objects", "modules"]
    before: int
    now: int
    ranks: str  # the ranks of which this is true, as `0-3`
    outcome: Literal["regressed", "improved", "passed"]  # `passed`: listed, not judged
    sentence: str  # what changed, in words: `all_gather 7.0 -> 14.0 MiB a step: float32 instead of bfloat16`
    span: str = ""  # where, as `save checkpoint` or `start-up`; empty: in steps
    steps: str = ""  # in which steps, as `every 5th step (5, 10, 15)`; empty: in all that were counted

    @property
    def name(self) -> str:
        """What is judged, with the event or phase in which it was counted."""
        return in_span(self.span, self.quantity)


class CountCheck(Data):
    """The counts of the launches, judged against those of the baseline."""

    # `not counted`: a step did work that counting did not see, or no launch was counted; `notes` say why.
    outcome: Literal["regressed", "improved", "passed", "recorded", "not counted"]
    findings: tuple[Finding, ...] = ()  # the judged ones first, of these the largest change first
    unsteady: tuple[str, ...] = ()  # fields that differ in the baseline's launches or today's: never judged
    notes: tuple[str, ...] = ()  # what was not judged, and why
    compared: bool = True  # whether launches and baseline were compared at all
    baseline_file: str | None = None


class Profiled(Data):
    """What a profile of some steps says of why a case is slower than the baseline or arm A."""

    calls: tuple[str, ...] = ()  # made more or less often, the likeliest cause first: `aten::bmm 0 -> 24`
    hints: tuple[str, ...] = ()  # what takes longer: times of one launch a side, which is no proof
    notes: tuple[str, ...] = ()  # what could not be compared, and why


class Verdict(Data):
    """What the launches of a case mean."""

    outcome: Outcome
    launches: int
    checks: tuple[Check, ...] = ()
    counts: CountCheck | None = None  # none where nothing was counted
    explained: str | None = None  # why a slower case is slower, as far as counts tell
    profiled: Profiled | None = None  # what a profile adds to that; none where none was taken
    failure: FailureKind | None = None
    reasons: tuple[str, ...] = ()  # why it failed, where no metric says it, and why launches were set aside
    unhealthy_launches: tuple[int, ...] = ()  # numbers, from 1, of those that are no evidence and no baseline
    changed: tuple[str, ...] = ()  # what is not as at the baseline, may explain a change, and is not judged
    against: str | None = None  # what they were compared with, as `arm A`; None: a stored baseline, if any

    @property
    def is_recorded(self) -> bool:
        """Whether there were no times to compare with: these launches become a baseline, counts or not."""
        is_new = bool(self.checks) and all(check.outcome == "recorded" for check in self.checks)
        return self.outcome == "recorded" or (self.outcome == "improved" and is_new)

    def check(self, metric: str) -> Check | None:
        """Return the check of the metric with that name; None where it was not judged."""
        return next((check for check in self.checks if check.metric == metric), None)

    def healthy(self, runs: Sequence[Run]) -> list[Run]:
        """Return the judged launches that are evidence and may be a baseline."""
        return [run for number, run in enumerate(runs, 1) if number not in self.unhealthy_launches]
