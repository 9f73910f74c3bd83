"""Verdicts: the outcome of a case, the style in which it is shown, and the check of each metric. Pure."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perfsuite.documents import Data
from perfsuite.results.cost import Cost
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.run import Run

Outcome = Literal[
    "passed", "improved", "regressed", "inconclusive", "recorded", "unhealthy", "failed", "undecided"
]
Excuse = Literal["known issue", "out of memory", "waived"]
"""Why a failure or a regression is excused. `Case.known_issue` or `Case.may_run_out_of_memory` excuses a
failure, and a waiver excuses a regression."""


@dataclass(frozen=True, kw_only=True)
class OutcomeStyle:
    """The style in which reports show an outcome or an excuse."""

    word: Outcome | Excuse
    sign: str  # the symbol before the word on the HTML page
    colour: Literal["green", "cyan", "yellow", "red"]  # in the terminal; the HTML page has a style sheet
    letter: str | None = None  # letter in pytest's progress; None: pytest's own (`.`, `F`, `x`)
    quiet: bool = False  # whether it needs no action


STYLES: dict[str, OutcomeStyle] = {  # worst first; also the order of cases in reports and checks in verdicts
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
UNMEASURED: frozenset[Outcome] = frozenset({"failed", "unhealthy"})  # these do not show the code's speed
UNJUDGED: frozenset[Outcome] = frozenset({"inconclusive", "unhealthy", "recorded"})
"""Outcomes that do not show whether the code is better or worse than before."""


BY_THE_MACHINE = "the code did not change, so the machine did"
"""Note on a check whose metric changed although nothing else changed in the session (`verdict.unchanged`)."""


class AgainstReference(Data):
    """The change of a metric relative to the session's reference.

    This change excludes the machine's own change.
    """

    change: float  # estimated relative change of the figure
    interval: tuple[float, float]  # 99% interval of `change`, with the uncertainty of the reference


class Check(Data):
    """The judgement of one metric: a comparison of the launches with the baseline.

    The changes in these fields are relative changes of the figure: -0.2 is 20% fewer tokens/s, or 20% less
    memory. The statistical tests judge changes of `Metric.cost` instead, for which lower is always better.
    `Metric.change` converts them into changes of the figure.
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
    minimum_detectable: float | None = None  # smallest regression that is detected 95 times in 100
    probe_exponent: float | None = None  # exponent of the correction by the probe; None: no correction
    # The change against the session's reference. If it is known, it either decides the outcome, or it has to
    # confirm the outcome that follows from `change`. If it is None, `change` alone decides.
    against_reference: AgainstReference | None = None
    note: str | None = None

    @property
    def judged_change(self) -> float | None:
        """The change to compare with `allowed`: that of `against_reference` or, if it is None, `change`."""
        return self.change if self.against_reference is None else self.against_reference.change

    @property
    def blind(self) -> bool:
        """Whether the check would often miss a change of the allowed size."""
        return self.minimum_detectable is not None and self.minimum_detectable > self.allowed


def in_span(span: str, text: str) -> str:
    """Prefix a text with the name of its span, unless the span is empty."""
    return f"{span}: {text}" if span else text


class Finding(Data):
    """One count that differs from the baseline."""

    field: str  # the counted field, such as `all_gather of 2 ranks: bytes`
    quantity: str  # the judged quantity, such as `all_gather of 2 ranks`; it can have several fields
    unit: Literal["bytes", "FLOP", "calls", "objects", "modules"]
    before: int
    now: int
    ranks: str  # the ranks with this change, such as `0-3`
    outcome: Literal["regressed", "improved", "passed"]  # `passed`: listed, but not judged
    sentence: str  # the change in words: `all_gather 7.0 -> 14.0 MiB a step: float32 instead of bfloat16`
    span: str = ""  # span of the change, such as `save checkpoint` or `start-up`; empty: the steps
    cost: Cost | None = None  # None: it was not estimated
    steps: str = ""  # steps with the change: `every 5th step (5, 10, 15)`; empty: all counted steps

    @property
    def name(self) -> str:
        """The judged quantity, prefixed with the event or phase in which it was counted."""
        return in_span(self.span, self.quantity)

    def in_words(self, longest: int | None = None) -> str:
        """Return the change and its cost. `longest` limits the sentence, in characters, but not the cost."""
        change = self.sentence
        if longest is not None:
            change = textwrap.shorten(change, longest, placeholder=" ...")
        return change if self.cost is None else change + self.cost.in_words(self.unit)


