"""Tests of the search for the first bad commit or version. Comparisons are fake, git and pip are real."""

import json
import re
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite import documents
from perfsuite.errors import CaseError, FileError, PackageError
from perfsuite.features.search import bisection
from perfsuite.features.search.bisection import (
    BisectFile,
    CandidateResult,
    History,
    UndecidedError,
    begun,
    search,
)
from perfsuite.inputs.git import git
from perfsuite.launch.arm import Arm
from perfsuite.results.counts import merged
from perfsuite.results.metric import described
from perfsuite.results.outcome import Check, CountCheck, Finding, Outcome, Verdict
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.arms import judge_counts
from tests.packages import only_index, write_wheel
from tests.processes import executable
from tests.samples import make_case, make_result, make_run, metric_check
from tests.synthetic import make_repository
from tests.twin_counts import counts, launch

SLOWER = 0.1


def check(cost: float, tolerance: float, name: str = "tokens_per_s", **changes: Any) -> Check:
    """Return the check of a metric whose cost grew by the share `cost`. `tolerance` is the allowed share."""
    metric = described(name)
    values = {
        "outcome": "regressed" if cost > tolerance else "passed",
        "allowed": metric.bound(tolerance),
        "change": metric.change(cost),
        "interval": metric.interval((cost - 0.01, cost + 0.01)),
    }
    return metric_check(metric=name, label=name, **values | changes)


def decided(outcome: Outcome, *checks: Check, launches: int = 6, why: str = "") -> Verdict:
    return Verdict(outcome=outcome, launches=launches, checks=checks, reasons=(why,) if why else ())


class Stand:
    """A history with the candidates "1", "2", and so on. From candidate `first_bad` on, all are slower."""

    def __init__(self, count: int, first_bad: int, broken: Collection[int] = (), **instead: Verdict) -> None:
        """Take the verdicts on some candidates from `instead`: `_4`, for example, is that on candidate 4."""
        names = tuple(str(number) for number in range(1, count + 1))
        self.first_bad = first_bad
        self.broken = broken
        self.instead = instead
        self.compared: list[BisectFile] = []
        self.names: list[str] = []  # the candidates that were compared with the good arm
        self.history = History(good="0", candidates=names, arm=self.arm)
        self.saved: list[BisectFile] = []

    def arm(self, name: str) -> Arm:
        if int(name) in self.broken:
            raise PackageError(f"{name} cannot be built")
        return Arm(text=name)

    def compare(self, a: Arm, b: Arm, state: BisectFile) -> Measurement:
        assert a.text == "0"
        self.compared.append(state)
        self.names.append(b.text)
        cost = SLOWER if int(b.text) >= self.first_bad else 0.001
        verdict = self.instead.get(f"_{b.text}", decided("passed", check(cost, state.tolerance or 0.03)))
        failure = Failure(kind="crash", message="boom") if "arm A failed" in verdict.reasons else None
        return make_result(make_run(), verdict=verdict).replace(before=(make_run(failure=failure),))

    def search(self, state: BisectFile | None = None) -> BisectFile:
        start = BisectFile(case_id="case", good="0", candidates=self.history.candidates)
        self.saved += search(state or start, self.history, self.compare)
        return self.saved[-1]


