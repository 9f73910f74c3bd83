"""Helpers that make sessions without launches, and that replace their measurements and dry runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

from perfsuite.case.case import Case
from perfsuite.dry.driver import dry_run
from perfsuite.dry.machine import pretended
from perfsuite.errors import DryRunError, FileError
from perfsuite.inputs import git
from perfsuite.launch.lock import MachineLock
from perfsuite.measure import measure, profile_once
from perfsuite.report.progress import Progress
from perfsuite.results.baseline import Acceptance, Baseline, from_runs
from perfsuite.results.counts import Counts, merged
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.session.against_baseline import AgainstBaseline
from perfsuite.session.session import Session
from perfsuite.session.setup import Options, Setup
from tests.samples import make_run

RECORDED = Verdict(outcome="recorded", launches=1)
PASSED = Verdict(outcome="passed", launches=1)
HELD = Mock(spec=MachineLock)
"""A lock that somebody else holds: `take` fails."""
HELD.take.side_effect = FileError("held")


def make_setup(directory: Path, said: list[str], **options: Any) -> Setup:
    store = directory / "store"
    baselines = directory / "baselines"
    chosen = Options(root=directory, store=store, baselines=baselines, **options)
    setup = Setup(chosen, Progress(line=said.append, live=lambda text: None))
    # Sessions of a test launch nothing, so they need no lock, and several can exist at the same time.
    setup.lock = Mock(spec=MachineLock)
    return setup


@dataclass
class Sessions:
    """Makes sessions in one repository. They launch nothing after a call of `launch`."""

    directory: Path
    said: list[str] = field(default_factory=list)
    commit: str | None = None  # a clean commit with the cases; None: they are not in git
    measure: Callable[..., Any] = measure
    profile_once: Callable[..., Any] = profile_once
    dry_run: Callable[..., Any] = dry_run

    def make(self, **options: Any) -> Session:
        mode = AgainstBaseline(
            make_setup(self.directory, self.said, **options),
            measure=lambda *args, **how: self.measure(*args, **how),  # tests also change it later
            profile_once=self.profile_once,
            dry_run=self.dry_run,
        )
        session = Session(mode)
        if self.commit is not None:
            session.record.revision = git.Revision(self.commit, dirty=False)
        return session

    def resumed(self) -> Session:
        """Return a session that continues the newest session."""
        self.said.clear()
        later = self.make()
        later.resume()
        return later

    def launch(self, *made: Run, verdict: Verdict = PASSED) -> None:
        """Make every later measurement return these runs and this verdict."""

        def measure(case: Case, *args: Any, runs: list[Run]) -> Any:
            args[-1].on_launch(case, 1)
            runs += made
            return runs, verdict

        self.measure = measure


class DryRuns:
    """Replaces dry runs. Its attributes are the counts that a dry run returns, or the reason why it fails."""

    def __init__(self) -> None:
        self.ranks: list[Sequence[int] | None] = []
        self.interconnects: list[str | None] = []
        self.counted_steps: list[int] = []
        self.flops = 100
        self.dry_facts: DryFacts | None = None
        self.failure: Failure | None = None
        self.hidden: tuple[str, ...] = ()  # why the counts do not contain all work
        self.refused: Case | None = None

    def __call__(
        self,
        case: Case,
        directory: Path,
        *,
        ranks: Sequence[int] | None,
        device: Any,
        stop: Event,
        counted_steps: int,
        interconnect: str | None,
    ) -> Run:
        if case == self.refused:
            raise DryRunError(f"{case.id}: a dry run cannot do this: offloading")
        self.ranks.append(ranks)
        self.interconnects.append(interconnect)
        self.counted_steps.append(counted_steps)
        counts = merged({rank: Counts(flops={"forward": self.flops}) for rank in ranks or (0,)})
        machine = pretended(case, device)[0].replace(interconnect=interconnect)
        ran = {"machine": machine, "counts": () if self.failure or self.hidden else counts}
        ended = {"failure": self.failure, "hidden": self.hidden, "dry_facts": self.dry_facts}
        return make_run(case=case, dry=True, step_s=(), window=(0, 0), **ran, **ended)


def reviewed(*runs: Run) -> Baseline:
    """Return an accepted baseline of these launches."""
    return from_runs(runs, accepted=Acceptance(by="somebody", date="2026-01-01", commit=None))
