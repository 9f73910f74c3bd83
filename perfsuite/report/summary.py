"""Summarise cases and sessions in a few words, for terminal, HTML, Markdown and JUnit. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from perfsuite.case.case import Unit
from perfsuite.case.hardware import AllocatedNode, Allocation, Machine
from perfsuite.report import counts as report_counts
from perfsuite.report import expected
from perfsuite.report.answer import answer
from perfsuite.report.nodes import scalings
from perfsuite.report.text import cut, detectable, percent, plural
from perfsuite.results.amounts import rate
from perfsuite.results.metric import in_unit
from perfsuite.results.outcome import QUIET, WORST_FIRST, Check, Outcome, Verdict
from perfsuite.results.session_file import (
    ArmFacts,
    CaseChange,
    JudgeChanges,
    Measurement,
    SessionFile,
    SessionReference,
)
from perfsuite.verdict.comparability import UNEXPLAINED

MARKS = ("shadow", "shared", "blind", "not counted", "dry run")  # marks that can follow a verdict
NOTES_SHOWN = 5  # maximum number of different notes on cases that need no action
# Maximum number of sentences on changes to files that affect verdicts. results.json has all of them.
MOST_JUDGE_CHANGES = 30
UNCLAIMED_SHOWN = 10  # maximum number of names in the list of baselines without a case
LONGEST_SENTENCE = 160  # maximum length of a finding in a table, in characters. The cost is not included
JUDGED_ALL_THE_SAME = ("unlike", "loss")
"""Failures after which metrics are still judged, to show regressions. This is possible because the launches
ran to the end."""
IF_MEANT = "; if the difference is intended, accept a new baseline, or delete this one if it is not reviewed"
"""Text after the path of a baseline, if the case might have been changed on purpose."""
CASES_SHOWN = 20  # maximum number of listed cases that arm B lacks or has changed
NOT_COMPARED = "Cases of arm A that were not compared, so this is not a pass"
OTHER_CASES = "Other cases in which the arms differ"
REST = "see -v or the HTML report"


def verdict(result: Measurement) -> str:
    """Return the outcome in a word, or the excuse for a failure."""
    return result.excused or result.outcome


def speed_unit(results: Iterable[Measurement]) -> Unit:
    """Return the unit for the heading of speeds: samples if every case counts samples, otherwise tokens."""
    units = {result.unit for result in results if result.runs}
    return "samples" if units == {"samples"} else "tokens"


def speed(value: float, unit: Unit, heading: Unit) -> str:
    """Format a speed in `unit` per second, with the unit if it differs from the column's heading."""
    return rate(value) if unit == heading else f"{rate(value)} {unit}/s"


def reason(result: Measurement) -> str:
    """Explain the verdict and name blind metrics, in a few words; can be empty."""
    return "; ".join(filter(None, (_why(result), blind_to(result))))


def since(verdict: Verdict) -> str:
    """Return the heading for changes in the environment."""
    return "changed since the baseline" if verdict.against is None else f"different from {verdict.against}"


def _why(result: Measurement) -> str:
    judged = result.verdict
    changes = [change(check) for check in decisive(judged)]
    if judged.failure is not None:
        why = ", ".join(check.label for check in decisive(judged))
        if judged.failure in JUDGED_ALL_THE_SAME:
            why = _cause_first(judged, "regressed", changes)
        return ": ".join(filter(None, (judged.failure.replace("_", " "), why)))
    if result.outcome == "unhealthy":
        if not result.runs:
            return "; ".join(judged.reasons)
        if judged.moved_by_machine:
            return f"{', '.join(map(change, judged.moved_by_machine))}, although nothing changed"
        return f"{plural(len(judged.unhealthy_launches), 'launch')} set aside"
    if result.outcome in QUIET:
        return ""
    return _cause_first(judged, judged.outcome, changes)


def change(check: Check) -> str:
    """Return the metric of a check and its change, such as `tokens/s -7.3%`."""
    return f"{check.label} {'not known' if check.change is None else percent(check.change)}"


def _cause_first(judged: Verdict, outcome: Outcome, changes: Sequence[str]) -> str:
    """Return the changed work of a step, and then the changed metrics, because work affects metrics."""
    return "; ".join([*_counts_that_tell(judged, outcome), *filter(None, [", ".join(changes)])])


