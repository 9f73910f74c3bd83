"""Predict how fast launches should have been, with a dry run on the same machine after the launches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perfsuite.analysis.step_time.expected import speeds, why_unknown
from perfsuite.dry.driver import dry_run
from perfsuite.errors import CaseError, DryRunError, PredictionError
from perfsuite.results.counts import Counts
from perfsuite.results.dry_facts import DryFacts, Expected
from perfsuite.results.run import Run

SAME_WORK = 0.01  # share by which the FLOPs of a launch and of its dry run may differ


def predicted(run: Run, directory: Path, *, dry_run: Callable[..., Run] = dry_run) -> DryFacts:
    """Return the expected time of a launch's step, or why it is unknown.

    `dry_run` runs the case dry on the simulated machine of the launch. It uses the CPU for some seconds, so
    nothing else may be measured at the same time. If the launch already shows that its time cannot be
    predicted, there is no dry run.
    """
    try:
        return DryFacts(expected=_expected(run, directory, dry_run))
    except (PredictionError, DryRunError, CaseError) as error:
        return DryFacts(no_expected=str(error))


def _expected(run: Run, directory: Path, dry_run: Callable[..., Run]) -> Expected:
    """Run the case of a launch dry, and return the expected time of a step.

    If the expected time is unknown, raises an error that gives the reason.
    """
    case = run.case
    machine = run.machine
    speeds(machine, case)  # raises an error if the GPU is not known
    for entry in run.counts:
        reason = why_unknown(entry.counts, case, machine)
        if reason is not None:
            raise PredictionError(reason)
    if case.compile:
        raise PredictionError("the model is compiled, and a dry run does not know how its kernels are fused")
    dry = dry_run(case, directory, gpu=machine.device_name, interconnect=machine.interconnect)
    if dry.failure is not None:
        raise PredictionError(f"the dry run failed: {dry.failure.message}")
    facts = dry.dry_facts or DryFacts()
    if facts.expected is None:
        raise PredictionError(facts.no_expected or "the dry run has no expected time of a step")
    _check_same_work(run, dry)
    return facts.expected


def _check_same_work(run: Run, dry: Run) -> None:
    """Raise `PredictionError` if a launch did other work than its dry run."""
    launched = _flops(run)
    counted = _flops(dry)
    if launched and abs(counted / launched - 1) > SAME_WORK:
        raise PredictionError(f"the dry run does {counted / launched:.0%} of the FLOPs that the launch does")


def _flops(run: Run) -> int:
    counts = run.counts[0].counts if run.counts else Counts()
    return sum(counts.flops.values())
