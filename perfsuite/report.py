"""What people read at the end: table and explanations, and what all reports share.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from perfsuite.judge import Check, Outcome
from perfsuite.metric import TOKENS_PER_S
from perfsuite.results import Result, SessionFile

STYLES: dict[Outcome, str] = {
    "passed": "green",
    "improved": "green",
    "recorded": "cyan",
    "regressed": "red",
    "failed": "red",
}

WORST_FIRST: tuple[Outcome, ...] = (
    "failed",
    "regressed",
    "unhealthy",
    "inconclusive",
    "undecided",
    "improved",
    "recorded",
    "passed",
)
"""The order in which reports show the verdicts."""
QUIET: frozenset[Outcome] = frozenset({"recorded", "passed"})
"""Verdicts that nobody needs to act upon."""

NARROW = 120
"""Columns, below which a case's id stands on a line of its own and some figures are left out."""


def table(results: Sequence[Result], *, color: bool, width: int) -> str:
    """The results as a terminal table, fitted into `width` columns (80 or more)."""
    narrow = width < NARROW
    grid = Table(box=None, header_style="bold", pad_edge=False, show_edge=False)
    if not narrow:
        grid.add_column("case", overflow="fold", ratio=1, min_width=20)
    figures = [_figures(result, narrow=narrow) for result in results]
    for heading in figures[0]:
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    for result, told in zip(results, figures, strict=True):
        outcome = result.verdict.outcome
        verdict = f"[{STYLES.get(outcome, 'yellow')}]{outcome}"
        if result.excused is not None:
            verdict = f"[yellow]{result.excused}"
        grid.add_row(*([] if narrow else [result.case_id]), *told.values(), verdict)
    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, color_system="standard" if color else None
    )
    console.print(grid)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    if narrow:
        heading, *rows = lines
        named = [
            line for result, row in zip(results, rows, strict=True) for line in (result.case_id, f"  {row}")
        ]
        lines = [f"  {heading}", *named]
    return "\n".join(lines)


def _figures(result: Result, *, narrow: bool) -> dict[str, str]:
    """By column heading."""
    f, change = result.figures, speed_change(result)
    told = {
        "tokens/s": "-" if f.tokens_per_s is None else f"{f.tokens_per_s:,.0f}",
        "per device": "-" if f.tokens_per_s_per_device is None else f"{f.tokens_per_s_per_device:,.0f}",
        "p50 ms": "-" if f.step_s_p50 is None else f"{1e3 * f.step_s_p50:.1f}",
        "p95 ms": "-" if f.step_s_p95 is None else f"{1e3 * f.step_s_p95:.1f}",
        "memory": "-" if f.peak_memory_bytes is None else amount(f.peak_memory_bytes, "bytes"),
        "MFU": "-" if f.mfu is None else f"{f.mfu:.1%}",
        "vs base": "-" if change is None else percent(change),
        "launches": str(len(result.runs)),
    }
    left_out = {"per device", "launches"} if narrow else set()
    return {heading: value for heading, value in told.items() if heading not in left_out}


def speed_change(result: Result) -> float | None:
    """Of tokens/s against the baseline, relatively: -0.05 is 5 % fewer. None where it was not compared."""
    check = next((check for check in result.verdict.checks if check.metric == TOKENS_PER_S.name), None)
    return None if check is None or check.worsening is None else 1 / (1 + check.worsening) - 1


def reason(result: Result) -> str:
    """Why the verdict is what it is, in a few words; empty where nothing needs to be said."""
    verdict = result.verdict
    telling = [check for check in verdict.checks if check.outcome == verdict.outcome]
    if result.outcome == "failed" and verdict.failure is not None:
        missing = [check.label for check in telling]
        return ": ".join([verdict.failure.replace("_", " "), *([", ".join(missing)] if missing else [])])
    if result.outcome == "unhealthy":
        return f"{_plural(len(verdict.unhealthy_launches), 'launch')} set aside"
    if result.outcome in QUIET:
        return ""
    return ", ".join(f"{check.label} {_signed(check)}" for check in telling)


def _signed(check: Check) -> str:
    """The change for people: tokens/s fall when time per token grows."""
    if check.worsening is None:
        return "not known"
    change = 1 / (1 + check.worsening) - 1 if check.unit == TOKENS_PER_S.unit else check.worsening
    return percent(change)


def percent(change: float) -> str:
    """A relative change, signed; never `-0.0%`."""
    return f"{round(change, 3) + 0.0:+.1%}"


def properties(result: Result) -> dict[str, str | float]:
    """A result in short for other tools: JUnit's properties, pytest-benchmark's extra info."""
    told: dict[str, str | float] = {
        "case_id": result.case_id,
        "framework": result.framework,
        "outcome": result.outcome,
        "launches": len(result.runs),
        **{name: value for name, value in result.figures if value is not None},
    }
    if result.runs:
        told["hardware_class"] = result.runs[-1].machine.hardware_class
    if why := reason(result):
        told["reason"] = why
    for check in result.verdict.checks:
        if check.worsening is not None:
            told[f"{check.metric}_worsening"] = check.worsening
        if check.interval is not None:
            told[f"{check.metric}_low"], told[f"{check.metric}_high"] = check.interval
    return told


def headline(sessions: Sequence[SessionFile]) -> str:
    """`1 failed, 2 regressed, 14 passed, 3 skipped`: the worst first."""
    counts = Counter(result.outcome for session in sessions for result in session.results)
    told = [f"{counts[outcome]} {outcome}" for outcome in WORST_FIRST if counts[outcome]]
    if skipped := sum(len(session.skipped) for session in sessions):
        told.append(f"{skipped} skipped")
    return ", ".join(told) or "nothing was measured"