def decisive(judged: Verdict) -> list[Check]:
    """Return the checks that decided a verdict."""
    outcome = "regressed" if judged.failure in JUDGED_ALL_THE_SAME else judged.outcome
    return [check for check in judged.checks if check.outcome == outcome]


def _counts_that_tell(judged: Verdict, outcome: Outcome) -> list[str]:
    """Return the largest change of a count with this outcome, and how many more there are."""
    findings = () if judged.counts is None else judged.counts.findings
    deciding = [finding for finding in findings if finding.outcome == outcome]
    if not deciding:
        return []
    largest, *others = deciding
    more = f"; and {plural(len(others), 'count')} more" if others else ""
    return [largest.in_words(LONGEST_SENTENCE) + more]


def marks(result: Measurement) -> list[str]:
    """Return the marks of a verdict.

    `shadow`: without `--perf-shadow`, the case would have failed its session. `shared`: other jobs used the
    machine, so figures prove nothing. `blind`: the gate can miss a change of the allowed size. `dry run`:
    nothing was computed. `not counted`: the work of a step could not be counted.
    """
    is_blind = any(check.blind for check in result.verdict.checks)
    holding = (result.shadow, result.shared, is_blind, not_counted(result) is not None, result.dry)
    return [mark for mark, holds in zip(MARKS, holding, strict=True) if holds]


def not_counted(result: Measurement) -> str | None:
    """Explain why a case has no counts to judge: `not counted: ...`. None if it has counts."""
    check = result.verdict.counts
    return None if check is None or check.outcome != "not counted" else report_counts.not_counted(check)


def blind_to(result: Measurement) -> str:
    """Name the blind metrics and the smallest change that would be found in each; empty if there are none."""
    least = {check.label: detectable(check) for check in result.verdict.checks if check.blind}
    metrics = [f"{label} {f'below {size}' if size else 'of any size'}" for label, size in least.items()]
    return f"blind to changes of {', '.join(metrics)}" if metrics else ""


def properties(result: Measurement) -> dict[str, str | float]:
    """Return the properties of a case for JUnit and pytest-benchmark. Their names use the case's unit."""
    blind = ", ".join(check.metric for check in result.verdict.checks if check.blind)
    words = {
        "case_id": result.case_id,
        "framework": result.framework,
        "outcome": result.outcome,
        "excused": result.excused,
        "hardware_class": result.hardware_class,
        "reason": reason(result),
        "shadow": "it would have failed" if result.shadow else None,
        "shared": "other jobs used the machine" if result.shared else None,
        "waivers": "; ".join(result.waivers),
        "blind": in_unit(blind, result.unit),
        "counts": not_counted(result),
    }
    values: dict[str, str | float] = {name: text for name, text in words.items() if text}
    values |= {"launches": len(result.runs), **result.figures.by_name()}
    for check in result.verdict.checks:
        low, high = check.interval or (None, None)
        of_check = {
            "change": check.change,
            "change_low": low,
            "change_high": high,
            "minimum_detectable": check.minimum_detectable,
            "probe_exponent": check.probe_exponent,
        }
        values |= {f"{check.metric}_{name}": value for name, value in of_check.items() if value is not None}
    return {in_unit(name, result.unit): value for name, value in values.items()}


def tally(results: Iterable[Measurement]) -> list[str]:
    """Count the cases with each verdict, worst first, such as `2 regressed` and `14 passed (3 blind)`."""
    counts = Counter[str]()
    marked = Counter[tuple[str, str]]()
    for result in results:
        counts[verdict(result)] += 1
        marked.update((verdict(result), mark) for mark in marks(result))
    parts = []
    for word in filter(counts.__getitem__, WORST_FIRST):
        marked_counts = [f"{marked[word, mark]} {mark}" for mark in MARKS if marked[word, mark]]
        parts.append(f"{counts[word]} {word}" + (f" ({', '.join(marked_counts)})" if marked_counts else ""))
    return parts


def headline(sessions: Sequence[SessionFile]) -> str:
    """Return the totals of all sessions, worst first: `1 failed, 2 regressed, 14 passed, 3 skipped`.

    Sessions that did not end come first, because their remaining results are unknown.
    """
    counts = tally(result for session in sessions for result in session.results)
    skips = [skip.not_reached for session in sessions for skip in session.skipped]
    left_out = ((sum(skips), "not reached"), (len(skips) - sum(skips), "skipped"))
    shown = [f"{number} {word}" for number, word in left_out if number]
    vanished = sum(len(session.not_compared) for session in sessions)
    if vanished:
        shown.append(f"{vanished} not compared")
    if any(session.cases_unknown for session in sessions):
        shown.append("cases of the arms unknown")
    if not counts and not shown:
        shown = ["nothing was measured"]
    return ", ".join([*incomplete(sessions), *counts, *shown])