@settings(deadline=None)
@given(st.data())
def test_only_the_first_bad_one_stays_a_suspect(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    first_bad = data.draw(st.integers(1, count))
    broken = data.draw(st.sets(st.integers(1, max(1, count - 1)))) - {count}
    stand = Stand(count, first_bad, broken)
    state = stand.search()
    assert str(first_bad) in state.suspects
    assert {int(name) for name in state.suspects[:-1]} <= broken
    assert len(stand.names) == len(set(stand.names))
    assert [len(saved.steps) for saved in stand.saved] == [*range(1, len(state.steps) + 1)]
    assert broken or len(stand.names) <= 1 + (count - 1).bit_length()


@pytest.mark.parametrize(("cost", "allowed"), [(SLOWER, 1.1**0.5 - 1), (9.0, 0.5)])
def test_each_step_allows_half_of_the_slowdown(cost: float, allowed: float) -> None:
    stand = Stand(4, 2, _4=decided("regressed", check(cost, 0.03)))
    stand.search()
    first, *others = [state.tolerance for state in stand.compared]
    assert first is None
    assert others == [pytest.approx(allowed)] * len(others)


VAGUE = check(0.09, 0.15, outcome="inconclusive")


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (decided("failed", why="arm B failed: crash: boom"), "arm B failed: crash: boom"),
        (decided("inconclusive", VAGUE, launches=24), "tokens_per_s: inconclusive after 24 launches"),
        (decided("inconclusive", why="nothing was counted"), "nothing was counted"),
        (decided("passed", check(0, 0.05, "peak_memory_bytes")), "it has no tokens_per_s"),
    ],
    ids=["it fails", "it is not decided", "it was not counted", "it lacks the metric"],
)
def test_skips_undecided_candidates_with_reasons(verdict: Verdict, why: str) -> None:
    state = Stand(8, 5, {4}, _3=verdict).search()
    assert state.suspects == ("3", "4", "5")
    whys = {step.name: step.why for step in state.steps if step.outcome == "skipped"}
    assert whys == {"3": why, "4": "4 cannot be built"}
    assert Stand(3, 3, _1=verdict).search().suspects == ("3",), "2 is good, so 1 does not matter"


def test_searches_for_the_bad_arms_worse_metric() -> None:
    larger = decided("regressed", check(0.0, 0.03), check(0.5, 0.05, "peak_memory_bytes"))
    slower = decided("regressed", check(0.2, 0.03), check(0.0, 0.05, "peak_memory_bytes"))
    stand = Stand(2, 2, _2=larger, _1=slower)
    state = stand.search()
    assert (state.metric, state.suspects) == ("peak_memory_bytes", ("2",))
    assert state.tolerance == pytest.approx(1.5**0.5 - 1)
    assert [compared.metric for compared in stand.compared] == [None, "peak_memory_bytes"]


LEAK = Finding(
    field="objects kept per step",
    quantity="objects kept per step",
    unit="objects",
    before=0,
    now=5,
    ranks="0",
    outcome="regressed",
    sentence="objects kept per step: 0 -> 5 (Spec +5)",
)
GROWING = CountCheck(outcome="regressed", findings=(LEAK,))


def test_searches_for_time_where_objects_are_kept_too() -> None:
    slower = decided("regressed", check(0.2, 0.03)).replace(counts=GROWING)
    stand = Stand(2, 2, _2=slower, _1=decided("passed", check(0.0, 0.03)))
    state = stand.search()
    assert (state.metric, state.suspects) == ("tokens_per_s", ("2",))


def test_growth_alone_is_searched_with_counts() -> None:
    growing = decided("regressed", check(0.0, 0.03)).replace(counts=GROWING)
    more = r"2 is not slower than 0, but each of its steps leaves more objects behind .*\. Add --counts$"
    with pytest.raises(CaseError, match=more):
        Stand(2, 2, _2=growing).search()


def test_short_span_allows_for_half_of_its_cost() -> None:
    """One second is added before spans are compared: 0.05 -> 0.55 s is judged like 1.05 -> 1.55 s."""
    name = "seconds of start-up: data"
    longer = check(0.0, 0.25, name, outcome="regressed", change=10.0, baseline=0.05)
    stand = Stand(2, 2, _2=decided("regressed", longer), _1=decided("passed", check(0.0, 0.25, name)))
    state = stand.search()
    assert state.metric == name
    assert state.tolerance == pytest.approx((1.55 / 1.05) ** 0.5 - 1)


def counted(kernels: int, flops: int = 1000) -> Verdict:
    """Return the verdict on an arm with these kernels and FLOPs in a step.

    The good arm has 10 kernels and 1,000 FLOPs in a step.
    """
    arms = [counts(kernels={"forward": k}, flops={"forward": f}) for k, f in ((10, 1000), (kernels, flops))]
    return judge_counts(*map(launch, arms))


