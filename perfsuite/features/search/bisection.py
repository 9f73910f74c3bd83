"""Find the first bad commit, or the first bad version of a package, by bisection.

Each step of the search compares the middle suspect with the good arm, and is saved immediately. A search that
is started again continues where it was interrupted.
"""

import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from packaging.version import InvalidVersion, Version
from pydantic import Field, model_validator

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.documents import Data, Document
from perfsuite.errors import CaseError, FileError, GitError, PackageError
from perfsuite.inputs.git import git
from perfsuite.launch.arm import RELEASE, Arm, resolve
from perfsuite.launch.download import Consent, refuse_large
from perfsuite.launch.installer import versions
from perfsuite.report.text import plural
from perfsuite.results.environment import installed
from perfsuite.results.metric import TOKENS_PER_S, described
from perfsuite.results.outcome import NOT_JUDGED, Finding, Verdict
from perfsuite.results.session_file import Measurement
from perfsuite.session.option_table import MOST_TOLERANCE
from perfsuite.verdict.exact import NOT_IN_BASELINE

_OF_STEPS = re.compile(r"^steps? [\d, -]+(: |$)")
"""The steps that a note names before the name of a count, such as `step 5: ` in `step 5: kernels`."""


class CandidateResult(Data):
    """The comparison of one candidate with the good arm."""

    name: str  # the commit or the version
    # The terms of `git bisect`. `skipped`: it is unknown whether the candidate is good.
    outcome: Literal["good", "bad", "skipped"]
    # Relative change of the metric from the good arm: -0.05 is 5% fewer tokens/s, or 5% less memory.
    change: float | None = None
    interval: tuple[float, float] | None = None  # 99% interval of `change`
    launches: int = 0
    # The reason for the outcome: why the candidate was skipped, or what its counts showed. Empty if the
    # outcome was decided by the candidate's times.
    why: str = ""


