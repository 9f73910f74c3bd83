"""Results and sessions in a few words and counts: what the terminal, HTML, Markdown and JUnit share. Pure.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from perfsuite.case.case import Unit
from perfsuite.report.text import percent, plural, rate
from perfsuite.results.metric import TOKENS_PER_S, described, in_unit
from perfsuite.results.outcome import QUIET, WORST_FIRST, Check
from perfsuite.results.session_file import Measurement, SessionFile

MARKS = ("shared", "blind")
NOTES_SHOWN = 5
"""Different ones, of all cases that nobody needs to look at."""
REST = "-v or the HTML report tells"


def verdict(result: Measurement) -> str:
    """The outcome, or what excuses a failure."""
    return result.excused or result.outcome


def speed_change(result: Measurement) -> float | None:
    """Of tokens/s against the baseline, relatively: -0.05 is 5 % fewer. None where it was not compared."""
    check = next((check for check in result.verdict.checks if check.metric == TOKENS_PER_S.name), None)
    return None if check is None else change(check)


def speed_unit(results: Iterable[Measurement]) -> Unit:
    """What heads the column of a table: samples where all count them. See `speed`."""
    units = {result.unit for result in results if result.runs}
    return "samples" if units == {"samples"} else "tokens"


def speed(value: float, unit: Unit, heading: Unit) -> str:
    """Tokens/s or samples/s under a heading that says which, or with its own unit under another."""
    return rate(value) if unit == heading else f"{rate(value)} {unit}/s"


def change(check: Check) -> float | None:
    """Return the relative change of the figure, not of its cost; None where it was not compared."""
    return None if check.worsening is None else described(check.metric).change(check.worsening)


def reason(result: Measurement) -> str:
    """Why the verdict is what it is and what it is blind to, in a few words; empty for neither."""
    return "; ".join(filter(None, (_why(result), _blind_to(result))))


def _why(result: Measurement) -> str:
    judged = result.verdict
    telling = [check for check in judged.checks if check.outcome == judged.outcome]
    if judged.failure is not None:
        missing = [check.label for check in telling]
        return ": ".join([judged.failure.replace("_", " "), *([", ".join(missing)] if missing else [])])
    if result.outcome == "unhealthy":
        return f"{plural(len(judged.unhealthy_launches), 'launch')} set aside"
    if result.outcome in QUIET:
        return ""
    changes = [(check.label, change(check)) for check in telling]
    return ", ".join(f"{label} {'not known' if of is None else percent(of)}" for label, of in changes)


def blind(result: Measurement) -> bool:
    """Whether the noise of a metric hides changes as large as its tolerance."""
    return any(check.blind for check in result.verdict.checks)


def marks(result: Measurement) -> list[str]:
    """Beside a verdict: `shared` figures prove nothing, a `blind` gate may have missed a change."""
    return [mark for mark, holds in zip(MARKS, (result.shared, blind(result)), strict=True) if holds]


def _blind_to(result: Measurement) -> str:
    """Which metrics, and the smallest change of each that would be found."""
    found = [
        f"{check.label} below {check.minimum_detectable:.1%}"
        for check in result.verdict.checks
        if check.blind and check.minimum_detectable is not None
    ]
    return f"blind to changes of {', '.join(found)}" if found else ""


def properties(result: Measurement) -> dict[str, str | float]:
    """A result in short for other tools: JUnit's properties, pytest-benchmark's extra info.

    Of a case without tokens, `samples_per_s` and so on.
    """
    told: dict[str, str | float] = {
        "case_id": result.case_id,
        "framework": result.framework,
        "outcome": result.outcome,
        "launches": len(result.runs),
        **result.figures.by_name(),
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
        if check.minimum_detectable is not None:
            told[f"{check.metric}_minimum_detectable"] = check.minimum_detectable
    if result.shared:
        told["shared"] = "others used the machine"
    if blind_metrics := [check.metric for check in result.verdict.checks if check.blind]:
        told["blind"] = in_unit(", ".join(blind_metrics), result.unit)
    return {in_unit(name, result.unit): value for name, value in told.items()}


def tally(results: Iterable[Measurement]) -> list[str]:
    """How many there are of each verdict, the worst first: `2 regressed`, `14 passed (3 blind)`."""
    counts, marked = Counter[str](), Counter[tuple[str, str]]()
    for result in results:
        counts[verdict(result)] += 1
        marked.update((verdict(result), mark) for mark in marks(result))
    told = []
    for word in filter(counts.__getitem__, WORST_FIRST):
        each = [f"{marked[word, mark]} {mark}" for mark in MARKS if marked[word, mark]]
        told.append(f"{counts[word]} {word}" + (f" ({', '.join(each)})" if each else ""))
    return told


def headline(sessions: Sequence[SessionFile]) -> str:
    """`1 failed, 2 regressed, 14 passed, 3 skipped`: the worst first."""
    told = tally(result for session in sessions for result in session.results)
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
    if launches := len(session.interrupted_launches):
        lost += f" ({plural(launches, 'launch')} of it in results.json)"
    return f"The session was interrupted{lost}; what came after it was not measured."


def needs_words(result: Measurement) -> bool:
    """Whether somebody may have to act upon a result, so that it is explained and not just counted."""
    return verdict(result) not in QUIET


def in_short(results: Iterable[Measurement]) -> list[str]:
    """What there is to know of results that nobody explains one by one: few lines, however many they are."""
    told, by_note = [], dict[str, list[str]]()
    quiet = [result for result in results if not needs_words(result)]
    for result in quiet:
        if (known := known_issue(result)) is not None:
            told.append(f"{result.case_id}: {known}")
        for note in launch_notes(result):
            by_note.setdefault(note, []).append(result.case_id)
    for note, cases in list(by_note.items())[:NOTES_SHOWN]:
        told.append(f"note on {cases[0] if len(cases) == 1 else plural(len(cases), 'case')}: {note}")
    if len(by_note) > NOTES_SHOWN:
        told.append(f"{plural(len(by_note) - NOTES_SHOWN, 'note')} more: {REST}")
    if hidden := [result for result in quiet if blind(result)]:
        told.append(
            f"blind: in {len(hidden)} of {plural(len(quiet), 'case')} noise hides changes as large as the "
            f"tolerance; a baseline of more launches helps (perfsuite power). How large: {REST}"
        )
    return told


def known_issue(result: Measurement) -> str | None:
    """Whether the known issue of its case is still there. None: it has none, or another failure hides it."""
    issue = next((run.case.known_issue for run in result.runs), None)
    if issue is None or (result.excused is None and result.outcome == "failed"):
        return None
    if result.excused is not None:
        return f"known issue still there: {issue.url}"
    return f"known issue gone: {issue.url}: take known_issue from the case"


def notes(result: Measurement) -> list[str]:
    """What a reader of the figures should know, each once: of the launches, their health, and the machine."""
    return list(dict.fromkeys([*launch_notes(result), *machine_notes([result])]))


def machine_notes(results: Iterable[Measurement]) -> list[str]:
    """What could not be found out of the GPUs that these ran on, each once."""
    machines = [run.machine for result in results for run in result.runs]
    return list(dict.fromkeys(m.note for m in machines if m.device == "cuda" and m.note is not None))


def launch_notes(result: Measurement) -> list[str]:
    """What should be known of the launches and their health, each once."""
    runs = result.runs
    told = Counter(f"a fault was injected: {run.inject}" for run in runs if run.inject is not None)
    told += Counter(note for run in runs for note in run.notes)
    told += Counter(note for run in runs if run.health is not None for note in run.health.notes)
    return [f"{note} ({plural(n, 'launch')})" if n > 1 else note for note, n in told.items()]