def provenance(session: SessionFile) -> dict[str, str]:
    """Where the figures of a session come from: hardware, torch, commit, time."""
    runs = [run for result in session.results for run in result.runs]
    machines = {run.machine for run in runs} or {session.machine}
    torch = {run.observed.environment.get("torch", "unknown") for run in runs if run.observed is not None}
    commit = session.commit[:12] if session.commit else "none: not in git"
    return {
        "hardware": ", ".join(sorted(f"{each.hardware_class} ({each.device_name})" for each in machines)),
        "torch": ", ".join(sorted(torch)) or "not observed",
        "commit": commit + (" with uncommitted changes" if session.dirty else ""),
        "started": session.started_at.replace("T", " ").replace("+00:00", " UTC"),
        "perfsuite": session.perfsuite,
    }


def interruption(session: SessionFile) -> str | None:
    """That a session was cut short, and in what; None if it was not."""
    if session.status == "complete":
        return None
    lost = f": {session.interrupted_case} was not judged" if session.interrupted_case else ""
    return f"The session was interrupted{lost}; what came after it was not measured."


def needs_words(result: Result) -> bool:
    """Whether there is more to tell of a result than its line in the table."""
    noted = any(run.notes for run in result.runs)
    blind = any(check.blind for check in result.verdict.checks)
    return result.outcome not in QUIET or noted or blind


def explanation(result: Result) -> str:
    """Everything about one result in words: each metric against its baseline, failures, what changed."""
    verdict = result.verdict
    lines = [f"{result.case_id}: {verdict.outcome} after {_plural(len(result.runs), 'launch')}"]
    lines += [f"  {reason}" for reason in verdict.reasons]
    lines += [f"  {sentence(check)}" for check in verdict.checks]
    if (issue := next((run.case.known_issue for run in result.runs), None)) is not None:
        if result.excused is not None:
            lines.append(f"  known issue still there: {issue}")
        elif verdict.outcome != "failed":
            lines.append(f"  known issue gone: {issue}: take known_issue from the case")
    figures = result.figures
    if figures.gpu_utilisation is not None:
        lines.append(f"  GPU utilisation: {figures.gpu_utilisation:.0f} %")
    if figures.energy_per_token_j is not None:
        lines.append(f"  energy: {1e3 * figures.energy_per_token_j:.2f} mJ per token")
    if figures.own_tokens_per_s is not None and figures.tokens_per_s is not None:
        apart = figures.own_tokens_per_s / figures.tokens_per_s - 1
        own = amount(figures.own_tokens_per_s, "tokens/s")
        lines.append(f"  {result.framework}'s own log: {own} tokens/s ({apart:+.1%} beside this clock)")
    notes = Counter(note for run in result.healthy_runs for note in run.notes)
    lines += [f"  note: {note}" + (f" ({n} launches)" if n > 1 else "") for note, n in notes.items()]
    for machine in {run.machine for run in result.runs}:
        if machine.device == "cuda" and machine.note:
            lines.append(f"  note: {machine.note}")
    if verdict.changed:
        lines.append("  changed since the baseline: " + "; ".join(verdict.changed))
    if result.baseline_file:
        lines.append(f"  baseline: {result.baseline_file}")
    lines.append(f"  files of the launches: {result.directory}")
    for run in result.runs:
        if run.failure is not None and run.failure.traceback:
            where = "" if run.failure.rank is None else f" of rank {run.failure.rank}"
            traceback = run.failure.traceback.rstrip().splitlines()
            lines += [f"  traceback{where}:", *(f"    {line}" for line in traceback)]
    return "\n".join(lines)


def sentence(check: Check) -> str:
    """A check in words: what was measured, against what, by how much, allowed how much, how sure."""
    text = f"{check.label}: {amount(check.measured, check.unit)}"
    if check.baseline is not None:
        text += f", baseline {amount(check.baseline, check.unit)}"
    if check.worsening is not None:
        text += f": {_change(check, check.worsening)}"
        if check.interval is not None:
            low, high = check.interval
            text += f" (99 % interval {low:+.1%} to {high:+.1%})"
        text += f", {check.tolerance:.1%} allowed: {check.outcome}"
        if check.outcome == "regressed" and check.worsening <= check.tolerance:
            text += " (surely worse, and the tolerance is not ruled out)"
    elif check.outcome == "failed" or check.outcome == "inconclusive":
        text += f": {check.outcome}"
    if check.blind:
        text += f"; blind: this gate finds only {check.minimum_detectable:.1%} or more reliably"
    return f"{text}; {check.note}" if check.note else text


def _change(check: Check, worsening: float) -> str:
    more = "more" if worsening >= 0 else "less"
    what = {"tokens/s": f"{more} time per token", "bytes": more, "": more}[check.unit]
    return f"{abs(worsening):.1%} {what}"


def amount(value: float | None, unit: str) -> str:
    """A figure for people: bytes in binary units, tokens/s with separators."""
    if value is None:
        return "not measured"
    if unit == "bytes":
        size, name = (2**30, "GiB") if value >= 2**30 else (2**20, "MiB")
        return f"{value / size:.2f} {name}" if name == "GiB" else f"{value / size:.1f} {name}"
    return f"{value:,.0f}" if unit else f"{value:.2f}"


def _plural(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}es"
