from __future__ import annotations

import math

import pytest

from perfsuite.report.paired_power import PairedGate, as_json, sentence
from perfsuite.verdict.paired_power import PairedRow, PairedTable

GATE = PairedGate(
    sigma=0.01, drift=0.015, tolerance=0.03, max_pairs=12, changes=(0.0, 0.03), trials=1000, seed=0
)


def table(smallest: float, *changes: float) -> PairedTable:
    rows = tuple(
        PairedRow(change=change, slower=0.8, faster=0.01, same=0.1, inconclusive=0.09, mean_pairs=6.25)
        for change in changes
    )
    return PairedTable(rows=rows, minimum_detectable=smallest)


def test_it_says_what_is_found_and_how_often_it_is_wrong() -> None:
    said = sentence(GATE, table(0.025, 0.0, 0.03))
    assert "A change as large as the tolerance, 3 %, is found in 80.00 %." in said
    assert "Unchanged code is called slower or faster in 81.00 %, after 6.2 pairs on average." in said
    assert "states 2.5 % as the smallest change that it finds 95 times in 100." in said


@pytest.mark.parametrize(("smallest", "stated"), [(0.04, "4 %"), (math.inf, "none")])
def test_a_blind_comparison_says_so_and_what_was_not_simulated_is_left_out(
    smallest: float, stated: str
) -> None:
    said = sentence(GATE, table(smallest, 0.01))
    assert said.startswith(f"The comparison itself states {stated} as the smallest change")
    assert "it calls itself BLIND to 3 %." in said
    assert as_json(GATE, None, table(smallest, 0.01))["blind"] is True


def test_json_knows_no_infinity() -> None:
    assert as_json(GATE, None, table(math.inf))["minimum_detectable"] is None
