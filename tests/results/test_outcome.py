from dataclasses import FrozenInstanceError
from typing import get_args

import pytest

from perfsuite.results.cost import Cost
from perfsuite.results.outcome import (
    QUIET,
    STYLES,
    UNMEASURED,
    WORST_FIRST,
    Check,
    CountCheck,
    Excuse,
    Finding,
    Outcome,
    Verdict,
)
from tests.counted import EXPLAINED, make_check, make_finding
from tests.samples import make_run, metric_check


def test_styles_go_from_worst_to_best() -> None:
    assert set(STYLES) == set(get_args(Outcome)) | set(get_args(Excuse))
    assert tuple(style.word for style in STYLES.values()) == WORST_FIRST
    loud = ("failed", "regressed", "unhealthy", "undecided", "inconclusive", "improved")
    assert (*loud, "waived", "known issue", "out of memory", "recorded", "passed") == WORST_FIRST
    assert set(WORST_FIRST) - set(loud) == QUIET
    assert {"failed", "unhealthy"} == UNMEASURED
    letters = {style.word: style.letter for style in STYLES.values() if style.letter is not None}
    measured = ("inconclusive", "regressed", "unhealthy", "improved", "recorded")
    assert letters == dict(zip(measured, "IRUir", strict=True))
    assert not set(letters.values()) & set(".FEsxX"), (
        "pytest uses these letters for failed, passed and excused"
    )
    with pytest.raises(TypeError, match="positional"):
        type(STYLES["failed"])("failed", "x", "red")  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        STYLES["failed"].quiet = True  # type: ignore[misc]


@pytest.mark.parametrize(("least", "blind"), [(None, False), (0.13, False), (0.131, True)])
def test_gate_is_blind_to_tolerance_sized_changes(least: float | None, blind: bool) -> None:
    assert metric_check(minimum_detectable=least).blind is blind


FINDING = Finding(
    field="host_reads",
    quantity="host reads",
    unit="calls",
    before=1,
    now=2,
    ranks="all",
    outcome="passed",
    sentence="1 more host read",
)


@pytest.mark.parametrize(
    ("counts", "is_same"),
    [
        (CountCheck(outcome="passed"), True),
        (CountCheck(outcome="passed", findings=(FINDING,)), False),
        (CountCheck(outcome="passed", compared=False), False),
        (CountCheck(outcome="regressed"), False),
        (CountCheck(outcome="not counted"), False),
        (CountCheck(outcome="recorded"), False),
        (None, False),
    ],
)
def test_same_work_was_compared_and_has_no_change(counts: CountCheck | None, is_same: bool) -> None:
    assert Verdict(outcome="unhealthy", launches=1, counts=counts).is_same_work is is_same


def test_a_check_is_found_by_its_metric() -> None:
    checks = speed, memory = metric_check(), metric_check(metric="peak_memory_bytes")
    verdict = Verdict(outcome="passed", launches=1, checks=checks)
    assert [verdict.check(name) for name in ("tokens_per_s", "peak_memory_bytes", "mfu")] == [
        speed,
        memory,
        None,
    ]


def test_counts_launches_from_1_despite_gaps() -> None:
    first, second, third = (make_run(duration_s=seconds) for seconds in (1, 2, 3))
    verdict = Verdict(outcome="passed", launches=3, unhealthy_launches=(1, 3))
    assert verdict.healthy([first, second, third]) == [second]


def test_records_times_if_counts_improved() -> None:
    recorded = metric_check(outcome="recorded", baseline=None)
    improved = metric_check(outcome="improved")

    def is_recorded(outcome: Outcome, *checks: Check) -> bool:
        return Verdict(outcome=outcome, launches=1, checks=checks).is_recorded

    assert is_recorded("recorded")
    assert is_recorded("improved", recorded, recorded)
    assert not is_recorded("improved", recorded, improved)
    assert not is_recorded("improved")
    assert not is_recorded("regressed", recorded)
    assert not is_recorded("unhealthy")


COST = Cost(least_s=0.0, most_s=0.006, step_s=0.43)
PRICE = "; predicted cost: 0.0 ms to 6.0 ms of a step of 430.0 ms (at most 1.4%)"


def test_only_the_sentence_of_a_finding_is_cut() -> None:
    finding = make_finding(sentence="more bytes in each step", cost=COST)
    assert finding.in_words() == f"more bytes in each step{PRICE}"
    assert finding.in_words(14) == f"more bytes ...{PRICE}"
    assert make_finding(sentence="more bytes").in_words(10) == "more bytes"


def test_an_explanation_has_the_price_of_its_finding() -> None:
    """Two ranks have the same sentence, and only the second has a price."""
    counts = make_check(make_finding(), make_finding(cost=COST))
    verdict = Verdict(outcome="regressed", launches=1, counts=counts, explained=EXPLAINED)
    assert verdict.explanation() == f"{EXPLAINED}{PRICE}"
    assert verdict.replace(explained="the same calls").explanation() == "the same calls"
    assert verdict.replace(counts=None).explanation() == EXPLAINED
    assert verdict.replace(explained=None).explanation() is None
