"""Name the commands that help with one case: measure it again, compare, bisect, accept. Pure."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from perfsuite.results.session_file import ArmFacts, Measurement, SessionFile

GOOD = "COMMIT"  # replaces a commit that only the reader knows
REASON = "WHY"


class NextStep(NamedTuple):
    """A command and its purpose."""

    purpose: str
    command: str


def next_steps(result: Measurement, session: SessionFile) -> list[NextStep]:
    """Return the commands for a case; the last one measures it again."""
    again = NextStep("Count it again" if result.dry else "Measure it again", _again(result, session))
    is_injected = _inject(result) is not None
    return [again] if is_injected else [*_searches(result, session), *_acceptance(result, session), again]


def _searches(result: Measurement, session: SessionFile) -> Iterator[NextStep]:
    if result.outcome != "regressed" or result.excused is not None:
        return
    way = _way(result)
    if session.arms:
        commit = _only_commit(session.arms[0])
        if commit is not None:
            bad = session.arms[1].text
            words = ("bisect", "--good", commit, *(() if bad == "." else ("--bad", bad)))
            yield NextStep("Which commit is it?", _command(*words, *way, result.case_id))
        return
    against = _command("compare", "--against", GOOD, *way, result.case_id)
    yield NextStep(f"Is it the code? ({GOOD}: one that was fast enough)", against)
    yield NextStep("Which commit is it?", _command("bisect", "--good", GOOD, *way, result.case_id))


def _acceptance(result: Measurement, session: SessionFile) -> Iterator[NextStep]:
    if session.arms or result.excused is not None:
        return
    counts = ("--counts",) if _way(result) else ()
    if result.outcome in ("regressed", "improved"):
        purpose = "Is it meant? Accept it" if result.outcome == "regressed" else "Keep the improvement"
        yield NextStep(purpose, _command("baseline", "accept", *counts, "--reason", REASON, result.case_id))
    elif result.outcome == "recorded":
        yield NextStep("Review it", _command("baseline", "accept", *counts, result.case_id))


def _way(result: Measurement) -> tuple[str, ...]:
    """Return the option of a comparison that judges what decided: counts alone, or times."""
    if result.dry:
        return ("--dry",)
    by_times = any(check.outcome == result.outcome for check in result.verdict.checks)
    counts = result.verdict.counts
    by_counts = counts is not None and counts.outcome == result.outcome
    return ("--counts",) if by_counts and not by_times else ()


def _only_commit(arm: ArmFacts) -> str | None:
    """Return the commit of an arm that is a commit and nothing else: no variable, release, image or path."""
    return arm.text if re.fullmatch(r"[^\s=:/]+", arm.text) and arm.text != "." else None


def _again(result: Measurement, session: SessionFile) -> str:
    inject = _inject(result)
    if session.arms:
        a, b = session.arms
        words = ["compare", "--against", a.text, "--arm", b.text]
        words += ["--dry"] if result.dry else ["--counts"] if result.by_counts else []
        words += ["--inject", inject] if inject else []
        return _command(*words, result.case_id)
    if result.dry:
        return _command("dry-run", f"--device={result.runs[-1].machine.device}", result.case_id)
    return shlex.join(["pytest", result.nodeid, *([f"--perf-inject={inject}"] if inject else [])])


def _inject(result: Measurement) -> str | None:
    return next((run.inject for run in result.runs if run.inject is not None), None)


def _command(*words: str) -> str:
    return shlex.join(["perfsuite", *words])
