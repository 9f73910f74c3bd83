from __future__ import annotations

import pytest
from typer.testing import CliRunner

from perfsuite.cli.app import app


@pytest.mark.parametrize("framework", ["nosuch", "fsdp", "script"])
def test_an_error_is_one_line_and_status_2(framework: str) -> None:
    result = CliRunner().invoke(app, ["selftest", "--framework", framework])
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("perfsuite selftest: Case: framework: ")


def test_help_names_the_exit_statuses() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "Exit status: 0, or 1 for a finding" in shown
