"""Verdicts: the outcome of a case, how each outcome is shown, the check of each metric. Pure."""

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
"""The excuse for a failure (`Case.known_issue`, `.may_run_out_of_memory`) or for a regression (a waiver)."""


@dataclass(frozen=True, kw_only=True)
class OutcomeStyle:
    """How reports show one outcome, or one excuse."""

    word: Outcome | Excuse
    sign: str  # precedes the word on the HTML page
    colour: Literal["green", "cyan", "yellow", "red"]  # in the terminal; the HTML page has a style sheet
    letter: str | None = None  # pytest's letter for such a test; None: pytest's own letter (`.`, `F`, `x`)
    quiet: bool = False  # whether nobody needs to act on it


STYLES: dict[str, OutcomeStyle] = {  # worst first: the order of cases in reports, and of checks in a verdict
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
QUIET = frozenset(word for word, style in STYLES.items() if style.quiet)  # outcomes that need no action
UNMEASURED: frozenset[Outcome] = frozenset({"failed", "unhealthy"})  # not about the code's speed
UNJUDGED: frozenset[Outcome] = frozenset({"inconclusive", "unhealthy", "recorded"})
"""Outcomes that show neither that the code is as good as before nor that it is worse."""


class Check(Data):
    """One metric of the launches, judged against the baseline.

    All changes are those of the figure itself: -0.2 is 20% fewer tokens/s, which is worse, and +0.2 is 20%
    more memory, which is also worse. The statistics judge costs; see `Metric.change`.
    """

    metric: str
    label: str
    unit: str
    outcome: Outcome
    measured: float | None  # median of the launches
    baseline: float | None  # median of the baseline's launches
    allowed: float  # largest regression that passes: 0.13 is 13% fewer tokens/s, or 13% more bytes
    change: float | None = None  # estimated relative change of the figure
    interval: tuple[float, float] | None = None  # 99% interval of `change`, with the baseline's uncertainty
    minimum_detectable: float | None = None  # smallest regression that is found 95 times in 100
    probe_exponent: float | None = None  # exponent of the probe's correction for machine speed; None: none
    note: str | None = None

    @property
    def blind(self) -> bool:
        """Whether this gate would often miss a change of the allowed size."""
        return self.minimum_detectable is not None and self.minimum_detectable > self.allowed


def in_span(span: str, text: str) -> str:
    """Prefix a text with its span, unless the span is empty."""
    return f"{span}: {text}" if span else text


class Finding(Data):
    """One count that differs from the baseline."""

    field: str  # the counted field: `all_gather of 2 ranks: bytes`
    quantity: str  # the judged quantity: `all_gather of 2 ranks`, of which several fields may have changed
    unit: Literal["bytes", "FLOP", "calls", "objects", "modules"]
    before: int
    now: int
    ranks: str  # the ranks that have this change: `0-3`
    outcome: Literal["regressed", "improved", "passed"]  # `passed`: listed, not judged
    sentence: str  # the change in words: `all_gather 7.0 -> 14.0 MiB a step: float32 instead of bfloat16`
    span: str = ""  # `save checkpoint`, `start-up`; empty: in steps
    steps: str = ""  # `every 5th step (5, 10, 15)`; empty: in all counted steps

    @property
    def name(self) -> str:
        """The judged quantity, with the event or phase in which it was counted."""
        return in_span(self.span, self.quantity)


class CountCheck(Data):
    """The counts of the launches, judged against those of the baseline."""

    # `not counted`: a step did work that was not counted, or no launch was counted; `notes` say why.
    outcome: Literal["regressed", "improved", "passed", "recorded", "not counted"]
    findings: tuple[Finding, ...] = ()  # judged ones first, and among these the largest change first
    unsteady: tuple[str, ...] = ()  # fields that vary in the baseline's launches or today's: never judged
    notes: tuple[str, ...] = ()  # counts that were not judged, and why
    compared: bool = True  # whether launches and baseline were compared at all
    baseline_file: str | None = None


class Profiled(Data):
    """The explanation that profiles of some steps give for a difference from the baseline or arm A."""

    calls: tuple[str, ...] = ()  # changed numbers of calls, the likeliest cause first: `aten::bmm 0 -> 24`
    hints: tuple[str, ...] = ()  # longer times: with one launch on each side, these are not proof
    notes: tuple[str, ...] = ()  # parts that could not be compared, and why


class Verdict(Data):
    """The verdict on the launches of a case."""

    outcome: Outcome
    launches: int
    checks: tuple[Check, ...] = ()
    counts: CountCheck | None = None  # None if nothing was counted
    explained: str | None = None  # the explanation that counts give for a change
    profiled: Profiled | None = None  # the explanation that profiles add; None if none was taken
    failure: FailureKind | None = None
    reasons: tuple[str, ...] = ()  # why it failed, if no metric shows it, and why launches were set aside
    unhealthy_launches: tuple[int, ...] = ()  # numbers, from 1, of launches that are not evidence
    changed: tuple[str, ...] = ()  # other changes since the baseline: not judged, but possible causes
    against: str | None = None  # name of the reference, such as `arm A`; None: a stored baseline, if any

    @property
    def is_recorded(self) -> bool:
        """Whether there were no times to compare with, so that these launches become a baseline."""
        is_new = bool(self.checks) and all(check.outcome == "recorded" for check in self.checks)
        return self.outcome == "recorded" or (self.outcome == "improved" and is_new)

    @property
    def is_same_work(self) -> bool:
        """Whether the counts of the work were compared, and none differs."""
        counts = self.counts
        return counts is not None and counts.compared and counts.outcome == "passed" and not counts.findings

    def check(self, metric: str) -> Check | None:
        """Return the check of the metric with that name; None if it was not judged."""
        return next((check for check in self.checks if check.metric == metric), None)

    def healthy(self, runs: Sequence[Run]) -> list[Run]:
        """Return the judged launches that are evidence and can become a baseline."""
        return [run for number, run in enumerate(runs, 1) if number not in self.unhealthy_launches]
