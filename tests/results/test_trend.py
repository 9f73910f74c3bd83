from datetime import date
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.results.trend import ChangePoint, Drift, Trend

DAY = date(2026, 1, 3)


def drift(relative: float = 0.02, **changes: Any) -> Drift:
    change = ChangePoint(
        index=9,
        earliest=8,
        latest=10,
        before=1.0,
        after=1.0 + relative,
        relative=relative,
        interval=(0.01, 0.03),
    )
    finding = Drift(
        hardware_class="h100",
        case="a",
        metric="peak memory",
        change=change,
        first_day=date(2026, 1, 1),
        last_day=DAY,
        first_commit="a" * 40,
        last_commit="b" * 40,
        commits_between=None,
        environment=("torch: 2.13.0 -> 2.14.0",),
        worse=True,
        accepted=False,
        open=True,
    )
    return finding.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "worse"),
        ({"worse": False, "open": False}, "better"),
        ({"accepted": True, "open": False}, "worse, accepted"),
        ({"open": False}, "worse, but no longer"),
    ],
)
def test_state_says_whether_it_needs_attention(changes: dict[str, bool], state: str) -> None:
    assert drift(**changes).state == state


def test_worsening_is_a_growth_of_the_cost() -> None:
    assert drift().worsening == pytest.approx(0.02)
    assert drift(-0.5, metric="tokens/s").worsening == pytest.approx(1.0)


@pytest.mark.parametrize(("commits", "count"), [(None, ""), (0, ", commits: 0"), (2, ", commits: 2")])
def test_sentences_name_size_place_and_causes(commits: int | None, count: str) -> None:
    assert drift(commits_between=commits).sentences() == [
        "peak memory: +2.0% (99% interval +1.0% to +3.0%)",
        f"between 2026-01-01 and 2026-01-03, aaaaaaaa..bbbbbbbb{count}",
        "also changed: torch: 2.13.0 -> 2.14.0",
    ]


def test_only_open_drifts_fail() -> None:
    both = (drift(), drift(open=False))
    assert Trend(since=DAY, sessions=9, series=1, findings=both, unplaced={}).failing == [both[0]]


def test_a_trend_reads_back(tmp_path: Path) -> None:
    trend = Trend(since=DAY, sessions=9, series=1, findings=(drift(),), unplaced={})
    file = tmp_path / "trend.json"
    documents.write(file, trend)
    assert documents.read(file, Trend) == trend
