"""Tests of trends on machines that change. The sessions' reference shows the machine's own change."""

import math
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.features.history import page
from perfsuite.features.history.store import StoredReference
from perfsuite.features.history.trend import trend
from perfsuite.inputs.ini import BASELINES
from perfsuite.results.trend import Drift, Trend
from tests.cli import commands
from tests.features.history.nights import TOKENS_PER_STEP, Level, write_history
from tests.samples import make_baseline, make_case, make_figures, make_run
from tests.synthetic import BEGIN, make_repository

NIGHTS = 40
SWAPPED = 20  # from this night on, another node is used
CASES = [make_case(hardware="h100", micro_batch=size) for size in range(1, 21)]
H100 = "h100-80gb-sxm"
HISTORY = Path("history")
SLOWER_NODE = 0.04
ERROR = 0.002  # standard deviation of the change of a reference


def node(night: int) -> float:
    """Return how much slower the node is on this night, as a logarithm."""
    return math.log1p(SLOWER_NODE) if night >= SWAPPED else 0.0


def reference_of(
    night: int, *, slower: float | None = None, baselines: str = "a", noise: float = ERROR
) -> StoredReference:
    """Return the reference of a night: how much it changed since its baselines."""
    of_node = node(night) if slower is None else slower
    change = math.expm1(-of_node + random.Random(f"reference {night}").gauss(0, noise))
    return StoredReference(
        change=change, interval=(change - 0.005, change + 0.005), baselines={CASES[0].id: baselines}
    )


def levels(case: int, night: int) -> Level:
    """Make all cases slower from night `SWAPPED` on."""
    return Level(step_s=math.exp(node(night)))


def one_regressed(case: int, night: int) -> Level:
    """Make the first case 3% slower from night 30 on, in addition to the slower node."""
    return Level(step_s=math.exp(node(night)) * (1 + 0.03 * (case == 0 and night >= 30)))


def trend_of(
    of_levels: Callable[[int, int], Level] = levels,
    reference: Callable[[int], StoredReference | None] = reference_of,
    cases: int = len(CASES),
) -> Trend:
    commits = [f"{night:040x}" for night in range(NIGHTS)]
    write_history(HISTORY, commits, CASES[:cases], of_levels, reference=reference)
    return trend(HISTORY)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def only(drifts: tuple[Drift, ...]) -> Drift:
    assert len(drifts) == 1
    return drifts[0]


def test_another_node_changes_no_case() -> None:
    result = trend_of()
    assert result.findings == ()
    assert result.series == 2 * len(CASES)


def test_without_a_reference_another_node_changes_every_case() -> None:
    assert len(trend_of(reference=lambda night: None).findings) == len(CASES)


def test_another_node_is_one_change_of_the_machine() -> None:
    [change] = trend_of(cases=3).machine
    assert change.change.relative == pytest.approx(1 / (1 + SLOWER_NODE) - 1, abs=0.003)
    first = change.sentences()[0]
    assert first.startswith(f"the reference on {H100}: -3.")
    assert first.endswith("the machine, not the code")


def test_a_regression_is_found_beside_the_reference() -> None:
    drift = only(trend_of(one_regressed).findings)
    assert drift.case == CASES[0].id
    assert drift.change.relative == pytest.approx(1 / 1.03 - 1, abs=0.005)
    assert drift.measured == pytest.approx(1 / 1.03 - 1, abs=0.005)
    assert drift.open


def test_shows_the_measured_change_as_well() -> None:
    """A machine that becomes 3% faster hides a regression of 3% on the same night."""

    def hidden(case: int, night: int) -> Level:
        return Level(step_s=1.03 / 1.03 if case == 0 else 1 / 1.03) if night >= SWAPPED else Level()

    def faster(night: int) -> StoredReference:
        return reference_of(night, slower=-math.log(1.03) if night >= SWAPPED else 0.0)

    drift = only(trend_of(hidden, faster, cases=3).findings)
    assert drift.change.relative == pytest.approx(1 / 1.03 - 1, abs=0.004)
    assert drift.measured == pytest.approx(0, abs=0.003)
    assert drift.sentences()[0].endswith(f"relative to the reference, {drift.measured:+.1%} as measured")


def test_without_a_reference_nothing_is_corrected() -> None:
    finding = trend_of(one_regressed, lambda night: None, cases=1).findings[-1]
    assert finding.measured is None
    assert "reference" not in " ".join(finding.sentences())


def test_new_baselines_do_not_change_the_machine() -> None:
    """Ten nights after the swap, new baselines are accepted.

    From then on, the reference is as fast as these baselines.
    """

    def renewed(night: int) -> StoredReference:
        return reference_of(night, slower=0.0, baselines="b") if night >= 30 else reference_of(night)

    result = trend_of(reference=renewed, cases=3)
    assert result.findings == ()
    assert len(result.machine) == 1


def test_a_failed_reference_leaves_the_machine_as_it_was() -> None:
    result = trend_of(reference=lambda night: None if night % 5 == 4 else reference_of(night), cases=3)
    assert result.findings == ()


@pytest.mark.parametrize(("slower", "is_accepted"), [(1.03, True), (1.0, False)])
def test_a_baseline_of_the_new_node_is_corrected(slower: float, is_accepted: bool) -> None:
    """A baseline from the slower node accepts a regression of 3% only if it contains this regression."""
    trend_of(one_regressed, cases=1)
    speed = TOKENS_PER_STEP / 0.1 / (1 + SLOWER_NODE) / slower
    figures = make_figures(tokens_per_s=speed)
    baseline = make_baseline(make_run(case=CASES[0], figures=figures))
    day = BEGIN + timedelta(days=NIGHTS)
    documents.write(BASELINES / H100 / f"{CASES[0].id}.json", baseline.replace(recorded_at=day.isoformat()))
    assert only(trend(HISTORY, baselines=BASELINES).findings).accepted is is_accepted


def test_the_command_reports_the_machine_first() -> None:
    trend_of(one_regressed, cases=3)
    printed = commands.run("history", "trend", "--history", HISTORY, status=1).stdout
    assert printed.index("the machine, not the code") < printed.index(CASES[0].id)
    assert printed.endswith("1 still worse, 0 others\n")


def test_the_page_marks_sessions_whose_reference_moved(tmp_path: Path) -> None:
    commits = make_repository(tmp_path / "repo", NIGHTS)
    write_history(HISTORY, commits, CASES[:3], levels, reference=reference_of)
    text = page.write(tmp_path, HISTORY, tmp_path / "repo").read_text()
    assert text.count('class="change machine"') == 3, "only the chart of each case's speed has it"
    assert text.count("the machine, not the code") == 1 + 2 * 3, "once in the list, twice in each chart"
    assert "3 cases, none worse" in text