def test_count_is_bad_beyond_half_its_growth() -> None:
    state = Stand(4, 1, _4=counted(20), _2=counted(15, flops=9000), _3=counted(16)).search()
    assert (state.metric, state.tolerance, state.suspects) == ("kernels", 5, ("3",))
    assert [(step.name, step.outcome, step.why) for step in state.steps] == [
        ("4", "bad", "kernels in forward: 10 -> 20 a step"),
        ("2", "good", "no more work"),
        ("3", "bad", "kernels in forward: 10 -> 16 a step"),
    ]


def test_candidate_without_the_count_is_skipped() -> None:
    """In a compiled step, kernels are not counted, so their number is not known to be good."""
    arms = map(launch, (counts(kernels={"forward": 10}), counts(kernels=None)))
    state = Stand(4, 1, _4=counted(20), _2=judge_counts(*arms), _3=counted(20)).search()
    whys = {step.name: step.why for step in state.steps if step.outcome == "skipped"}
    assert whys["2"] == "kernels: not judged, not counted in these launches"


def test_event_search_looks_at_that_event() -> None:
    """The bad arm has 10 more kernels in the evaluation. Another candidate has them in the steps."""
    evaluates = counts(kernels={"forward": 10}, spans={"evaluate": counts(kernels={"forward": 10})})
    in_evaluation = evaluates.replace(spans={"evaluate": counts(kernels={"forward": 20})})
    in_steps = evaluates.replace(kernels={"forward": 20})
    good, bad, other = map(launch, (evaluates, in_evaluation, in_steps))
    state = Stand(2, 2, _2=judge_counts(good, bad), _1=judge_counts(good, other)).search()
    assert (state.metric, state.suspects) == ("evaluate: kernels", ("2",))


EVALUATES = counts(kernels={"forward": 10}, spans={"evaluate": counts(kernels={"forward": 10})})
KERNELS = counts(kernels={"forward": 10})
MORE_READS = KERNELS.replace(host_reads={"forward": 60})
STEPS = KERNELS.replace(also_counted=(5,))
NOT_SEEN = "evaluate was not seen, and might be done in a way that is not recognised"


@pytest.mark.parametrize(
    ("good", "bad", "candidate", "why"),
    [
        (
            launch(EVALUATES),
            launch(EVALUATES.replace(spans={"evaluate": counts(kernels={"forward": 20})})),
            launch(counts(kernels={"forward": 12})),
            NOT_SEEN,
        ),
        (
            launch(KERNELS, KERNELS),
            launch(KERNELS, counts(kernels={"forward": 20})),
            launch(counts=merged({0: MORE_READS})),
            "rank 1 is not judged: not counted in these launches",
        ),
        (
            launch(STEPS),
            launch(STEPS.replace(spans={"step 5": counts(kernels={"forward": 20}, step=5)})),
            launch(MORE_READS),
            "step 5: not judged, not counted in these launches",
        ),
    ],
    ids=["event", "rank", "step"],
)
def test_count_in_an_unseen_place_is_not_good(good: Run, bad: Run, candidate: Run, why: str) -> None:
    """The candidate has more of another count, so its verdict is `regressed`."""
    verdict = judge_counts(good, candidate)
    assert verdict.outcome == "regressed"
    state = Stand(2, 1, _2=judge_counts(good, bad), _1=verdict).search()
    assert [(step.outcome, step.why) for step in state.steps[1:]] == [("skipped", why)]


def test_gap_in_another_count_hides_no_increase() -> None:
    """The candidate lacks a phase and has another one. The kernels of its steps are those of the good arm."""
    phases = KERNELS.replace(spans={"rollout": KERNELS})
    other = MORE_READS.replace(spans={"other": KERNELS})
    verdict = judge_counts(launch(phases), launch(other))
    notes = verdict.counts.notes if verdict.counts is not None else ()
    assert "rollout: not judged, not counted in these launches" in notes
    state = Stand(2, 2, _2=counted(20), _1=verdict).search()
    assert [step.outcome for step in state.steps] == ["bad", "good"]


