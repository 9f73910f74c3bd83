"""The search for the first bad commit or version. Comparisons are stood in for; git and pip are real."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite import bisection, documents
from perfsuite.bisection import BisectFile, History, UndecidedError, search
from perfsuite.errors import CaseError, PackageError
from perfsuite.git import git
from perfsuite.launch.arm import Arm
from perfsuite.results.metric import described
from perfsuite.results.outcome import Check, Outcome, Verdict
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Measurement
from tests.packages import only_index, write_wheel
from tests.samples import make_case, make_result, make_run
from tests.synthetic import make_repository

SLOWER = 0.1


def check(cost: float, tolerance: float, name: str = "tokens_per_s") -> Check:
    """The check of a metric whose cost grew by `cost`, where it may grow by `tolerance`."""
    metric = described(name)
    return Check(
        metric=name,
        label=name,
        unit="",
        outcome="regressed" if cost > tolerance else "passed",
        measured=1.0,
        baseline=1.0,
        allowed=metric.bound(tolerance),
        change=metric.change(cost),
        interval=metric.interval((cost - 0.01, cost + 0.01)),
    )


def measurement(verdict: Verdict, *, a_failed: bool = False) -> Measurement:
    failure = Failure(kind="crash", message="boom") if a_failed else None
    return make_result(make_run(), verdict=verdict, before=None).replace(before=(make_run(failure=failure),))


class Stand:
    """A history of candidates "1", "2", ..., of which those from `first_bad` on are slower."""

    def __init__(self, count: int, first_bad: int, broken: Collection[int] = (), **instead: Verdict) -> None:
        """`instead` are the verdicts on some candidates, `_4` that on 4."""
        names = tuple(str(number) for number in range(1, count + 1))
        self.first_bad, self.broken, self.instead = first_bad, broken, instead
        self.compared: list[tuple[str, float | None, str | None]] = []
        self.a_failed = False
        self.history = History(good="0", candidates=names, arm=self.arm)
        self.saved: list[BisectFile] = []

    @property
    def names(self) -> list[str]:
        """What was compared with the good arm."""
        return [name for name, _, _ in self.compared]

    def arm(self, name: str) -> Arm:
        if int(name) in self.broken:
            raise PackageError(f"{name} cannot be built")
        return Arm(text=name)

    def compare(self, a: Arm, b: Arm, tolerance: float | None, metric: str | None) -> Measurement:
        assert a.text == "0"
        self.compared.append((b.text, tolerance, metric))
        change = SLOWER if int(b.text) >= self.first_bad else 0.001
        verdict = Verdict(outcome="passed", launches=6, checks=(check(change, tolerance or 0.03),))
        return measurement(self.instead.get(f"_{b.text}", verdict), a_failed=self.a_failed)

    def search(self, known: BisectFile | None = None) -> BisectFile:
        start = BisectFile(case_id="case", good="0", candidates=self.history.candidates)
        return search(known or start, self.history, self.compare, self.saved.append)


def decided(outcome: Outcome, *checks: Check, launches: int = 6, why: str = "") -> Verdict:
    return Verdict(outcome=outcome, launches=launches, checks=checks, reasons=(why,) if why else ())


def test_the_9th_of_16_is_found_by_five_comparisons() -> None:
    stand = Stand(16, 9)
    found = stand.search()
    assert found.suspects == ("9",)
    assert stand.names == ["16", "8", "12", "10", "9"]
    assert sum(step.launches for step in found.steps) == 30
    (first,) = [step for step in found.steps if step.name == "9"]
    assert first.outcome == "bad"
    assert first.change == pytest.approx(1 / (1 + SLOWER) - 1)
    assert [len(each.steps) for each in stand.saved] == [1, 2, 3, 4, 5]


@settings(deadline=None)
@given(st.data())
def test_the_first_bad_one_is_always_a_suspect_and_the_only_one_that_can_be_tested(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 40))
    first_bad = data.draw(st.integers(1, count))
    broken = data.draw(st.sets(st.integers(1, max(1, count - 1)))) - {count}
    stand = Stand(count, first_bad, broken)
    found = stand.search()
    assert str(first_bad) in found.suspects
    assert {int(name) for name in found.suspects[:-1]} <= broken
    assert len(stand.names) == len(set(stand.names))


@pytest.mark.parametrize(("cost", "allowed"), [(SLOWER, 1.1**0.5 - 1), (9.0, 0.5)])
def test_each_step_allows_for_half_of_what_is_lost_and_for_half_at_most(cost: float, allowed: float) -> None:
    stand = Stand(4, 2, _4=decided("regressed", check(cost, 0.03)))
    stand.search()
    first, *others = [tolerance for _, tolerance, _ in stand.compared]
    assert first is None
    assert others == [pytest.approx(allowed)] * len(others)


VAGUE = check(0.04, 0.05).replace(outcome="inconclusive")


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (decided("failed", why="arm B failed: crash: boom"), "arm B failed: crash: boom"),
        (decided("inconclusive", VAGUE, launches=24), "tokens_per_s: inconclusive after 24 launches"),
        (decided("passed"), "it has no tokens_per_s"),
    ],
    ids=["it fails", "it is not decided", "it lacks the metric"],
)
def test_what_cannot_be_told_from_the_good_arm_is_skipped_with_its_reason(verdict: Verdict, why: str) -> None:
    found = Stand(8, 5, {4}, _3=verdict).search()
    assert found.suspects == ("3", "4", "5")
    whys = {step.name: step.why for step in found.steps if step.outcome == "skipped"}
    assert whys == {"3": why, "4": "4 cannot be built"}
    assert Stand(3, 3, _1=verdict).search().suspects == ("3",), "2 is good, so that 1 does not matter"


def test_the_metric_that_is_worse_in_the_bad_arm_is_what_is_looked_at() -> None:
    larger = decided("regressed", check(0.0, 0.03), check(0.5, 0.05, "peak_memory_bytes"))
    slower = decided("regressed", check(0.2, 0.03), check(0.0, 0.05, "peak_memory_bytes"))
    stand = Stand(2, 2, _2=larger, _1=slower)
    found = stand.search()
    assert (found.metric, found.suspects) == ("peak_memory_bytes", ("2",))
    assert found.tolerance == pytest.approx(1.5**0.5 - 1)
    assert [metric for *_, metric in stand.compared] == [None, "peak_memory_bytes"]


def test_a_bad_arm_that_is_not_worse_is_an_error() -> None:
    with pytest.raises(CaseError, match=r"^4 is not worse than 0: passed \(-0\.1% tokens_per_s\)"):
        Stand(4, 9).search()


def test_a_bad_arm_that_noise_hides_is_not_called_as_fast() -> None:
    vague = check(0.09, 0.15).replace(outcome="inconclusive")
    stand = Stand(4, 2, _4=decided("inconclusive", vague, launches=24))
    with pytest.raises(UndecidedError, match=r"^4 compared with 0: tokens_per_s is inconclusive \(-8\.3%\)"):
        stand.search()
    assert stand.names == ["4"]


def test_an_unhealthy_machine_ends_it_and_the_same_search_goes_on() -> None:
    stand = Stand(8, 3, _4=decided("unhealthy", why="others used the machine"))
    with pytest.raises(UndecidedError, match=r"4 could not be compared.*others used the machine"):
        stand.search()
    (known,) = stand.saved
    stand.instead.clear()
    stand.compared.clear()
    assert stand.search(known).suspects == ("3",)
    assert "8" not in stand.names


def test_a_good_arm_that_fails_is_an_error() -> None:
    stand = Stand(4, 2, _2=decided("failed", why="arm A failed: crash: boom"))
    stand.a_failed = True
    with pytest.raises(CaseError, match=r"cannot be compared with the good arm: arm A failed: crash: boom"):
        stand.search()


# Commits


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sixteen commits after the first one. Returns all of them."""
    make_repository(tmp_path / "repo", 17)
    monkeypatch.chdir(tmp_path / "repo")
    return git("rev-list", "--reverse", "HEAD", cwd=Path()).split()


