import json

import pytest

from perfsuite.report.console import PIPED, console, plain_table, print_rows

EVIL = "\x1b]0;owned\x07\n::add-mask::x [bold]:smile:"


def test_foreign_text_never_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(EVIL)
    assert capsys.readouterr().out == "\\x1b]0;owned\\x07\n: :add-mask::x [bold]:smile:\n"


def test_table_in_a_file_is_wider(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    grid = plain_table(["case"])
    grid.add_row("x" * (PIPED - 1))
    print_rows([], grid, as_json=False)
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.rstrip() == "case"
    assert row.rstrip() == "x" * (PIPED - 1)


def test_rows_for_machines_are_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([{"case": EVIL}], plain_table(), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "rows": [{"case": EVIL}]}
