"""The page of `perfsuite releases`: what each release changed in a step of which cases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfsuite.report.columns import STEP
from perfsuite.report.explained import explained
from perfsuite.report.markdown import grid, text
from perfsuite.report.text import Table, plural
from perfsuite.results.baseline import from_runs
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.arms import ARM_A, ARM_B, judge_counts
from perfsuite.verdict.loss import may_differ


@dataclass
class Step:
    """What a release changed."""

    title: str
    same: int = 0  # how many cases it did not change. `rows` and `lines` tell of those that it did
    rows: list[list[str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # what could not be run, and why

    def compare(self, before: Run, now: Run, since: str, name: str) -> None:
        """Add what differs between the runs of a case under the release `since` and under this one."""
        case, arms = now.case, {"before": (before,), "runs": (now,), "verdict": judge_counts(before, now)}
        names = {"nodeid": "", "case_id": case.id, "framework": case.framework.name}
        result = Measurement(**names, **arms, baseline_file=None, directory="")
        told = explained(result)
        differs = may_differ(from_runs([before]).launches, from_runs([now]).launches)
        values = [] if differs is None else [differs]
        found = (*told.findings, *told.listed, *told.remarks, *told.reasons, *values)
        self.same += not found
        if found:
            self.rows.append([case.id, *(column.text(result) for column in STEP)])
            when = "" if self.title.startswith(f"{since} ") else f", since {since}"
            self.lines.append(f"- {text(case.id)}{when}")
            named = (line.replace(ARM_A, since).replace(ARM_B, name) for line in dict.fromkeys(found))
            self.lines += [f"  - {text(line)}" for line in named]


def page(package: str, steps: Sequence[Step], ways: Mapping[str, str]) -> str:
    """What the releases changed, as Markdown; `ways` in which each case ran."""
    parts = [f"# Releases of {package}", "\n".join(f"- {text(name)}: {way}" for name, way in ways.items())]
    headers = ("case", *(column.heading for column in STEP))
    changed = [step for step in steps if step.rows or step.unknown]
    for step in changed:
        table = [grid(Table(headers=headers, rows=step.rows))] if step.rows else []
        same = [f"- the same in {plural(step.same, 'other case')}"] if step.same else []
        parts += [f"## {step.title}", *table, "\n".join([*step.lines, *step.unknown, *same])]
    same = [f"- {step.title}" for step in steps if step.same and step not in changed]
    return "\n\n".join([*parts, *(["## The same in every case", "\n".join(same)] if same else [])])