def incomplete(sessions: Sequence[SessionFile]) -> list[str]:
    """Count the sessions that did not end: `interrupted`, or `2 of 8 sessions running or killed`."""
    number_of = Counter(session.status for session in sessions if session.status != "complete")
    words = {"interrupted": "interrupted", "running": "running or killed"}
    if len(sessions) == 1:
        return [words[status] for status in number_of]
    of_all = f"of {plural(len(sessions), 'session')}"
    return [f"{number} {of_all} {words[status]}" for status, number in sorted(number_of.items())]


def provenance(session: SessionFile) -> dict[str, str]:
    """Return the origin of a session's figures: hardware, torch, commit, time, perfsuite.

    In a comparison, the answers to its three questions (`answer`) come first.
    """
    commit = session.commit[:12] if session.commit else "not known to git"
    parts = [
        f"{_time(part.started_at)}: {plural(part.cases, 'case')}, {part.status}" for part in session.parts
    ]
    return {
        **answer(session),
        "hardware": hardware(session.results) or _machine(session.machine),
        **_allocated(session.machine),
        "torch": _torch(session),
        "commit": commit + (" with uncommitted changes" if session.dirty else ""),
        "started": _time(session.started_at),
        "time in launches": took(session),
        "perfsuite": session.perfsuite,
        **arm_descriptions(session.arms),
        **reference_description(session.reference),
        **({"parts": "; ".join(parts)} if len(parts) > 1 else {}),
    }


def _torch(session: SessionFile) -> str:
    """Return the versions of torch that ranks observed, or the version in pytest's environment."""
    runs = [run for result in session.results for run in result.runs]
    observed = {run.observed.environment.get("torch", "unknown") for run in runs if run.observed is not None}
    if not (observed or session.arms) and "torch" in session.conditions.environment:
        return session.conditions.environment["torch"]
    return ", ".join(sorted(observed)) or "not observed"


def took(session: SessionFile) -> str:
    """Return the total duration of all launches and their GPU hours, such as `52 min, 6.9 GPU hours`."""
    runs = [run for result in session.results for run in (*result.before, *result.runs) if not run.dry]
    if session.reference is not None:
        runs += [run for canary in session.reference.canaries for run in canary.runs]
    gpu_s = sum(run.duration_s * run.case.topology.world_size for run in runs if run.machine.device == "cuda")
    gpus = f", {gpu_s / 3600:,.1f} GPU hours" if gpu_s else ""
    return f"{sum(run.duration_s for run in runs) / 60:,.1f} min{gpus}"


def arm_descriptions(arms: Sequence[ArmFacts]) -> dict[str, str]:
    """Describe both arms, as they were given and as they were resolved; empty without arms."""
    return {f"arm {letter}": _described(arm) for letter, arm in zip("AB", arms, strict=False)}


def reference_description(reference: SessionReference | None) -> dict[str, str]:
    """Describe the reference of a session as it was given and resolved; empty without a reference."""
    return {} if reference is None else {"reference": _described(reference.arm)}


def _described(arm: ArmFacts) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in arm.facts.items())
    return f"{arm.text} ({facts})"


def _allocated(machine: Machine) -> dict[str, str]:
    """Return the facts about an allocation that are known; none if the session had no allocation."""
    allocation = machine.allocation
    if allocation is None:
        return {}
    interfaces = {node.interface for node in allocation.nodes if node.interface is not None}
    facts = {
        "nodes": ", ".join(node.name for node in allocation.nodes),
        "job": allocation.job_id,
        "cores": _cores(allocation, machine),
        "interface": ", ".join(sorted(interfaces)),
        "network": ", ".join(f"{name}={value}" for name, value in sorted(allocation.variables.items())),
    }
    return {name: value for name, value in facts.items() if value}