@pytest.mark.parametrize(
    ("verdict", "kind", "words"),
    [
        (decided("passed", check(0.001, 0.03)), CaseError, r"is not worse .*: passed \(-0\.1% tokens_per_s"),
        (
            decided("inconclusive", why="nothing was counted"),
            CaseError,
            r"does not do more work .* \(nothing was counted\)$",
        ),
        (decided("inconclusive", VAGUE), UndecidedError, r"compared with 0: .* is inconclusive \(-8\.3%\)"),
        (decided("failed", why="arm B failed"), CaseError, "cannot be compared with the good arm: arm B"),
        (decided("unhealthy", why="others"), UndecidedError, "could not be .* unhealthy: others"),
    ],
    ids=["as fast", "not counted", "hidden by noise", "failed", "unhealthy"],
)
def test_bad_arm_must_be_known_to_be_worse(verdict: Verdict, kind: type[CaseError], words: str) -> None:
    stand = Stand(4, 2, _4=verdict)
    with pytest.raises(CaseError, match=f"^4 {words}") as raised:
        stand.search()
    assert type(raised.value) is kind
    assert stand.names == ["4"]


@pytest.mark.parametrize(("outcome", "why"), [("unhealthy", "others used it"), ("failed", "arm A failed")])
def test_innocent_candidate_does_not_end_the_search(outcome: Outcome, why: str) -> None:
    stand = Stand(8, 3, _4=decided(outcome, why=why))
    with pytest.raises(CaseError, match=f"^4 (could not|cannot) be compared.*{why}"):
        stand.search()
    (state,) = stand.saved
    stand.instead.clear()
    assert stand.search(state).suspects == ("3",)
    assert stand.names.count("8") == 1