class BisectFile(Document):
    """`search.json`: the state of a search."""

    schema_version: Literal[1] = 1
    case_id: str
    good: str
    # All candidates after the good arm, up to and including the bad arm, oldest first.
    candidates: tuple[str, ...] = Field(min_length=1)
    # The metric or count that is worse in the bad arm. It decides every step of the search. None until the
    # bad arm is tested.
    metric: str | None = None
    # The growth of the metric or count that each step of the search tolerates: half of the growth in the bad
    # arm. For the cost of a metric (seconds per token, bytes), the logarithm of the growth is halved; for a
    # count, the growth itself is halved. Until the bad arm is tested, this is the growth of seconds per token
    # that is tolerated in the bad arm; None means the default tolerance.
    tolerance: float | None = None
    steps: tuple[CandidateResult, ...] = ()

    @model_validator(mode="after")
    def _steps_narrow_the_candidates(self) -> Self:
        left = self.candidates
        for step in self.steps:
            if step.name not in left:
                raise ValueError(
                    f"steps: {step.name!r} was not one of the remaining candidates when it was tested"
                )
            left = _narrowed(left, step)
        if self.steps and (self.metric is None or self.tolerance is None):
            raise ValueError("steps: must be empty until metric and tolerance are known")
        return self

    @property
    def suspects(self) -> tuple[str, ...]:
        """The candidates that can still be the first bad one, oldest first. The last is bad or untested."""
        left = self.candidates
        for step in self.steps:
            left = _narrowed(left, step)
        return left

    @property
    def next(self) -> str | None:
        """The next candidate to test: the bad arm, then the middle untested suspect. None at the end."""
        if self.metric is None:
            return self.candidates[-1]
        tested = {step.name for step in self.steps}
        left = [name for name in self.suspects if name not in tested]
        return left[(len(left) - 1) // 2] if left else None


def _narrowed(left: tuple[str, ...], step: CandidateResult) -> tuple[str, ...]:
    """Return the candidates that are still suspects after a step."""
    if step.outcome == "bad":
        return left[: left.index(step.name) + 1]
    if step.outcome == "good":
        return left[left.index(step.name) + 1 :]
    return left


class UndecidedError(CaseError):
    """The machine was unhealthy, or too noisy to decide whether the bad arm is worse. A retry can succeed."""


Compare = Callable[[Arm, Arm, BisectFile], Measurement]
"""A function that compares the good arm with another arm, using the tolerance of the search. The comparison
goes on until the metric of the search is decided. If that metric is None, every metric must be decided."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The candidates of a search, and a function that builds their arms."""

    good: str
    candidates: tuple[str, ...]
    arm: Callable[[str], Arm]  # builds the arm of a candidate, or the good arm


def search(state: BisectFile, history: History, compare: Compare) -> Iterator[BisectFile]:
    """Test candidates until the first bad one is known or all suspects are tested. Yield each new state.

    Raises `CaseError` if the bad arm is not worse than the good arm, and `UndecidedError` if this machine
    cannot decide whether it is worse.
    """
    good = history.arm(history.good)
    while (name := state.next) is not None:
        if state.metric is None:
            state = _bad_tested(state, compare(good, history.arm(name), state))
        else:
            state = state.replace(steps=(*state.steps, _tested(state, name, good, history, compare)))
        yield state


def _bad_tested(state: BisectFile, result: Measurement) -> BisectFile:
    """Set the metric or count of the search, and its tolerance, from the comparison with the bad arm."""
    name = state.candidates[-1]
    verdict = result.verdict
    _check_measured(name, result)
    worse = [check for check in verdict.checks if check.outcome == "regressed" and check.change is not None]
    grown = _grown(verdict)
    if grown:
        metric = grown[0].name
        half = abs(grown[0].now - grown[0].before) / 2
    elif worse:
        check = min(worse, key=lambda finding: finding.metric != TOKENS_PER_S.name)  # tokens/s first
        assert check.change is not None
        assert check.baseline is not None
        cost = described(check.metric).cost_change(check.change, check.baseline)
        metric = check.metric
        half = min(math.sqrt(1 + cost) - 1, MOST_TOLERANCE)
    else:
        raise _not_worse(name, state.good, verdict)
    state = state.replace(metric=metric, tolerance=half)
    return state.replace(steps=(_judged(state, name, verdict),))


def _not_worse(name: str, good: str, verdict: Verdict) -> CaseError:
    growing = [] if verdict.counts is None else verdict.counts.findings
    kept = next((finding.sentence for finding in growing if finding.outcome == "regressed"), None)
    if verdict.checks and kept is not None:
        leaves = f"each of its steps leaves more objects behind ({kept})"
        return CaseError(f"{name} is not slower than {good}, but {leaves}. Add --counts")
    if not verdict.checks:
        no_times = "times were not compared: to compare them, leave out --dry and --counts"
        why = "; ".join(verdict.reasons) or no_times
        comparison = f"{name} does not do more work in a step than {good}: {verdict.outcome}"
        return CaseError(f"{comparison}. There is nothing to search for ({why})")
    vague = [check for check in verdict.checks if check.outcome == "inconclusive" and check.interval]
    if vague:
        why = f", {vague[0].note}" if vague[0].note else ""
        return UndecidedError(
            f"{name} compared with {good}: {vague[0].label} is inconclusive ({vague[0].change:+.1%}{why}). "
            "Nothing was searched. Give the case more steps, or use a quieter machine"
        )
    shown = verdict.check(TOKENS_PER_S.name)
    by = "" if shown is None or shown.change is None else f" ({shown.change:+.1%} {shown.label})"
    comparison = f"{name} is not worse than {good}: {verdict.outcome}{by}"
    return CaseError(f"{comparison}. There is nothing to search for; try a lower --tolerance")


def _tested(state: BisectFile, name: str, good: Arm, history: History, compare: Compare) -> CandidateResult:
    """Compare one candidate with the good arm. Candidates that cannot be built or run are skipped."""
    try:
        arm = history.arm(name)
    except (CaseError, GitError, PackageError) as error:
        return CandidateResult(name=name, outcome="skipped", why=str(error))
    result = compare(good, arm, state)
    if result.outcome != "failed" or any(run.failure for run in result.before):
        _check_measured(name, result)
    return _judged(state, name, result.verdict)


def _check_measured(name: str, result: Measurement) -> None:
    reasons = "; ".join(result.verdict.reasons)
    if result.verdict.outcome == "unhealthy":
        raise UndecidedError(
            f"{name} could not be compared because the machine was unhealthy: {reasons}. Run the same "
            "command again to continue"
        )
    if result.verdict.outcome == "failed":
        raise CaseError(f"{name} cannot be compared with the good arm: {reasons}")


def _judged(state: BisectFile, name: str, verdict: Verdict) -> CandidateResult:
    """Judge a candidate by the metric or count of the search."""
    assert state.metric is not None
    assert state.tolerance is not None
    step = CandidateResult(name=name, outcome="skipped", launches=verdict.launches)
    if verdict.outcome == "failed" or (verdict.outcome == "inconclusive" and not verdict.checks):
        return step.replace(why="; ".join(verdict.reasons))
    if not verdict.checks:
        grown = [
            finding.sentence
            for finding in _grown(verdict)
            if finding.name == state.metric and abs(finding.now - finding.before) > state.tolerance
        ]
        if grown:
            return step.replace(outcome="bad", why=grown[0])
        unknown = _why_unknown(verdict, state.metric)
        return step.replace(why=unknown) if unknown else step.replace(outcome="good", why="no more work")
    check = verdict.check(state.metric)
    if check is None:
        return step.replace(why=f"it has no {state.metric}")
    step = step.replace(change=check.change, interval=check.interval)
    if check.outcome in ("passed", "improved", "regressed"):
        return step.replace(outcome="bad" if check.outcome == "regressed" else "good")
    return step.replace(why=f"{check.label}: {check.outcome} after {plural(verdict.launches, 'launch')}")


def _why_unknown(verdict: Verdict, metric: str) -> str:
    """Return why an increase of a count might not have been seen; empty if nothing can hide an increase."""
    notes = () if verdict.counts is None else verdict.counts.notes
    return next((note for note in notes if _can_hide(note, metric)), "")


def _can_hide(note: str, metric: str) -> bool:
    """Return whether an increase of the count `metric` can be hidden in the counts that a note is about."""
    subject, is_of_span_or_count, _ = note.partition(NOT_JUDGED)
    if subject == metric:
        return True
    if note.endswith(NOT_IN_BASELINE):  # everything in the good arm was compared
        return False
    if not is_of_span_or_count:  # the note is about ranks, or about all counts
        return True
    part = _OF_STEPS.sub("", subject)
    return not part or f"{metric}: ".startswith(f"{part}: ")


def _grown(verdict: Verdict) -> list[Finding]:
    """Return the counts that are worse, largest change first. Empty if times were compared."""
    counts = verdict.counts
    if counts is None or verdict.checks:
        return []
    return [finding for finding in counts.findings if finding.outcome == "regressed"]


def of_commits(good: str, bad: str, *, root: Path, store: Path) -> History:
    """Return the commits on the branch (first parents) between two arms that differ only in their commit."""
    if any(map(RELEASE.fullmatch, f"{good} {bad}".split())):
        raise CaseError("a search of commits cannot use PACKAGE==VERSION: give a lock file, or use --package")
    first = resolve("--good", good, root=root, store=store)
    last = resolve("--bad", bad, root=root, store=store)
    if first.commit is None or last.commit is None:
        raise CaseError(f"{root} is not a git repository: search the versions of a package with --package")
    if last.dirty:
        raise CaseError("--bad has uncommitted changes: commit them, or give a commit")
    same_packages = first.lock == last.lock and (first.lock or first.python == last.python)
    if first.given != last.given or not same_packages:
        raise CaseError(
            f"--good {good!r} and --bad {bad!r} differ in more than their commit. Give them the same "
            "variables and interpreter, or the same lock file"
        )
    between = git("rev-list", "--first-parent", "--reverse", f"{first.commit}..{last.commit}", cwd=root)
    if not between or git("rev-list", "--max-count=1", first.commit, f"^{last.commit}", cwd=root):
        raise CaseError(f"--good {first.commit[:12]} is not an ancestor of --bad {last.commit[:12]}")
    lock = f":{first.lock}" if first.lock else ""
    others = [f"{name}={value}" for name, value in first.given.items()]
    others += [first.python] if first.python != sys.executable and not lock else []

    def arm(commit: str) -> Arm:
        return resolve("--bad", shlex.join([commit + lock, *others]), root=root, store=store)

    return History(good=first.commit, candidates=tuple(between.split()), arm=arm)


def of_versions(
    package: str, good: str, bad: str, *, root: Path, store: Path, consent: Consent = refuse_large
) -> History:
    """Return the releases of a package between two versions. Each is installed separately."""
    first = _version("--good", good)
    last = _version("--bad", bad)
    if first >= last:
        raise CaseError(f"--good {good} is not an older version of {package} than --bad {bad}")
    releases = versions(package)
    between = [
        release
        for release in releases
        if first < release <= last and (release == last or not release.is_prerelease)
    ]
    if not between or between[-1] != last:
        newest = ", ".join(map(str, releases[-10:]))
        raise CaseError(f"pip does not find {package}=={bad}. The newest versions are: {newest}")

    def arm(version: str) -> Arm:
        return resolve("--bad", f"{package}=={version}", root=root, store=store, consent=consent)

    return History(good=str(first), candidates=tuple(map(str, between)), arm=arm)


def _version(option: str, text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise CaseError(
            f"{option} {text!r} is not a version: with --package, give versions such as 2.11.0"
        ) from None


def begun(
    store: Path, case: Case, history: History, tolerance: float | None = None, *others: object
) -> tuple[Path, BisectFile]:
    """Return the file of a search, and its state: the stored one, or a new one if the file does not exist.

    Searches with the same case, arms, environment, tolerance and `others` have the same file. Raises
    `FileError` if the file cannot be read or belongs to another search.
    """
    new = BisectFile(case_id=case.id, good=history.good, candidates=history.candidates, tolerance=tolerance)
    good = history.arm(history.good)
    key = [documents.plain(new), documents.plain(case), good.text, good.python, dict(good.given), installed()]
    file = store / "bisect" / documents.digest([*key, *others]) / "search.json"
    if not file.exists():
        return file, new
    stored = documents.read(file, BisectFile)
    for field in ("case_id", "good", "candidates"):
        if getattr(stored, field) != getattr(new, field):
            raise FileError(
                f"{file}: the field {field} belongs to another search, so the file was edited or damaged. "
                "Delete it to start a new search"
            )
    # Test skipped candidates again, because the reason, such as a network that was down, might be gone.
    return file, stored.replace(steps=tuple(step for step in stored.steps if step.outcome != "skipped"))
