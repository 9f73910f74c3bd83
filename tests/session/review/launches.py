"""Helpers that write launches into a store, like a pytest session, and run `perfsuite baseline`."""

from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.inputs.ini import BASELINES
from perfsuite.node.machine import detect
from perfsuite.results.baseline import Baseline
from perfsuite.results.run import Run
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import BaselineStore, Store
from perfsuite.verdict.judge import judge
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.policy import Policy
from tests.cli import commands
from tests.samples import make_case, make_figures, make_result, make_run, write_session

CASE = make_case()
MACHINE = detect()
REVIEWED = BaselineStore(BASELINES, Store().baselines)


def told(*words: str, status: int = 0) -> str:
    """Run `perfsuite baseline`, check its exit status, and return its output."""
    return commands.run("baseline", *words, status=status).output


def measured(
    session: str, count: int, *, tokens_per_s: float = 50_000, against: Baseline | None = None, **changes: Any
) -> list[Run]:
    """Write `count` launches into the store, like a pytest session that judged them against a baseline.

    If the session already has results of other cases, these are kept.
    """
    runs = []
    for number in range(1, count + 1):
        figures = make_figures(tokens_per_s=tokens_per_s * (1 + number / 1000))
        runs.append(make_run(case=CASE, machine=MACHINE, figures=figures).replace(**changes))
    return keep(session, runs, against)


def keep(
    session: str, runs: list[Run], against: Baseline | None = None, noise: ClassNoise | None = None
) -> list[Run]:
    """Write launches of one case into the store, and add their verdict to the session's results."""
    directory = Path(".perfsuite/runs", session)
    case = runs[0].case
    for number, run in enumerate(runs, 1):
        documents.write(directory / case.id / f"launch-{number}" / "run.json", run)
    results = directory / "results.json"
    earlier = documents.read(results, SessionFile).results if results.exists() else ()
    verdict = judge(runs, against, noise or ClassNoise(), Policy())
    result = make_result(*runs, verdict=verdict, directory=f"/elsewhere/{case.id}")
    write_session(directory, *(stored for stored in earlier if stored.case_id != case.id), result)
    return runs


def accept(session: str, count: int, *options: str, status: int = 0, **launches: Any) -> str:
    """Write a session with `count` launches, accept them, and return the output."""
    measured(session, count, **launches)
    return told("accept", *options, status=status)


def accepted() -> Baseline:
    return documents.read(REVIEWED.reviewed_file(MACHINE.hardware_class, CASE.id), Baseline)
