from __future__ import annotations

import importlib.util

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


@pytest.mark.parametrize(
    ("words", "package", "purpose"),
    [
        (["power", "--sigma", "1%"], "numpy", "to simulate launches"),
        (["history", "trend"], "numpy", "to look for trends"),
        (["history", "publish", "out"], "asv", "to publish a history"),
    ],
)
def test_a_command_whose_package_is_missing_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, words: list[str], package: str, purpose: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"perfsuite {words[0]}: {purpose}: it needs the package {package}, which is not installed: "
        "pip install 'perfsuite[history]'\n"
    )
