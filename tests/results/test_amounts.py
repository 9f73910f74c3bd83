import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results.amounts import amount, arrow, signed
from tests.samples import deterministic

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(
    ("unit", "values", "words"),
    [
        ("bytes", [0, 1023, 1536.0, -3 * MIB], ["0 bytes", "1,023 bytes", "1.50 KiB", "-3.00 MiB"]),
        ("bytes", [10 * MIB, 1023.9 * MIB, GIB], ["10.0 MiB", "1,023.9 MiB", "1.00 GiB"]),
        ("bytes", [29.9 * GIB, 4 * 2**40, None], ["29.9 GiB", "4.00 TiB", "not measured"]),
        ("FLOP", [999_999, 551e12], ["999,999 FLOP", "551.0 TFLOP"]),
        ("calls", [12_345], ["12,345"]),
        ("tokens/s", [93_600.4, math.nan], ["93,600", "nan"]),
        ("samples/s", [99.96, 99.54, 12.34, -0.1234, 0.0], ["100", "99.5", "12.3", "-0.123", "0"]),
        ("", [1.2345, None], ["1.23", "not measured"]),
        ("share", [0.423], ["42.3%"]),
        ("%", [97.4], ["97%"]),
        ("ratio", [1.104], ["1.10"]),
        ("s", [0.0123, 9.9999, 10.0], ["12.3 ms", "9,999.9 ms", "10.00 s"]),
        ("TFLOP/s", [412.345], ["412.35"]),
        ("J per token", [0.0321], ["32.10 mJ per token"]),
        ("J per sample", [0.0321], ["32.10 mJ per sample"]),
        ("W", [1234.5], ["1,234 W"]),
    ],
)
def test_the_unit_says_how_an_amount_is_written(unit: str, values: list[float], words: list[str]) -> None:
    assert [amount(value, unit) for value in values] == words


def test_difference_has_a_sign_and_full_precision() -> None:
    differences = [(1, "calls"), (-3, "calls"), (128, "bytes"), (-MIB, "bytes"), (0, "bytes")]
    assert [signed(*arguments) for arguments in differences] == [
        "+1",
        "-3",
        "+128 bytes",
        "-1.00 MiB",
        "0 bytes",
    ]
    assert arrow(978_000_000, 1_107_000_000, "FLOP") == "0.98 -> 1.11 GFLOP", (
        "1.0 -> 1.1 would show 10% instead of 13%"
    )
    assert arrow(400 * MIB, 5 * GIB, "bytes") == "0.39 -> 5.00 GiB"
    assert arrow(0, 3 * GIB, "bytes") == "0 -> 3.0 GiB"
    assert arrow(29_900_000_000, 59_800_000_000, "FLOP") == "29.9 -> 59.8 GFLOP"
    assert arrow(1_001_000_000, 1_120_000_000, "FLOP") == "1.00 -> 1.12 GFLOP"


def test_an_arrow_has_enough_digits_for_the_ratio() -> None:
    assert arrow(65_000_000, 1_110_000_000, "FLOP") == "0.065 -> 1.110 GFLOP", "0.07 would show a ratio of 16"


def test_only_nothing_is_written_without_a_unit() -> None:
    assert arrow(3 * GIB, 0, "bytes") == "3.0 GiB -> 0"
    assert arrow(2, 1, "calls") == "2 -> 1"


@given(st.integers(0, 2**45), st.integers(0, 2**45), st.sampled_from(["bytes", "FLOP", "calls"]))
@deterministic
def test_different_amounts_never_read_the_same(before: int, now: int, unit: Any) -> None:
    then, today = (side.split()[0] for side in arrow(before, now, unit).split(" -> "))
    assert (then == today) is (before == now)
    assert [float(side.replace(",", "")) == 0 for side in (then, today)] == [before == 0, now == 0]
