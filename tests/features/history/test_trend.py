import json
import math
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.errors import FileError
from perfsuite.features.history import store
from perfsuite.features.history.trend import Key, _differences, correlation_of, correlations, read, trend
from perfsuite.inputs import git
from perfsuite.inputs.ini import BASELINES
from perfsuite.results.trend import Trend
from tests.cli import commands
from tests.features.history.nights import TOKENS_PER_STEP, Level, Levels, write_history
from tests.samples import IMAGES, make_baseline, make_case, make_figures, make_run
from tests.synthetic import make_repository

H100 = "h100-80gb-sxm"
CASES = [make_case(hardware="h100", micro_batch=n) for n in (1, 2, 4)]
NIGHTS = 60
HISTORY = Path("history")
"""A history that a test itself writes."""
SLOWER, LARGER, SAME = (case.id for case in CASES)


invoke = partial(commands.run, "history", "trend")


def levels(case: int, night: int) -> Level:
    """Make the first case 3% slower from night 40 on. The second uses 2% more memory from night 50 on."""
    return Level(step_s=1 + 0.03 * (case == 0 and night >= 40), memory=1 + 0.02 * (case == 1 and night >= 50))


def slower(by: float, first: int, last: int = NIGHTS) -> Levels:
    """Make every case slower by this share, from night `first` to before night `last`."""
    return lambda case, night: Level(step_s=1 + by * (first <= night < last))


