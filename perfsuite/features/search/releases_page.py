"""Render the page of `perfsuite releases`: how each release changed the work of a training step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.report.columns import STEP
from perfsuite.report.explained import explained
from perfsuite.report.markdown import grid, text
from perfsuite.report.text import Table, plural
from perfsuite.results.baseline import from_runs
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.arms import ARM_A, ARM_B, judge_counts
from perfsuite.verdict.counted_spans import without_start_up_calls
from perfsuite.verdict.loss import may_differ

ARROW = " → "
SENSE = (
    "Each case ran once with each release, and the work of some of its steps was counted. *Regressed* means "
    "that a step does more work than with the previous release, *improved* that it does less. No time was "
    "measured: a step that does more work is not necessarily slower, and the change can be a bug fix. "
    "Start-up, evaluation and checkpoints are not counted. Where only one step was counted, growth from step "
    "to step and work in every n-th step are not seen."
)
ON_CPUS = (
    "If a case ran on CPUs, its counts of kernels, host reads and memory are those of CPU code. On a GPU, a "
    "library can run different code."
)
DRY = "dry run"
LAUNCH = "launch"


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a case ran: dry or launched, on which machine, and how many steps were counted."""

    case: Case
    way: str
    machine: Machine
    steps: int

    @property
    def line(self) -> str:
        """The case, and how and where it ran, as a line of Markdown."""
        place = "on CPUs" if self.machine.device == "cpu" else f"as if on {self.machine.device_name}"
        if self.way != DRY:
            place = place.removeprefix("as if ")
        return f"- {text(self.case.id)}: {self.way} {place}, {plural(self.steps, 'step')} counted"


@dataclass
class ReleaseChanges:
    """The changes of a release."""

    title: str
    same: int = 0  # number of cases without a change; `rows` and `lines` describe the other cases
    rows: list[list[str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # a line for each case that could not be run

    def compare(self, before: Run, now: Run, since: str, name: str) -> None:
        """Add the differences between the runs of a case with the releases `since` and `name`."""
        # Ignore the calls during start-up: each release is launched only once, and the first launch fills
        # caches.
        before = without_start_up_calls(before)
        now = without_start_up_calls(now)
        case = now.case
        arms = {"before": (before,), "runs": (now,), "verdict": judge_counts(before, now)}
        names = {"nodeid": "", "case_id": case.id, "framework": case.framework.name}
        result = Measurement(**names, **arms, baseline_file=None, directory="")
        explanation = explained(result)
        differs = may_differ(from_runs([before]).launches, from_runs([now]).launches)
        values = [] if differs is None else [differs]
        differences = (
            *explanation.findings,
            *explanation.listed,
            *explanation.remarks,
            *explanation.reasons,
            *values,
        )
        self.same += not differences
        if differences:
            self.rows.append([case.id, *(column.text(result) for column in STEP)])
            when = "" if self.title.startswith(f"{since} ") else f", since {since}"
            self.lines.append(f"- {text(case.id)}{when}")
            named = (line.replace(ARM_A, since).replace(ARM_B, name) for line in dict.fromkeys(differences))
            self.lines += [f"  - {text(line)}" for line in named]


def page(
    package: str, steps: Sequence[ReleaseChanges], ran: Sequence[Ran], others: Sequence[str] = ()
) -> str:
    """Return the page as Markdown: how each case ran, then the changes of each release.

    `others` are the releases of other packages that were installed with each release.
    """
    headers = ("case", *(column.heading for column in STEP))
    changed = [step for step in steps if step.rows or step.unknown]
    parts = []
    for step in changed:
        table = [grid(Table(headers=headers, rows=step.rows))] if step.rows else []
        same = [f"- the same in {plural(step.same, 'other case')}"] if step.same else []
        parts += [f"## {step.title}", *table, "\n".join([*step.lines, *step.unknown, *same])]
    same = [f"- {step.title}" for step in steps if step.same and step not in changed]
    if same:
        parts += ["## The same in every case", "\n".join(same)]
    return "\n\n".join([*_head(package, ran, others), *(part.replace(" -> ", ARROW) for part in parts)])


def _head(package: str, ran: Sequence[Ran], others: Sequence[str]) -> list[str]:
    """Return the title, the explanation and limits of the page, and how each case ran."""
    cases = [run.case for run in ran]
    untried = {
        "mixed precision (autocast)": not any(case.precision.endswith("-mixed") for case in cases),
        "gradient accumulation": not any(case.gradient_accumulation > 1 for case in cases),
    }
    names = [name for name, is_untried in untried.items() if is_untried]
    parts = [f"# Releases of {package}", SENSE]
    if any(run.machine.device == "cpu" for run in ran):
        parts.append(ON_CPUS)
    if names and cases:
        parts.append(f"No case uses: {', '.join(names)}.")
    if others:
        parts.append(f"Installed with each release: {text(', '.join(others))}.")
    lines = [run.line for run in ran] or ["No case ran with any release."]
    return [*parts, "\n".join(lines)]
