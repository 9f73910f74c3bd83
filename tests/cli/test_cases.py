from __future__ import annotations

import pytest
import typer

from perfsuite.cli.cases import tolerance


def test_a_tolerance_is_read_in_percent_or_as_a_fraction() -> None:
    assert [tolerance(text) for text in ("1%", "0.01", " 50 % ", "0.5")] == [0.01, 0.01, 0.5, 0.5]
    allowed = "expected above 0% and up to 50%, in percent or as a fraction: 1% or 0.01"
    for text in ("0", "0%", "-1%", "51%", "1", "nan", "inf", "1 percent", "", "%"):
        with pytest.raises(typer.BadParameter) as raised:
            tolerance(text)
        assert str(raised.value) == f"{text!r}, {allowed}"
