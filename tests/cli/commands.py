"""Helpers: run commands of perfsuite in this process, on cases that pytest need not collect."""

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from perfsuite.case.case import Case, CaseList
from perfsuite.case.hardware import Machine
from perfsuite.cli.app import app
from perfsuite.dry import cases
from perfsuite.launch import arm
from tests.doc_pages import ROOT
from tests.samples import make_machine


def run(*words: object, status: int = 0, text: Any = None) -> Result:
    """Run a command with `text` on its standard input. It must end with this status."""
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "240"}, input=text)
    assert result.exit_code == status, result.output
    return result


def error_of(*words: object, status: int = 2) -> str:
    """Run a command that must end with this status, and return its standard error in one line."""
    return flat(run(*words, status=status).stderr)


def flat(text: str) -> str:
    """Return a text in one line, with one space between words."""
    return " ".join(text.split())


def rows(printed: str) -> list[dict[str, Any]]:
    """Return the rows of a command's JSON output. The page of commands must name all their fields."""
    content = json.loads(printed)
    assert content.pop("schema_version") == 1
    (entries,) = content.values()
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "commands.md").read_text()))
    assert not {*itertools.chain(*entries)} - named, "the page names every field"
    return list(entries)


def hold(monkeypatch: pytest.MonkeyPatch, *held: Case, detect: Callable[[], Machine] = make_machine) -> None:
    """Make these the cases of the current directory, on the machine that `detect` returns (a CPU machine)."""
    Path("bench_cases").mkdir(exist_ok=True)
    monkeypatch.setattr(cases, "_collected", lambda *selection: CaseList(cases=held, tests=()))
    monkeypatch.setattr("perfsuite.launch.local.detect", detect)


def ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all arms use this interpreter, so that no process has to find out its paths and versions."""
    paths = json.dumps([sys.prefix, *sys.path])
    answers = {"sys.path": paths, "direct_url": "{}"}

    def answer(of: arm.Arm, code: str) -> str:
        return next((answer for word, answer in answers.items() if word in code), "0.1")

    monkeypatch.setattr(arm, "ask", answer)
