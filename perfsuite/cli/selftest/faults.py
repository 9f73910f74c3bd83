"""Injects each fault into a small real case, and checks that the gate reports it with the right outcome.

A gate that was never seen to fail a case is not known to work. Imports neither torch nor pytest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perfsuite.case.case import Case, Topology
from perfsuite.case.hardware import Machine
from perfsuite.cli.checks import Row, checked, failed, passed, unknown
from perfsuite.frameworks.base import framework_of
from perfsuite.measure import Launching, measure
from perfsuite.report.text import plural
from perfsuite.results import baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.outcome import Outcome, Verdict
from perfsuite.results.rank_report import FailureKind
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.reference import Reference


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A fault, and the verdicts that are right for it."""

    inject: str | None
    """The fault as `perfsuite.case.fault.Fault` reads it; None injects nothing."""
    outcomes: tuple[Outcome, ...]
    failure: FailureKind | None = None
    metric: str | None = None
    """A metric that must have regressed."""

    def is_met(self, verdict: Verdict) -> bool:
        """Tell whether the verdict is right."""
        regressed = {check.metric for check in verdict.checks if check.outcome == "regressed"}
        return (
            verdict.outcome in self.outcomes
            and verdict.failure == self.failure
            and (self.metric is None or self.metric in regressed)
        )


EXPECTED = (
    Expectation(inject="slowdown=60%", outcomes=("regressed",), metric="tokens_per_s"),
    Expectation(inject="stall=5", outcomes=("regressed",), metric="tokens_per_s_mean"),
    Expectation(inject="leak=60%", outcomes=("regressed",), metric="peak_memory_bytes"),
    Expectation(inject="nan", outcomes=("failed",), failure="loss"),
    Expectation(inject="loss", outcomes=("failed",), failure="loss"),
    Expectation(inject="missing-metric", outcomes=("failed",), failure="missing_metric"),
    Expectation(inject="missing-rank", outcomes=("failed",), failure="missing_report"),
    Expectation(inject="crash", outcomes=("failed",), failure="crash"),
    Expectation(inject="exit", outcomes=("failed",), failure="crash"),
    Expectation(inject="oom", outcomes=("failed",), failure="out_of_memory"),
    Expectation(inject="hang", outcomes=("failed",), failure="timeout"),
)
CLEAN = Expectation(inject=None, outcomes=("passed", "improved", "inconclusive"))
"""Without a fault the case must neither regress nor fail; the rest depends on the machine's noise."""
BASELINE_LAUNCHES = 5
"""Launches of the baseline that is recorded first."""
HANG_TIMEOUT_S = {"cpu": 45, "cuda": 120}
"""Deadline of the launch that hangs, by device: GPUs take longer to start, the more of them the longer."""
UNHEALTHY_ATTEMPTS = 3
"""How often a fault is tried on a machine that is unhealthy, which says nothing about the gate."""


def small_case(machine: Machine) -> Case:
    """Return a small and short case that trains for real: on every GPU here, or on two cores."""
    on_gpu = machine.device == "cuda"
    return Case(
        model="llama-tiny",
        framework="ddp",
        sequence_length=64,
        micro_batch=4,
        topology=Topology(processes_per_node=machine.devices if on_gpu else min(2, machine.devices)),
        hardware="gpu" if on_gpu else "cpu",
        max_warmup_steps=10,
        steps=30,
        timeout_s=300 if on_gpu else 120,
    )


def inject_all(
    case: Case, machine: Machine, *, expectations: tuple[Expectation, ...] = EXPECTED
) -> Iterator[Row]:
    """Record a baseline, then try each fault, and last the case without a fault. Yields a row of each.

    A row is `unknown` if the machine was unhealthy, which says nothing about the gate.
    """
    with tempfile.TemporaryDirectory(prefix="perfsuite-selftest-") as directory:
        root = Path(directory)
        policy = Policy(record_launches=BASELINE_LAUNCHES)
        runs, verdict = measure(case, machine, root / "baseline", Reference(policy=policy))
        found = f"{verdict.outcome} from {plural(len(runs), 'launch')}"
        if verdict.outcome != "recorded":
            row = unknown if verdict.outcome == "unhealthy" else failed
            yield row("baseline", found, "; ".join(verdict.reasons))
            return
        yield passed("baseline", found)
        recorded = baseline.from_runs(verdict.healthy(runs))
        for expected in (*expectations, CLEAN):  # last, so that a process that a fault left would show
            yield _tried(case, machine, root, expected, recorded)


def _tried(case: Case, machine: Machine, root: Path, expected: Expectation, recorded: Baseline) -> Row:
    """Measure the case with one fault against the recorded baseline, and compare the verdict."""
    name = f"inject {expected.inject or 'nothing'}"
    if expected.inject == "hang":
        needs_torch = framework_of(case).plan(case).needs_torch
        case = case.replace(timeout_s=HANG_TIMEOUT_S[machine.device] if needs_torch else 3)
    reference = Reference(baseline=recorded, noise=class_noise([recorded]))
    for attempt in range(1, UNHEALTHY_ATTEMPTS + 1):
        directory = root / f"{expected.inject}-{attempt}"
        runs, verdict = measure(case, machine, directory, reference, Launching(inject=expected.inject))
        if verdict.outcome != "unhealthy":
            break
    else:
        found = f"the machine was unhealthy {UNHEALTHY_ATTEMPTS} times, so nothing is known"
        return unknown(name, found, verdict.reasons[-1])
    found = verdict.outcome + (f" ({verdict.failure})" if verdict.failure else "")
    wanted = " or ".join(expected.outcomes) + (f" ({expected.failure})" if expected.failure else "")
    return checked(
        name,
        f"{found} after {plural(len(runs), 'launch')}",
        ok=expected.is_met(verdict),
        advice="; ".join((f"expected {wanted}", *verdict.reasons)),
    )
