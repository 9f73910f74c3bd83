"""Suggest commands for one case: measure it again, compare, bisect, accept. Pure."""

import re
import shlex
from collections.abc import Collection, Iterator
from typing import NamedTuple

from perfsuite.results.baseline import MIN_ACCEPTED
from perfsuite.results.session_file import ArmFacts, Measurement, SessionFile

GOOD = "COMMIT"  # stands for a commit that only the reader knows
REASON = "WHY"
ACCEPTANCE = {
    "regressed": "Is it intended? Accept it",
    "improved": "Keep the improvement",
    "recorded": "Review it",
}  # purposes of accepting a baseline, by outcome


class NextStep(NamedTuple):
    """A command and its purpose."""

    purpose: str
    command: str


def next_steps(result: Measurement, session: SessionFile, *, commands: Collection[str]) -> list[NextStep]:
    """Return the next steps for a case. `commands` has the names of perfsuite's commands."""
    again = NextStep("Count it again" if result.dry else "Measure it again", _again(result, session))
    if _inject(result) is not None:
        return [again]
    bisection = _bisection(result, session) if "bisect" in commands else ()
    return [*_comparison(result, session), *bisection, *_acceptance(result, session), again]


def _comparison(result: Measurement, session: SessionFile) -> Iterator[NextStep]:
    if _is_searched(result) and not session.arms and session.commit is not None:
        against = _command("compare", "--against", GOOD, *_way(result), *_network(result), result.case_id)
        yield NextStep(f"Is it the code? ({GOOD}: a commit that was fast enough)", against)


def _bisection(result: Measurement, session: SessionFile) -> Iterator[NextStep]:
    ends = _ends(session)
    if _is_searched(result) and ends is not None:
        yield NextStep("Which commit is it?", _command("bisect", *ends, *_way(result), result.case_id))


def _is_searched(result: Measurement) -> bool:
    return result.outcome == "regressed" and result.excused is None


def _ends(session: SessionFile) -> tuple[str, ...] | None:
    """Return the options that name the good and the bad commit; None if bisect would refuse to search."""
    if not session.arms:
        is_committed = session.commit is not None and not session.dirty
        return ("--good", GOOD) if is_committed else None
    good, bad = session.arms
    is_same_python = good.facts.get("interpreter") == bad.facts.get("interpreter")
    if not (_is_commit(good) and is_same_python):
        return None
    if bad.text == ".":
        return ("--good", good.text) if _is_committed(bad) else None
    return ("--good", good.text, "--bad", bad.text) if _is_commit(bad) else None


def _is_commit(arm: ArmFacts) -> bool:
    """Return whether an arm is only a commit, without a variable, release, image or lock file.

    The pattern also matches an interpreter that is given as a single word. `_ends` excludes such an arm,
    because its fact `interpreter` differs from that of the other arm.
    """
    return arm.text != "." and re.fullmatch(r"[^\s=:]+", arm.text) is not None and _is_committed(arm)


def _is_committed(arm: ArmFacts) -> bool:
    """Return whether the arm's commit is known and, according to its facts, has no uncommitted changes."""
    return re.fullmatch(r"[0-9a-f]+", arm.facts.get("commit", "")) is not None


def _acceptance(result: Measurement, session: SessionFile) -> Iterator[NextStep]:
    if session.arms or result.excused is not None or result.outcome not in ACCEPTANCE:
        return
    only_counts = ("--only-counts",) if _way(result) else ()
    if not only_counts and len(result.verdict.healthy(result.runs)) < MIN_ACCEPTED:
        enough = shlex.join(["pytest", result.nodeid, f"--perf-min-launches={MIN_ACCEPTED}"])
        yield NextStep(f"To accept it, measure {MIN_ACCEPTED} launches first", enough)
    reason = () if result.outcome == "recorded" else ("--reason", REASON)
    accept = _command("baseline", "accept", *only_counts, *reason, result.case_id)
    yield NextStep(ACCEPTANCE[result.outcome], accept)


def _way(result: Measurement) -> tuple[str, ...]:
    """Return the option that makes `compare` or `bisect` judge the kind of evidence behind this result.

    It is `--dry` or `--counts`. There is no option for times.
    """
    if result.dry:
        return ("--dry",)
    by_times = any(check.outcome == result.outcome for check in result.verdict.checks)
    counts = result.verdict.counts
    by_counts = counts is not None and counts.outcome == result.outcome
    return ("--counts",) if by_counts and not by_times else ()


def _again(result: Measurement, session: SessionFile) -> str:
    inject = _inject(result)
    if session.arms:
        a, b = session.arms
        words = ["compare", "--against", a.text, "--arm", b.text]
        words += ["--dry"] if result.dry else ["--counts"] if result.by_counts else []
        words += ["--inject", inject] if inject else []
        return _command(*words, *_network(result), result.case_id)
    if result.dry:
        device = f"--device={result.runs[-1].machine.device}"
        return _command("dry-run", device, *_network(result), result.case_id)
    return shlex.join(["pytest", result.nodeid, *([f"--perf-inject={inject}"] if inject else [])])


def _network(result: Measurement) -> list[str]:
    """Return the option that names the network between a dry run's simulated machines.

    The result is empty if no network was given.
    """
    interconnect = result.runs[-1].machine.interconnect if result.dry else None
    return [] if interconnect is None else ["--interconnect", interconnect]


def _inject(result: Measurement) -> str | None:
    return next((run.inject for run in result.runs if run.inject is not None), None)


def _command(*words: str) -> str:
    return shlex.join(["perfsuite", *words])