def of_commits(good: str, bad: str, tmp_path: Path) -> History:
    return bisection.of_commits(good, bad, root=Path.cwd(), store=tmp_path / "store")


def test_commits_between_two_arms_are_the_candidates_with_the_variables_of_both(
    repository: list[str], tmp_path: Path
) -> None:
    history = of_commits(f"{repository[0]} X='a b'", ". X='a b'", tmp_path)
    assert (history.good, list(history.candidates)) == (repository[0], repository[1:])
    arm = history.arm(repository[3])
    assert (arm.commit, arm.given) == (repository[3], {"X": "a b"})
    assert arm.directory is not None
    assert git("rev-parse", "HEAD", cwd=arm.directory).strip() == repository[3]


def test_arms_that_cannot_be_searched_between_are_refused(repository: list[str], tmp_path: Path) -> None:
    for good, bad, words in (
        ("HEAD", repository[0], "does not come before"),
        ("HEAD", ".", "same commit"),
        (f"{repository[0]} X=1", "HEAD", "differ in more than their commit"),
        (repository[0], "HEAD installed==1", "takes no PACKAGE==VERSION: name a lock file"),
    ):
        with pytest.raises(CaseError, match=words):
            of_commits(good, bad, tmp_path)
    Path("code.py").write_text("1")
    git("add", "code.py", cwd=Path())
    with pytest.raises(CaseError, match=r"uncommitted changes"):
        of_commits(repository[0], ".", tmp_path)