# Commits


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a repository with 17 commits, and return the commits."""
    make_repository(tmp_path / "repo", 17)
    monkeypatch.chdir(tmp_path / "repo")
    return git("rev-list", "--reverse", "HEAD", cwd=Path()).split()


def of_commits(good: str, bad: str, tmp_path: Path) -> History:
    return bisection.of_commits(good, bad, root=Path.cwd(), store=tmp_path / "store")


def test_commits_between_two_arms_are_candidates(repository: list[str], tmp_path: Path) -> None:
    python = executable(tmp_path / "python", f'exec {sys.executable} "$@"')
    history = of_commits(f"{repository[0]} X='a b' {python}", f". X='a b' {python}", tmp_path)
    assert (history.good, list(history.candidates)) == (repository[0], repository[1:])
    arm = history.arm(repository[3])
    assert (arm.commit, arm.given, arm.python) == (repository[3], {"X": "a b"}, str(python))
    assert arm.directory is not None
    assert git("rev-parse", "HEAD", cwd=arm.directory).strip() == repository[3]


def test_refuses_arms_that_cannot_be_searched(repository: list[str], tmp_path: Path) -> None:
    for good, bad, words in (
        ("HEAD", repository[0], "is not an ancestor of"),
        ("HEAD", ".", "is not an ancestor of"),
        (f"{repository[0]} X=1", "HEAD", "differ in more than their commit"),
        (repository[0], "HEAD installed==1", "cannot use PACKAGE==VERSION: give a lock file"),
    ):
        with pytest.raises(CaseError, match=words):
            of_commits(good, bad, tmp_path)
    Path("code.py").write_text("1")
    git("add", "code.py", cwd=Path())
    with pytest.raises(CaseError, match=r"uncommitted changes"):
        of_commits(repository[0], ".", tmp_path)
    with pytest.raises(CaseError, match=r"not a git repository: search .* with --package"):
        bisection.of_commits(".", ".", root=tmp_path, store=tmp_path / "store")


# Versions


def of_versions(good: str, bad: str, tmp_path: Path) -> History:
    return bisection.of_versions("slow-thing", good, bad, root=tmp_path, store=tmp_path / "store")


@pytest.mark.nightly
def test_releases_are_candidates_of_a_bisection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = only_index(tmp_path / "index", monkeypatch)
    for version in ("1.0", "1.1", "2.0rc1", "2.0"):
        write_wheel(index, "slow-thing", version, f"VERSION = {version!r}\n")
    monkeypatch.chdir(tmp_path)
    history = of_versions("1.0", "2.0", tmp_path)
    assert (history.good, history.candidates) == ("1.0", ("1.1", "2.0"))
    arm = history.arm("1.1")
    directory = Path(arm.packages)
    assert (directory / "slow_thing.py").read_text() == "VERSION = '1.1'\n"
    assert arm.variables["PYTHONPATH"].startswith(str(directory))
    with pytest.raises(CaseError, match=r"pip finds no slow-thing 9 for Python .*versions are 1\.1, .*2\.0$"):
        history.arm("9")
    with pytest.raises(CaseError, match=r"pip does not find slow-thing==3\. The newest versions are: .*2\.0"):
        of_versions("1.0", "3", tmp_path)


def test_refuses_an_invalid_or_newer_good_version(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"--good 'main' is not a version"):
        of_versions("main", "2.0", tmp_path)
    with pytest.raises(CaseError, match=r"--good 2.0 is not an older version of slow-thing than --bad 1.0"):
        of_versions("2.0", "1.0", tmp_path)


# Resuming


def test_search_file_retries_what_was_skipped(tmp_path: Path) -> None:
    broken = {2}
    stand = Stand(4, 3, broken)
    case = make_case()

    def file_of(good: Arm, *others: object) -> Path:
        return begun(tmp_path, case, replace(stand.history, arm=lambda name: good), None, *others)[0]

    arm = Arm(text="0")
    file, new = begun(tmp_path, case, stand.history, None, "h100")
    assert file == file_of(arm, "h100")
    others = [
        begun(tmp_path, case.replace(steps=21), stand.history, None, "h100")[0],
        begun(tmp_path, case, Stand(5, 2).history, None, "h100")[0],
        begun(tmp_path, case, stand.history, 0.01, "h100")[0],
        file_of(Arm(text="0", given={"X": "1"}), "h100"),
        file_of(Arm(text="another-package==0"), "h100"),
        file_of(arm, "h200"),
    ]
    assert len({file, *others}) == 7
    state = stand.search(new)
    assert state.suspects == ("2", "3")
    documents.write(file, state)
    broken.clear()
    resumed = begun(tmp_path, case, stand.history, None, "h100")[1]
    assert [step.name for step in resumed.steps] == ["4", "1", "3"]
    assert stand.search(resumed).suspects == ("3",)


def held(tmp_path: Path, **changes: Any) -> BisectFile:
    """Return what `begun` reads from a file with these changes. One of five candidates has been tested."""
    stand = Stand(5, 3)
    case = make_case()
    file, new = begun(tmp_path, case, stand.history)
    tested = new.replace(
        metric="tokens_per_s", tolerance=0.1, steps=(CandidateResult(name=new.candidates[-1], outcome="bad"),)
    )
    documents.write(file, tested)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return begun(tmp_path, case, stand.history)[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"case_id": "another"}, "field case_id belongs to another search"),
        ({"good": "-1"}, "field good belongs to another search"),
        ({"candidates": ["1", "5"]}, "field candidates belongs to another search"),
        (
            {"steps": [{"name": "99", "outcome": "bad"}]},
            "steps: '99' was not one of",
        ),
        (
            {"steps": [{"name": "2", "outcome": "bad"}, {"name": "4", "outcome": "good"}]},
            "steps: '4' was not",
        ),
        ({"metric": None}, "must be empty until metric and tolerance are known"),
        ({"tolerance": None}, "must be empty until metric and tolerance are known"),
        ({"candidates": [], "steps": []}, "field candidates: "),
    ],
)
def test_refuses_a_contradictory_search_file(tmp_path: Path, changes: Any, said: str) -> None:
    assert held(tmp_path).steps
    with pytest.raises(FileError, match=re.escape(said)):
        held(tmp_path, **changes)