NOT_JUDGED = ": not judged, "
"""The text between the name of a count and the reason, in a note of a `CountCheck`."""
UNCONFIRMED = "which the second launch of each arm did not confirm"
"""The end of a reason about a change of the start-up, if only the first launches showed this change."""


class CountCheck(Data):
    """The judgement of the counts: a comparison of the launches with the baseline."""

    # `not counted`: the counts of a step can lack some of its work, or no launch was counted. `notes` give
    # the reason.
    outcome: Literal["regressed", "improved", "passed", "recorded", "not counted"]
    findings: tuple[Finding, ...] = ()  # judged findings first, with the largest change first
    unsteady: tuple[str, ...] = ()  # fields that vary among the launches of one side: never judged
    # Unsteady fields that are larger than in any launch of the baseline, so the work might have grown.
    grown: tuple[str, ...] = ()
    # Ranks, spans and quantities that only one side has, so the work might have changed there.
    one_sided: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # counts that were not judged, and why
    compared: bool = True  # whether launches and baseline were compared at all
    baseline_file: str | None = None


class Profiled(Data):
    """An explanation, from profiles of a few steps, for a difference from the baseline or arm A."""

    calls: tuple[str, ...] = ()  # changed numbers of calls, most likely cause first: `aten::bmm 0 -> 24`
    hints: tuple[str, ...] = ()  # times that grew: with one launch on each side, they prove nothing
    notes: tuple[str, ...] = ()  # parts that could not be compared, and why


class Verdict(Data):
    """The verdict on the launches of a case."""

    outcome: Outcome
    launches: int
    checks: tuple[Check, ...] = ()
    counts: CountCheck | None = None  # None if nothing was counted
    explained: str | None = None  # what the counts show as the cause: often the sentence of a finding
    profiled: Profiled | None = None  # explanation by profiles; None if no profile was taken
    failure: FailureKind | None = None
    # Reasons for a failure that no metric shows, and reasons for setting launches aside.
    reasons: tuple[str, ...] = ()
    unhealthy_launches: tuple[int, ...] = ()  # numbers (from 1) of the launches that were set aside
    changed: tuple[str, ...] = ()  # other changes since the baseline: not judged, but possible causes
    against: str | None = None  # what launches are compared with, such as `arm A`; None: a baseline, if any

    def explanation(self, longest: int | None = None) -> str | None:
        """Return `explained`. If it is the sentence of a finding, add the cost (`Finding.in_words`)."""
        if self.explained is None:
            return None
        findings = () if self.counts is None else self.counts.findings
        same = [finding for finding in findings if finding.sentence == self.explained]
        same.sort(key=lambda finding: finding.cost is None)
        return same[0].in_words(longest) if same else self.explained

    @property
    def is_recorded(self) -> bool:
        """Whether the launches become a baseline because there was no baseline of times."""
        is_new = bool(self.checks) and all(check.outcome == "recorded" for check in self.checks)
        return self.outcome == "recorded" or (self.outcome == "improved" and is_new)

    @property
    def is_same_work(self) -> bool:
        """Whether all counts of the work were compared, and none differs."""
        counts = self.counts
        if counts is None or not counts.compared or counts.outcome != "passed":
            return False
        return not (counts.findings or counts.one_sided or counts.grown)

    @property
    def moved_by_machine(self) -> list[Check]:
        """The checks of times that changed although nothing else did (`verdict.unchanged`)."""
        return [check for check in self.checks if check.note == BY_THE_MACHINE]

    def check(self, metric: str) -> Check | None:
        """Return the check of the metric with that name; None if it was not judged."""
        return next((check for check in self.checks if check.metric == metric), None)

    def healthy(self, runs: Sequence[Run]) -> list[Run]:
        """Return the launches that were not set aside. Only these can become a baseline."""
        return [run for number, run in enumerate(runs, 1) if number not in self.unhealthy_launches]
