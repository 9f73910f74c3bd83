from __future__ import annotations

import math

import pytest

from perfsuite.verdict.pairs import Differences, order, pair_differences


def test_launches_alternate_a_b_b_a() -> None:
    assert [arm for pair in range(3) for arm in order(pair)] == ["a", "b", "b", "a", "a", "b"]


def test_pairs_are_b_beside_a_and_neighbours_the_later_of_one_arm_beside_the_earlier() -> None:
    """Launched as A 1, B 2, B 6, A 3, A 12, B 24."""
    found = pair_differences([1.0, 3.0, 12.0], [2.0, 6.0, 24.0])
    assert [math.exp(each) for each in found.pairs] == pytest.approx([2, 2, 2])
    assert [math.exp(each) for each in found.neighbours] == pytest.approx([3, 4])


def test_one_pair_has_no_neighbours() -> None:
    assert pair_differences([1.0], [1.0]) == Differences([0.0], [])


def test_what_follows_others_is_taken_out() -> None:
    costs, probes = Differences([0.5, 0.1], [0.3]), Differences([0.8, 0.0], [0.2])
    left = costs.without(probes, 0.5)
    assert left.pairs == pytest.approx([0.1, 0.1])
    assert left.neighbours == pytest.approx([0.2])