def environment(night: int) -> dict[str, str]:
    """Return the environment of a night. torch changes on the same night as the speed.

    The image changes 30 nights earlier.
    """
    return {"torch": "2.14.0" if night >= 40 else "2.13.0", "image": "b" if night >= 10 else "a"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trend")
    commits = make_repository(root / "repo", NIGHTS)
    write_history(root / "history", commits, CASES, levels, environment=environment)
    return root


@pytest.fixture(scope="module")
def commits(root: Path) -> list[str]:
    return list(git.dates(root / "repo", "main"))


@pytest.fixture(scope="module")
def whole_trend(root: Path) -> Trend:
    return trend(root / "history", repo=root / "repo")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_change_is_of_a_case_metric_and_class(whole_trend: Trend) -> None:
    assert [(f.case, f.metric, f.hardware_class) for f in whole_trend.findings] == [
        (SLOWER, "tokens/s", H100),
        (LARGER, "peak memory", H100),
    ]
    assert (whole_trend.sessions, whole_trend.series, whole_trend.unplaced) == (NIGHTS, 6, {})


def test_each_change_has_its_size(whole_trend: Trend) -> None:
    slower, larger = whole_trend.findings
    assert slower.change.relative == pytest.approx(1 / 1.03 - 1, abs=0.003)
    assert larger.change.relative == pytest.approx(0.02, abs=0.0001)


def test_a_clear_change_is_between_two_commits(whole_trend: Trend, commits: list[str]) -> None:
    _, larger = whole_trend.findings
    assert (larger.first_commit, larger.last_commit) == (commits[49], commits[50])
    assert (larger.first_day, larger.last_day) == (date(2024, 2, 19), date(2024, 2, 20))
    assert larger.commits_between == 1


def test_a_noisy_change_is_between_more_commits(whole_trend: Trend, commits: list[str]) -> None:
    slower, _ = whole_trend.findings
    assert commits.index(slower.first_commit) < 40 <= commits.index(slower.last_commit)
    assert slower.last_day == date(2024, 2, 10)


def test_each_change_names_changes_of_the_environment(whole_trend: Trend) -> None:
    slower, larger = whole_trend.findings
    assert (slower.environment, larger.environment) == (("torch: 2.13.0 -> 2.14.0",), ())


def test_without_a_repository_no_commits_are_counted(root: Path) -> None:
    by_time = trend(root / "history").findings
    assert [(f.case, f.commits_between) for f in by_time] == [(SLOWER, None), (LARGER, None)]


def test_a_trend_begins_90_days_before_the_newest_session(whole_trend: Trend) -> None:
    assert whole_trend.since == date(2023, 12, 1)


@pytest.mark.parametrize(("since", "cases"), [(date(2024, 2, 20), [LARGER]), (date(2024, 2, 21), [])])
def test_changes_of_earlier_nights_are_not_reported(root: Path, since: date, cases: list[str]) -> None:
    later = trend(root / "history", since=since)
    assert [f.case for f in later.findings] == cases


def test_a_fixed_regression_does_not_fail(root: Path, commits: list[str]) -> None:
    write_history(HISTORY, commits, CASES[:1], slower(0.05, 20, 40))
    judged = trend(HISTORY)
    assert [(f.worse, f.open) for f in judged.findings] == [(True, False), (False, False)]
    assert judged.failing == []


def test_a_regression_fixed_long_ago_is_not_reported(root: Path, commits: list[str]) -> None:
    write_history(HISTORY, commits, CASES[:1], slower(0.05, 20, 40))
    few_days = timedelta(days=3)
    assert [f.case for f in trend(root / "history", period=few_days).findings] == [SLOWER, LARGER]
    assert trend(HISTORY, period=few_days).findings == (), "it was fixed long ago"


def test_assumes_bad_weeks_for_a_month(commits: list[str]) -> None:
    def nine_nights(case: int, night: int) -> Level:
        return Level(step_s=1.03, memory=1.03) if night >= 8 else Level()

    write_history(HISTORY, commits[:17], CASES[:1], nine_nights, noise=0.008)
    assert [f.metric for f in trend(HISTORY).findings] == ["peak memory"]


def test_case_may_count_samples_and_be_redefined(commits: list[str]) -> None:
    write_history(HISTORY, commits[:20], [IMAGES])
    changed = IMAGES.replace(timeout_s=5)
    write_history(HISTORY, commits[20:], [changed], lambda case, night: Level(step_s=1.2), first=20)
    [finding] = trend(HISTORY).findings
    assert (finding.case, finding.metric) == (IMAGES.id, "samples/s")
    [change] = finding.environment
    assert change.startswith("case definition: ")


def test_unknown_case_or_class_is_an_error(root: Path) -> None:
    assert [f.case for f in trend(root / "history", case=LARGER).findings] == [LARGER]
    with pytest.raises(FileError, match=r"history has no session on a100\*"):
        trend(root / "history", hardware_class="a100*")
    with pytest.raises(FileError, match=r"has no case that matches 'nope\*'. See: perfsuite history"):
        trend(root / "history", case="nope*")
    write_history(HISTORY, ["f" * 40], CASES)
    with pytest.raises(FileError, match=r"has no session whose commit is on main of .*repo"):
        trend(HISTORY, repo=root / "repo")
    next(HISTORY.glob(f"cases/{SAME}.*")).unlink()
    with pytest.raises(FileError, match=rf"a case of this session is missing. Restore .*{SAME}"):
        trend(HISTORY, case=SLOWER)


def test_sessions_are_ordered_by_their_commits(root: Path, commits: list[str]) -> None:
    """The nights were measured from the newest commit to the oldest, to find when a case became slower.

    In the order in which they were measured, the change looks like an improvement.
    """
    write_history(HISTORY, commits[::-1], CASES[:1], lambda c, n: levels(c, NIGHTS - 1 - n))
    assert [f.worse for f in trend(HISTORY).findings] == [False]
    [finding] = trend(HISTORY, repo=root / "repo").findings
    assert finding.worse
    assert commits.index(finding.first_commit) < 40 <= commits.index(finding.last_commit)


def keep_baseline(case: Case, day: str = "2024-02-28", **figures: Any) -> None:
    kept = make_baseline(make_run(case=case, figures=make_figures(**figures)))
    kept = kept.replace(recorded_at=day if " " in day else f"{day}T12:00:00+00:00")
    documents.write(BASELINES / H100 / f"{case.id}.json", kept)


@pytest.mark.parametrize(
    ("case", "day", "figures", "is_open"),
    [
        (0, "2024-02-09", {"tokens_per_s": TOKENS_PER_STEP / 0.103}, True),
        (0, "2024-02-10", {"tokens_per_s": TOKENS_PER_STEP / 0.103}, False),
        (0, "2024-02-20", {"tokens_per_s": TOKENS_PER_STEP / 0.1}, True),
        (0, "2024-02-25", {"tokens_per_s": TOKENS_PER_STEP / 0.101}, True),
        (0, "2024-02-25", {"tokens_per_s": TOKENS_PER_STEP / 0.102}, False),
        (0, "some day", {"tokens_per_s": 1.0}, True),
        (1, "2024-02-25", {"peak_memory_bytes": 20.1e9}, True),
        (1, "2024-02-25", {"peak_memory_bytes": 20.3e9}, False),
        (1, "2024-02-25", {"peak_memory_bytes": None, "tokens_per_s": 1.0}, True),
        (0, "2024-02-25", {"peak_memory_bytes": 1e15, "tokens_per_s": None}, True),
    ],
    ids=[
        *("older", "of the day", "of before", "too fast", "slow enough", "undated"),
        *("too small", "large enough", "without memory", "without speed"),
    ],
)
def test_newer_baseline_accepts_a_regression(
    root: Path, case: int, day: str, figures: dict[str, Any], is_open: bool
) -> None:
    keep_baseline(CASES[case], day, **figures)
    judged = trend(root / "history", repo=root / "repo", baselines=BASELINES)
    finding, other = judged.findings if case == 0 else judged.findings[::-1]
    assert finding.case == CASES[case].id
    assert (finding.open, finding.accepted) == (is_open, not is_open)
    assert finding.state == ("worse" if is_open else "worse, accepted")
    assert other.open, "it belongs to another case"
    assert (finding in judged.failing) == is_open


def test_an_unreadable_baseline_accepts_nothing(root: Path) -> None:
    for case in CASES[:2]:
        documents.write_text(BASELINES / H100 / f"{case.id}.json", "{")
    assert len(trend(root / "history", baselines=BASELINES).failing) == 2


def test_baseline_of_a_partial_recovery_accepts_it(commits: list[str]) -> None:
    def recovering(case: int, night: int) -> Level:
        return Level(step_s=1.0 if night < 20 else 1.1 if night < 40 else 1.02)

    write_history(HISTORY, commits, CASES[:1], recovering, noise=0.001)
    assert any(f.open for f in trend(HISTORY).findings)
    keep_baseline(CASES[0], tokens_per_s=TOKENS_PER_STEP / 0.102)
    judged = trend(HISTORY, baselines=BASELINES)
    assert judged.failing == []
    [*_, better] = [f for f in judged.findings if not f.worse]
    assert (better.accepted, better.open, better.state) == (False, False, "better")


@pytest.mark.parametrize(("days", "is_open"), [(29, False), (30, True)])
def test_unmeasured_period_fails_nothing(commits: list[str], days: int, is_open: bool) -> None:
    period = timedelta(days=days)
    write_history(HISTORY, commits[:30], CASES[:1], slower(0.05, 16))
    assert trend(HISTORY, period=period).failing
    write_history(HISTORY, commits[30:], CASES[1:2], first=30)
    judged = trend(HISTORY, since=date(2024, 1, 1), period=period)
    assert [f.open for f in judged.findings] == [bool(judged.failing)] == [is_open]


def test_sessions_without_a_value_are_left_out(commits: list[str]) -> None:
    write_history(HISTORY, commits, CASES[1:2], lambda c, n: levels(1, n))
    for place in store.places(HISTORY)[3:7]:
        content = json.loads(place.file.read_text())
        content["results"][0].update(peak_memory_bytes=[None], tokens_per_step=None)
        place.file.unlink()  # the new content has another file name
        name = f"{place.file.stem[:-12]}{documents.digest(content, 12)}.json"
        place.file.with_name(name).write_text(json.dumps(content))
    [larger] = trend(HISTORY).findings
    assert (larger.first_commit, larger.last_commit) == (commits[49], commits[50])
    assert larger.change.index == 46


def test_lists_each_difference_once_and_in_order() -> None:
    seen = [{"torch": "1", "image": "a"}, {"torch": "2", "image": "a"}]
    seen.append({"torch": "2", "image": "a", "new": "x"})
    assert _differences(seen) == ("new: none -> x", "torch: 1 -> 2")
    assert _differences([*seen, *seen[:1]]) == ("new: none -> x -> none", "torch: 1 -> 2 -> 1")
    assert _differences(seen[:1]) == ()


def weeks(case: int, night: int) -> Level:
    """Make good and bad weeks, so that each night resembles the night before."""
    level = 1 + 0.05 * math.sin(night / 4)
    return Level(step_s=level, memory=level)


def used_correlations() -> list[float]:
    """Return the correlations with which the speed and the memory of the first case are judged."""
    measured = correlations(read(store.places(HISTORY), HISTORY).series)
    return [correlation_of(Key(H100, SLOWER, metric), measured) for metric in ("tokens/s", "peak memory")]


def test_correlation_needs_30_sessions(commits: list[str]) -> None:
    write_history(HISTORY, commits[:29], CASES[:1], weeks, noise=0)
    assert used_correlations() == [0.3, 0.0]
    write_history(HISTORY, commits[29:30], CASES[:1], weeks, noise=0, first=29)
    assert used_correlations() == [0.9, 0.9]


def test_a_new_case_gets_the_machines_correlation(commits: list[str]) -> None:
    write_history(HISTORY, commits[30:50], CASES[1:2], weeks, noise=0, first=30)
    assert trend(HISTORY, case=LARGER).findings
    write_history(HISTORY, commits[:30], CASES[:1], weeks, noise=0)
    assert trend(HISTORY, case=LARGER).findings == ()


def test_good_and_bad_weeks_are_not_changes(commits: list[str]) -> None:
    """Only a series of 30 sessions shows that its nights are correlated."""
    write_history(HISTORY, commits[:29], CASES[:1], weeks, noise=0)
    assert trend(HISTORY).findings
    write_history(HISTORY, commits[29:30], CASES[:1], weeks, noise=0, first=29)
    assert trend(HISTORY).findings == ()


@pytest.mark.parametrize(
    "text",
    [
        *(f"{SLOWER} on {H100}", "tokens/s: -3.0%", "): worse\n", "also changed: torch: 2.13.0 -> 2.14.0"),
        *("between 2024-02-19 and 2024-02-20, ", ", commits: 1"),
        "6 series in 60 sessions, changes since 2023-12-01: 2 still worse, 0 others",
    ],
)
def test_an_open_regression_fails(printed: str, text: str) -> None:
    assert text in printed


@pytest.fixture(scope="module")
def printed(root: Path) -> str:
    """Return what the command prints. Its status is 1."""
    return invoke(f"--history={root / 'history'}", f"--repo={root / 'repo'}", status=1).output


def test_the_command_prints_json(root: Path, whole_trend: Trend) -> None:
    result = invoke(f"--history={root / 'history'}", f"--repo={root / 'repo'}", "--json", status=1)
    assert Trend.model_validate(json.loads(result.output)) == whole_trend


def test_a_trend_without_an_open_regression_passes(root: Path) -> None:
    output = invoke(f"--history={root / 'history'}", "--since=2024-02-21").output
    assert "0 still worse, 0 others" in output


def test_a_commit_outside_of_the_repository_is_left_out(root: Path, commits: list[str]) -> None:
    write_history(HISTORY, [*commits[:8], "f" * 40], CASES[:1])
    unplaced = invoke(f"--history={HISTORY}", f"--repo={root / 'repo'}").output
    assert f"left out: commit ffffffffffff: not in {root / 'repo'}" in unplaced
    assert "2 series in 8 sessions" in unplaced


def test_a_missing_history_is_named() -> None:
    assert "no history in" in invoke(f"--history={HISTORY}/x", status=2).output