def _cores(allocation: Allocation, machine: Machine) -> str:
    """Describe the cores of each node, such as `96 of 192 (12 per GPU) on each node`; empty if unknown."""
    by_node = {node.name: _cores_of(node, machine) for node in allocation.nodes if node.cores is not None}
    if len(set(by_node.values())) == 1 and len(by_node) == len(allocation.nodes):
        return f"{next(iter(by_node.values()))} on each node"
    return ", ".join(f"{text} on {name}" for name, text in by_node.items())


def _cores_of(node: AllocatedNode, machine: Machine) -> str:
    assert node.cores is not None
    of_machine = "" if node.cores_of_machine is None else f" of {node.cores_of_machine}"
    per_gpu = f" ({node.cores / machine.devices:.3g} per GPU)" if machine.device == "cuda" else ""
    return f"{node.cores}{of_machine}{per_gpu}"


def _time(iso: str) -> str:
    return iso.replace("T", " ").replace("+00:00", " UTC")


def only_dry(results: Iterable[Measurement]) -> bool:
    """Return whether at least one case was run, and every run was a dry run."""
    return {result.dry for result in results if result.runs} == {True}


def hardware(results: Iterable[Measurement]) -> str:
    """Return the machines of these cases: hardware class and device; empty if nothing was launched."""
    runs = [run for result in results for run in result.runs]
    return ", ".join(sorted({_machine(run.machine, simulated=run.dry) for run in runs}))


def _machine(machine: Machine, *, simulated: bool = False) -> str:
    return f"{machine.hardware_class} ({machine.device_name}{', simulated' if simulated else ''})"


def interruption(session: SessionFile) -> str | None:
    """Report that a session was interrupted or is running, and name its case; None if it is complete.

    Even if the newest part of a session is complete, a case can be missing, because an earlier part was
    interrupted during that case.
    """
    earlier = session.interrupted_before
    if session.status == "complete":
        if session.interrupted_case is None:
            return None
        missing = ", ".join([*earlier, session.interrupted_case])
        were = "were" if earlier else "was"
        return f"An earlier part of the session was interrupted: {missing} {were} not judged."
    lost = f": {session.interrupted_case} was not judged" if session.interrupted_case else ""
    launches = sum(run.case.id not in earlier for run in session.interrupted_launches)
    if launches:
        lost += f" ({plural(launches, 'launch')} of it in results.json)"
    if earlier:
        lost += f", and neither was {', '.join(earlier)}"
    if session.status == "running":
        return f"The session is running, or was killed{lost}. Later cases are not measured."
    return f"The session was interrupted{lost}. Later cases were not measured."


def judge_changes(branches: Iterable[JudgeChanges | None]) -> list[tuple[str, list[str]]]:
    """Describe how branches change the files that judge them.

    Returns a heading and sentences for each branch, without duplicates.
    """
    sections = []
    for changes in dict.fromkeys(branches):
        if changes is None or not changes.sentences:
            continue
        heading = "Checks of this branch:"
        if changes.base is not None:
            heading = f"This branch changes the files that judge it, compared with {changes.base[:12]}:"
        sections.append((heading, cut(changes.sentences, MOST_JUDGE_CHANGES)))
    return sections


def judge_change_lines(branches: Iterable[JudgeChanges | None]) -> list[str]:
    """Return `judge_changes` as lines of text."""
    return [
        line
        for heading, lines in judge_changes(branches)
        for line in (heading, *(f"  {entry}" for entry in lines))
    ]


def case_changes(session: SessionFile) -> list[str]:
    """List the cases of arm A that arm B lacks or has changed, one per line below a heading."""
    if session.cases_unknown is not None:
        return [session.cases_unknown]
    vanished = session.not_compared
    others = [change for change in session.case_changes if change not in vanished]
    lines = []
    for heading, changes in ((NOT_COMPARED, vanished), (OTHER_CASES, others)):
        if changes:
            entries = [f"  {change.case_id}: {_became(change)}" for change in changes]
            lines += [f"{heading}:", *cut(entries, CASES_SHOWN)]
    return lines


def _became(change: CaseChange) -> str:
    words = {
        "deleted": "deleted in arm B, or no longer collected there",
        "changed": f"changed in arm B: {change.difference}",
        "re-marked": f"marked differently in arm B: {change.difference}",
        "deselected": "deselected in arm B by a hook or an option of pytest",
        "new": "new in arm A since the branches diverged",
        "skipped": f"skipped in arm B: {change.difference}".removesuffix(": "),
    }
    where = f" ({change.nodeid.partition('[')[0]})" if change.nodeid else ""
    return words[change.kind] + where