def test_outside_of_git_a_package_can_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaseError, match=r"no git repository: name two versions of a package by --package"):
        bisection.of_commits(".", ".", root=tmp_path, store=tmp_path / "store")


# Versions


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three releases of a small package, where pip looks for all that it installs."""
    index = only_index(tmp_path / "index", monkeypatch)
    for version in ("1.0", "1.1", "2.0rc1", "2.0"):
        write_wheel(index, "slow-thing", version, f"VERSION = {version!r}\n")
    monkeypatch.chdir(tmp_path)


def of_versions(good: str, bad: str, tmp_path: Path) -> History:
    return bisection.of_versions("slow-thing", good, bad, root=tmp_path, store=tmp_path / "store")


@pytest.mark.launch
def test_released_versions_are_the_candidates_each_in_its_directory(releases: None, tmp_path: Path) -> None:
    history = of_versions("1.0", "2.0", tmp_path)
    assert (history.good, history.candidates) == ("1.0", ("1.1", "2.0"))
    arm = history.arm("1.1")
    directory = Path(arm.packages)
    assert (directory / "slow_thing.py").read_text() == "VERSION = '1.1'\n"
    assert arm.variables["PYTHONPATH"].startswith(str(directory))


@pytest.mark.launch
def test_versions_that_are_not_there_are_refused(releases: None, tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"pip finds no slow-thing==3\. The newest that it finds: .*2\.0"):
        of_versions("1.0", "3", tmp_path)
    with pytest.raises(CaseError, match=r"pip install .*slow-thing==9"):
        of_versions("1.0", "2.0", tmp_path).arm("9")


def test_what_is_no_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"--good 'main' is no version"):
        of_versions("main", "2.0", tmp_path)
    with pytest.raises(CaseError, match=r"--good 2.0 is no older version of slow-thing than --bad 1.0"):
        of_versions("2.0", "1.0", tmp_path)


# Going on


def test_a_search_has_a_file_of_its_own(tmp_path: Path) -> None:
    stand, case = Stand(4, 2), make_case()

    def file_of(good: Arm, *others: object) -> Path:
        history = replace(stand.history, arm=lambda name: good)
        return bisection.state_file(tmp_path, case, history, *others)

    arm = Arm(text="0")
    file = file_of(arm, "h100")
    assert file == file_of(arm, "h100")
    others = [
        bisection.state_file(tmp_path, case.replace(steps=21), stand.history, "h100"),
        bisection.state_file(tmp_path, case, Stand(5, 2).history, "h100"),
        file_of(Arm(text="0", given={"X": "1"}), "h100"),
        file_of(Arm(text="another-package==0"), "h100"),
        file_of(arm, "h200"),
    ]
    assert len({file, *others}) == 6
    documents.write(file, stand.search())
    assert bisection.begun(file, "case", stand.history) == stand.saved[-1]


def test_what_was_skipped_is_tried_again(tmp_path: Path) -> None:
    broken = {2}
    stand = Stand(4, 3, broken)
    file = tmp_path / "search.json"
    documents.write(file, stand.search())
    broken.clear()
    found = stand.search(bisection.begun(file, "case", stand.history))
    assert found.suspects == ("3",)
