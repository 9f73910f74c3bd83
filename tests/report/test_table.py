from __future__ import annotations

from perfsuite.report.text import Table


def test_which_columns_hold_figures() -> None:
    table = Table(headers=("a", "b", "c", "d"), rows=[], last_text_columns=1)
    assert [table.is_figure(column) for column in range(4)] == [False, True, True, False]
