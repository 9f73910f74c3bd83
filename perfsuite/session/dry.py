"""Run cases dry and judge their counts against baselines of counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import ClassVar

from perfsuite.case.case import Case
from perfsuite.dry.driver import dry_run
from perfsuite.dry.machine import Device
from perfsuite.report.progress import Progress
from perfsuite.results.count_baseline import target_of
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.session.mode import Launches, Mode, Task, Trial
from perfsuite.session.priced import NO_LOG_OF_BASELINE, priced
from perfsuite.session.session import Session
from perfsuite.session.setup import MISSING_FAILS, DryHost, Options, Setup
from perfsuite.session.side_by_side import SideBySide
from perfsuite.verdict.overall import with_counts

ONE_RANK = "not recorded: --rank runs one rank only, but a baseline needs all ranks that run without --rank"


@dataclass
class Dry(Mode):
    """Run cases dry, on any machine. The host in `setup` is a `DryHost`."""

    device: Device | None = None  # the device to simulate; None: the device that the case is meant for
    # Ranks to run. None: the ranks that represent all others. A baseline is recorded only if this is None.
    ranks: tuple[int, ...] | None = None
    dry_run: Callable[..., Run] = dry_run  # how a case is run dry
    dry: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Prepare to run several cases at the same time."""
        self._runs = SideBySide(self._run)

    def begin(self, tasks: Sequence[Task]) -> int:
        """Begin to run several cases at the same time."""
        return self._runs.begin(tasks)

    def end(self) -> None:
        """End the cases that still run."""
        self._runs.end()

    def judge(self, task: Task, launches: Launches) -> Trial:
        """Run a case dry and judge its counts. A dry run cannot reproduce a known issue."""
        case = task.case
        target = target_of(task.machine, dry=True)
        store = self.baselines.counts
        stored = store.find(target, case)
        number = self.options.steps_to_count(case)
        self.setup.progress.begin(case.id, COUNTED_STEP - 1 + number, 1, case.unit)
        run = self._with_forecast(self._runs.result(task), task)
        launches.runs.append(run)
        file = stored.file if stored else store.local_file(target, case.id)
        verdict = self._uncounted(run, target, is_known=stored is not None)
        verdict = with_counts(verdict, [run], stored.baseline if stored else None, str(file))
        counts = verdict.counts
        if counts is not None and counts.outcome == "not counted":
            if verdict.outcome in ("passed", "recorded"):
                verdict = verdict.replace(outcome="inconclusive")  # a dry run has no other evidence
        elif counts is not None and stored is None and self.ranks is not None:
            looked_at = counts.replace(outcome="passed", baseline_file=None, notes=(ONE_RANK,))
            verdict = verdict.replace(counts=looked_at)
        elif counts is not None and counts.findings:
            logs = (NO_LOG_OF_BASELINE, RunDir.of_launch(task.directory, 1))
            verdict = priced(verdict, (run, run), logs)
        return Trial.of(launches, verdict)

    def _run(self, task: Task, stop: Event) -> Run:
        return self.dry_run(
            self.setup.host.meant(task.case),
            RunDir.of_launch(task.directory, 1).path,
            ranks=self.ranks,
            device=self.device,
            stop=stop,
            counted_steps=self.options.steps_to_count(task.case),
            interconnect=self.options.interconnect,
        )

    def _with_forecast(self, run: Run, task: Task) -> Run:
        """Return a dry run with a forecast from the cases that were measured on the same kind of GPU."""
        if run.dry_facts is None or run.dry_facts.expected is None:
            return run
        forecasts = self.setup.forecasts(run.machine.device_name, task.directory.parent)
        return run.replace(dry_facts=forecasts.added(run.dry_facts, run.case.id))

    def _uncounted(self, run: Run, target: str, *, is_known: bool) -> Verdict:
        """Return the verdict on a dry run before its counts are judged."""
        if run.failure is not None:
            reason = f"{run.failure.kind}: {run.failure.message}"
            return Verdict(outcome="failed", launches=1, failure=run.failure.kind, reasons=(reason,))
        if not is_known and self.options.fail_without_baseline:
            reason = f"no baseline of counts for {target} in {self.baselines}, and {MISSING_FAILS} is set"
            return Verdict(outcome="failed", launches=1, failure="no_baseline", reasons=(reason,))
        return Verdict(outcome="passed" if is_known or self.ranks is not None else "recorded", launches=1)

    def reviewed_file(self, case: Case) -> Path:
        """Return the path of the reviewed baseline of a case's counts, whether or not it exists."""
        target = target_of(self.setup.host.machine_for(case), dry=True)
        return self.baselines.counts.reviewed_file(target, case.id)


def dry_session(
    options: Options,
    progress: Progress,
    device: Device | None = None,
    ranks: tuple[int, ...] | None = None,
    *,
    dry_run: Callable[..., Run] = dry_run,
) -> Session:
    """Return a session that runs cases dry on simulated machines.

    Without `device`, each case runs on the simulated device that it is meant for. `ranks` and `dry_run` are
    fields of `Dry`.
    """
    setup = Setup(options, progress, DryHost(device=device))
    return Session(Dry(setup, device=device, ranks=ranks, dry_run=dry_run))