def unclaimed(baselines: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return a heading and the reviewed baselines that belong to no case; None if there are none."""
    if not baselines:
        return None
    has = "has" if len(baselines) == 1 else "have"
    return f"{plural(len(baselines), 'reviewed baseline')} {has} no case", cut(baselines, UNCLAIMED_SHOWN)


def unclaimed_lines(baselines: Sequence[str]) -> list[str]:
    """Return `unclaimed` as one line of text."""
    section = unclaimed(baselines)
    return [] if section is None else [f"{section[0]}: {'; '.join(section[1])}"]


def needs_words(result: Measurement) -> bool:
    """Return whether a case might need action. Such a case is explained, and not only added to the totals."""
    return verdict(result) not in QUIET


def in_short(results: Sequence[Measurement]) -> list[str]:
    """Summarise, in a few lines, all cases that need no action."""
    quiet = [result for result in results if not needs_words(result)]
    lines = [f"{result.case_id}: {excuse}" for result in quiet for excuse in excuses(result)]
    lines += scalings(results)
    by_note = defaultdict[str, list[str]](list)
    for result in quiet:
        for note in quiet_notes(result):
            by_note[note].append(result.case_id)
    for note, cases in list(by_note.items())[:NOTES_SHOWN]:
        lines.append(f"note on {cases[0] if len(cases) == 1 else plural(len(cases), 'case')}: {note}")
    if len(by_note) > NOTES_SHOWN:
        lines.append(f"{plural(len(by_note) - NOTES_SHOWN, 'note')} not shown: {REST}")
    checks = [result.verdict.counts for result in quiet if result.verdict.counts is not None]
    listed = sum(any(finding.outcome == "passed" for finding in check.findings) for check in checks)
    if listed:
        lines.append(f"{plural(listed, 'case')} with changed counts that are not judged: {REST}")
    hidden = sum("blind" in marks(result) for result in quiet)
    if hidden:
        lines.append(
            f"blind: in {hidden} of {plural(len(quiet), 'case')}, noise hides changes as large as the "
            f"tolerance; a baseline of more launches helps. The smallest change that is found in each "
            f"case: {REST}"
        )
    return lines


def quiet_notes(result: Measurement) -> list[str]:
    """Return the notes on a case that needs no action.

    These are the reason why the case was not counted, unexplained choices of a library, and `launch_notes`.
    If the launches become the case's first baseline, the speed relative to the expected speed is also noted.
    """
    unexplained = [reason for reason in result.verdict.reasons if reason.startswith(UNEXPLAINED)]
    of_first = expected.of_launches(result) if result.verdict.is_recorded else []
    return [*filter(None, [not_counted(result)]), *unexplained, *launch_notes(result), *of_first]


def excuses(result: Measurement) -> list[str]:
    """Return the circumstances of a verdict: injected faults, waivers, and the state of a known issue."""
    faults = dict.fromkeys(f"a fault was injected: {run.inject}" for run in result.runs if run.inject)
    reasons = [*faults, *result.waivers]
    issue = next((run.case.known_issue for run in result.runs), None)
    if issue is None or result.dry or (result.excused is None and result.outcome == "failed"):
        return reasons
    if result.outcome == "failed":
        return [*faults, f"known issue still there: {issue.url}"]
    return [*reasons, f"known issue gone: {issue.url}. Remove known_issue from the case"]


def notes(result: Measurement) -> list[str]:
    """Return the notes on the launches and the machine, each once."""
    return list(dict.fromkeys([*launch_notes(result), *machine_notes([result])]))


def machine_notes(results: Iterable[Measurement]) -> list[str]:
    """Return a note on each fact that could not be determined about a GPU. Dry runs are left out."""
    machines = [run.machine for result in results for run in result.runs if not run.dry]
    return list(dict.fromkeys(m.note for m in machines if m.device == "cuda" and m.note is not None))


def launch_notes(result: Measurement) -> list[str]:
    """Return the notes on the launches and their health, each once, with the number of launches."""
    runs = result.runs
    counts = Counter(note for run in runs for note in run.notes)
    counts += Counter(note for run in runs if run.health is not None for note in run.health.notes)
    return [f"{note} ({plural(n, 'launch')})" if n > 1 else note for note, n in counts.items()]
