"""Runs a command of perfsuite in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from perfsuite.cli.app import app


def run(*words: object, status: int = 0, text: Any = None) -> Result:
    """What a command says that ends with this status; `text` is on its standard input."""
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "240"}, input=text)
    assert result.exit_code == status, result.output
    return result
