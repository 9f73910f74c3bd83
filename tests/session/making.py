"""Sessions that launch nothing, and what they find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.case import Case, KnownIssue
from perfsuite.launch.lock import MachineLock
from perfsuite.report.progress import Progress
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run
from perfsuite.session import against_baseline
from perfsuite.session.against_baseline import AgainstBaseline
from perfsuite.session.session import Session
from perfsuite.session.setup import Options, Setup

RECORDED = Verdict(outcome="recorded", launches=1)


PASSED = Verdict(outcome="passed", launches=1)


class Unlocked(MachineLock):
    """Of sessions that launch nothing, several of which a test may have at a time."""

    def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
        pass


def make_session(directory: Path, said: list[str] | None = None) -> Session:
    said = [] if said is None else said
    options = Options(root=directory, store=directory / "store", baselines=directory / "baselines")
    setup = Setup(options, Progress(line=said.append, live=lambda text: None))
    setup.lock = Unlocked()
    return Session(setup, AgainstBaseline(setup))


def stand_in(monkeypatch: pytest.MonkeyPatch, made: list[Run], verdict: Verdict) -> None:
    """Nothing is launched: this is what was measured."""

    def measure(case: Case, *args: Any, runs: list[Run]) -> Any:
        args[-1].on_launch(case, 1)
        runs += made
        return runs, verdict

    monkeypatch.setattr(against_baseline, "measure", measure)


ISSUE = {"known_issue": KnownIssue(url="https://example.org/issues/209", failure="timeout")}


SWEPT = {"may_run_out_of_memory": True}
