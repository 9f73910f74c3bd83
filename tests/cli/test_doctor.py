from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from perfsuite.cli import doctor as command
from perfsuite.cli.app import app
from perfsuite.cli.doctor_checks import Row, Status


def answer(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> None:
    monkeypatch.setattr(command, "examine", lambda machine, quick, say: list(rows))


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("unknown", 0), ("fail", 1)])
def test_the_exit_status_is_1_if_a_check_fails(
    status: Status, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, Row(check="clock", status=status, found="x", advice="do y"))
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == code
    assert shown.stdout.splitlines()[:2] == [f"{status:<9}clock  x", f"{'':<16}-> do y"]
    as_json = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(as_json.stdout)["rows"] == [
        {"check": "clock", "status": status, "found": "x", "advice": "do y"}
    ]
