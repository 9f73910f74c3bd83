from __future__ import annotations

import math

import pytest

from perfsuite.report.power import Gate, is_blind, sentence
from perfsuite.verdict.power import PowerRow, PowerTable


def table(found: float, smallest: float) -> PowerTable:
    """One whose only row is the tolerance."""
    row = PowerRow(
        drop=0.03,
        passed=1 - found,
        improved=0,
        regressed=found,
        inconclusive=0,
        mean_launches=4,
        fixed_5_percent=0,
        fixed_tolerance=0,
    )
    return PowerTable(title="", rows=(row,), minimum_detectable_drop=smallest, blind=0.6)


@pytest.mark.parametrize(
    ("found", "smallest", "blind", "words"),
    [
        (0.97, 0.02, False, "it could hold a tolerance down to 2 %."),
        (0.93, 0.029, False, "(found in 93.00 % of the sessions, missed in 7.00 %, inconclusive in under"),
        (0.951, 0.0301, False, "only just: 60% of its verdicts call themselves blind."),
        (0.9, 0.0301, True, "it finds only slowdowns of 3.01 % and more"),
        (0.0, math.inf, True, "it finds no slowdown at all"),
    ],
)
def test_the_sentence_agrees_with_what_was_found(
    found: float, smallest: float, blind: bool, words: str
) -> None:
    gate = Gate(
        sigma=0.01,
        tolerance=0.03,
        baseline_launches=10,
        max_launches=15,
        degrees=30,
        noise_model="normal",
        drops=(0.03,),
        trials=1000,
        seed=0,
    )
    simulated = table(found, smallest)
    assert is_blind(gate, simulated) is blind
    said = sentence(gate, simulated)
    assert words in said
    assert ("BLIND" in said) is blind
    assert said.count("This gate") == 1
