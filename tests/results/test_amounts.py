from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results.amounts import amount, arrow, signed
from tests.samples import deterministic

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0, "bytes", "0 bytes"),
        (1023, "bytes", "1,023 bytes"),
        (1536.0, "bytes", "1.50 KiB"),
        (-3 * MIB, "bytes", "-3.00 MiB"),
        (10 * MIB, "bytes", "10.0 MiB"),
        (1023.9 * MIB, "bytes", "1,023.9 MiB"),
        (GIB, "bytes", "1.00 GiB"),
        (29.9 * GIB, "bytes", "29.9 GiB"),
        (4 * 2**40, "bytes", "4.00 TiB"),
        (999_999, "FLOP", "999,999 FLOP"),
        (551e12, "FLOP", "551.0 TFLOP"),
        (12_345, "calls", "12,345"),
        (93_600.4, "tokens/s", "93,600"),
        (99.96, "samples/s", "100"),
        (12.34, "samples/s", "12.3"),
        (-0.1234, "samples/s", "-0.123"),
        (0.0, "samples/s", "0"),
        (math.nan, "tokens/s", "nan"),
        (1.2345, "", "1.23"),
        (0.423, "share", "42.3%"),
        (97.4, "%", "97 %"),
        (1.104, "ratio", "1.10"),
        (0.0123, "s", "12.3 ms"),
        (1.5, "s", "1,500.0 ms"),
        (12.0, "s", "12.00 s"),
        (412.345, "TFLOP/s", "412.35"),
        (0.0321, "J per token", "32.10 mJ per token"),
        (0.002, "J per sample", "2.00 mJ per sample"),
        (1234.5, "W", "1,234 W"),
        (None, "bytes", "not measured"),
        (None, "", "not measured"),
    ],
)
def test_the_unit_says_how_an_amount_is_written(value: float | None, unit: str, words: str) -> None:
    assert amount(value, unit) == words


def test_a_difference_has_a_sign() -> None:
    differences = [(1, "calls"), (-3, "calls"), (128, "bytes"), (-MIB, "bytes"), (0, "bytes")]
    assert [signed(*each) for each in differences] == ["+1", "-3", "+128 bytes", "-1.00 MiB", "0 bytes"]


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (978_000_000, 1_107_000_000, "0.98 -> 1.11 GFLOP"),  # 13 % more, of which 1.0 -> 1.1 would tell 10 %
        (29.9e9, 59.8e9, "29.9 -> 59.8 GFLOP"),
        (1_001e6, 1_120e6, "1.00 -> 1.12 GFLOP"),
    ],
)
def test_rounding_hides_no_part_of_a_change(before: float, now: float, told: str) -> None:
    assert arrow(int(before), int(now), "FLOP") == told


@given(st.integers(0, 2**45), st.integers(0, 2**45), st.sampled_from(["bytes", "FLOP", "calls"]))
@deterministic
def test_what_differs_never_reads_the_same_nor_as_nothing(before: int, now: int, unit: Any) -> None:
    then, today = arrow(before, now, unit).split(" -> ")
    assert (then.split()[0] == today.split()[0]) is (before == now)
    assert [float(side.split()[0].replace(",", "")) == 0 for side in (then, today)] == [before == 0, now == 0]
