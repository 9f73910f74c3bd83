from __future__ import annotations

import pytest
import typer

from perfsuite.cli.cases import tolerance


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.01", 0.01), (" 50 % ", 0.5), ("0.5", 0.5)])
def test_a_tolerance_is_read_in_percent_or_as_a_fraction(text: str, value: float) -> None:
    assert tolerance(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["0", "0%", "-1%", "51%", "1", "nan", "inf", "1 percent", "", "%"])
def test_what_is_no_tolerance_is_named_with_what_is_allowed(text: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        tolerance(text)
    allowed = "expected above 0% and up to 50%, in percent or as a fraction: 1% or 0.01"
    assert str(raised.value) == f"{text!r}, {allowed}"
