"""Runs in a store, as pytest sessions leave them, and `perfsuite baseline` on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from perfsuite import documents
from perfsuite.cli import app as cli
from perfsuite.launch.machine import detect
from perfsuite.results.baseline import Baseline
from perfsuite.results.run import Run
from perfsuite.results.store import BASELINES, BaselineStore, Store
from tests.samples import make_case, make_figures, make_run

CASE = make_case()
MACHINE = detect()
REVIEWED = BaselineStore(BASELINES)
LOCAL = Store().baselines


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["baseline", *arguments], env={"COLUMNS": "200"})


def measured(session: str, count: int, *, tokens_per_s: float = 50_000, **changes: Any) -> list[Run]:
    """`count` launches in the store, as a pytest session leaves them."""
    runs = []
    for number in range(1, count + 1):
        figures = make_figures(tokens_per_s=tokens_per_s * (1 + number / 1000))
        run = make_run(case=CASE, machine=MACHINE, figures=figures).replace(**changes)
        documents.write(Path(".perfsuite/runs", session, run.case.id, f"launch-{number}", "run.json"), run)
        runs.append(run)
    return runs


def accepted() -> Baseline:
    return documents.read(REVIEWED.reviewed_file(MACHINE.hardware_class, CASE.id), Baseline)
