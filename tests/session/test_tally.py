from pathlib import Path
from typing import Any

import pytest

from perfsuite.results.session_file import Measurement, Skipped
from perfsuite.session.setup import Options
from perfsuite.session.tally import Tally
from tests.samples import DISTURBED, make_run, make_shared, never_run
from tests.session.making import PASSED, RECORDED

THROTTLED = make_shared().replace(runs=(make_run(),), shared=False)
EMPTY = make_shared().replace(runs=(make_run(health=DISTURBED, window=(0, 0)),))
JUDGED = never_run().replace(verdict=PASSED, runs=(make_run(),))
SKIPPED = Skipped(nodeid="test", case_id="llama", framework="fake", reason="no such GPU")


def tally(*results: Measurement, skipped: tuple[Skipped, ...] = (), **options: Any) -> Tally:
    here = Path()
    return Tally(results, skipped, Options(root=here, store=here, baselines=here, **options))


@pytest.mark.parametrize("results", [(never_run(),), (THROTTLED, EMPTY)])
def test_results_without_evidence_measure_nothing(results: tuple[Measurement, ...]) -> None:
    assert tally(*results, allow_shared=True).nothing_measured


@pytest.mark.parametrize("allow_shared", [True, False])
def test_only_shared_figures_excuse_judging_nothing(allow_shared: bool) -> None:
    shared = make_shared()
    counted = tally(THROTTLED, EMPTY, shared, allow_shared=allow_shared)
    assert counted.only_shown == ([shared] if allow_shared else [])
    assert counted.nothing_measured is not allow_shared


def test_without_counts_a_shared_machine_judges_nothing() -> None:
    counted = tally(make_shared(), allow_shared=True, counts=False)
    assert counted.only_shown == []
    assert counted.nothing_measured


@pytest.mark.parametrize(("count", "too_few"), [(7, False), (6, True)])
def test_judged_share_is_exact_to_the_digit(count: int, too_few: bool) -> None:
    recorded = JUDGED.replace(verdict=RECORDED)
    other = JUDGED.replace(verdict=PASSED.replace(outcome="inconclusive"))
    excused = JUDGED.replace(excused="known issue")
    counted = tally(*[JUDGED] * count, *[other] * (23 - count), recorded, excused, min_judged=0.28)
    assert (counted.judged, counted.to_judge, counted.too_few_judged) == (count, 25, too_few)


def test_a_session_without_cases_has_judged_enough() -> None:
    assert not tally(min_judged=0.28).too_few_judged


@pytest.mark.parametrize(("changes", "count"), [({}, 1), ({"not_reached": True}, 2), ({"by_test": True}, 2)])
def test_counts_skips_that_could_be_judged(changes: dict[str, bool], count: int) -> None:
    assert tally(JUDGED, skipped=(SKIPPED.replace(**changes),)).to_judge == count


@pytest.mark.parametrize(
    ("result", "fails"),
    [
        (JUDGED, False),
        (JUDGED.replace(verdict=PASSED.replace(outcome="regressed")), True),
        (JUDGED.replace(verdict=PASSED.replace(outcome="regressed"), shadow=True), False),
        (JUDGED.replace(verdict=PASSED.replace(outcome="regressed"), excused="waived"), False),
        (JUDGED.replace(runs=()), True),
    ],
    ids=["passed", "regressed", "shadow", "waived", "no step"],
)
def test_which_results_fail_the_session(result: Measurement, fails: bool) -> None:
    assert tally(result).failing == ([result] if fails else [])
