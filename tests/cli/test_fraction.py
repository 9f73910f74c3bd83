from __future__ import annotations

import pytest

from perfsuite.cli.fraction import fraction
from perfsuite.errors import CaseError


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.01", 0.01), (" 50 % ", 0.5), ("0.5", 0.5)])
def test_a_share_is_read_in_percent_or_as_a_fraction(text: str, value: float) -> None:
    assert fraction("--tolerance", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["0", "0%", "-1%", "51%", "1", "nan", "inf", "1 percent", "", "%"])
def test_what_is_no_share_of_a_tolerance_names_the_option(text: str) -> None:
    with pytest.raises(CaseError) as raised:
        fraction("--tolerance", text)
    assert str(raised.value) == (
        f"--tolerance is {text!r}, expected above 0% and up to 50%, in percent or as a fraction: 1% or 0.01"
    )
