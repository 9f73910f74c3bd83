"""The faults of `perfsuite selftest` that change step times, memory or the loss, or end a launch."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from perfsuite.case.case import Case, Topology
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, checked, failed, passed, unknown
from perfsuite.frameworks.base import framework_of
from perfsuite.measure import USUAL, Launching, measure
from perfsuite.report.text import plural
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.outcome import Outcome, Verdict
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.run_dir import launches_in
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.overall import Reference
from perfsuite.verdict.policy import MAX_UNHEALTHY, Policy


class Expectation(NamedTuple):
    """A fault, and the correct verdicts for it."""

    inject: str | None  # the fault, in the format of `perfsuite.case.fault.Fault`; None: no fault
    outcomes: tuple[Outcome, ...] = ("failed",)
    failure: FailureKind | None = None
    metric: str | None = None  # a metric that must have regressed

    def is_met(self, verdict: Verdict) -> bool:
        """Return whether the verdict is correct."""
        regressed = {check.metric for check in verdict.checks if check.outcome == "regressed"}
        is_expected = verdict.outcome in self.outcomes and verdict.failure == self.failure
        return is_expected and (self.metric is None or self.metric in regressed)


EXPECTED = (
    Expectation("slowdown=60%", ("regressed",), metric="tokens_per_s"),
    Expectation("stall=5", ("regressed",), metric="tokens_per_s_mean"),
    Expectation("leak=60%", ("regressed",), metric="peak_memory_bytes"),
    Expectation("nan", failure="loss"),
    Expectation("loss", failure="loss"),
    Expectation("missing-metric", failure="missing_metric"),
    Expectation("missing-rank", failure="missing_report"),
    Expectation("crash", failure="crash"),
    Expectation("exit", failure="crash"),
    Expectation("oom", failure="out_of_memory"),
    Expectation("hang", failure="timeout"),
)
CLEAN = Expectation(None, ("passed", "improved", "inconclusive"))
"""Without a fault, the case must neither regress nor fail. Which of the three listed outcomes occurs depends
on the machine's noise."""
BASELINE_LAUNCHES = 5  # number of launches of the baseline, which is recorded first
HANG_TIMEOUT_S = {"cpu": 45, "cuda": 120}
"""Device -> deadline of the launch that hangs, in seconds. GPUs take longer to start than a CPU."""
SIMULATED_HANG_S = 30
"""Deadline of a hang in simulated training. It is long enough for the slow start of a busy machine."""
UNHEALTHY_LAUNCHES = 3 * MAX_UNHEALTHY  # more than usual, because unhealthy launches do not test the gate


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
    case: Case,
    machine: Machine,
    *,
    expectations: tuple[Expectation, ...] = EXPECTED,
    max_unhealthy: int = UNHEALTHY_LAUNCHES,
    how: Launching = USUAL,
) -> Iterator[Row]:
    """Record a baseline, test each fault, and then test the case without a fault. Yields a row for each.

    The launches are made as `how` says.
    """
    with tempfile.TemporaryDirectory(prefix="perfsuite-selftest-") as directory:
        root = Path(directory)
        policy = Policy(record_launches=BASELINE_LAUNCHES)
        runs, verdict = measure(case, machine, root / "baseline", Reference(policy=policy), how)
        observed = f"{verdict.outcome} from {plural(len(runs), 'launch')}"
        if verdict.outcome != "recorded":
            row = unknown if verdict.outcome == "unhealthy" else failed
            yield row("baseline", observed, "; ".join(verdict.reasons))
            return
        yield passed("baseline", observed)
        recorded = from_runs(verdict.healthy(runs))
        # CLEAN is last, so that it also tests whether the faults have left processes behind: if they have, it
        # does not pass.
        for expected in (*expectations, CLEAN):
            yield _judged(case, machine, root, expected, recorded, max_unhealthy, how)


def fault_not_reached(check: str, observed: str) -> Row:
    """Return the row of a launch that ended before its fault occurred, and so does not test the gate."""
    return unknown(check, f"the fault was not reached: {observed}", "repeat it when the machine is less busy")


def _judged(
    case: Case,
    machine: Machine,
    root: Path,
    expected: Expectation,
    recorded: Baseline,
    max_unhealthy: int,
    how: Launching,
) -> Row:
    name = f"inject {expected.inject or 'nothing'}"
    if expected.inject == "hang":
        needs_torch = framework_of(case).plan(case).needs_torch
        case = case.replace(timeout_s=HANG_TIMEOUT_S[machine.device] if needs_torch else SIMULATED_HANG_S)
    policy = Policy(max_unhealthy=max_unhealthy)
    reference = Reference(baseline=recorded, noise=class_noise([recorded]), policy=policy)
    launching = replace(how, inject=expected.inject)
    directory = root / f"{expected.inject}"
    runs, verdict = measure(case, machine, directory, reference, launching)
    if verdict.outcome == "unhealthy":
        observed = f"the machine was unhealthy in {plural(len(runs), 'launch')}, so nothing is known"
        return unknown(name, observed, verdict.reasons[-1])
    # Any launch that reaches its deadline is a timeout, even if no rank has hung yet.
    is_timeout = expected.inject == "hang" and verdict.failure == "timeout"
    if is_timeout and not any(launch.injected.exists() for launch in launches_in(directory)):
        return fault_not_reached(name, "; ".join(verdict.reasons))
    observed = verdict.outcome + (f" ({verdict.failure})" if verdict.failure else "")
    wanted = " or ".join(expected.outcomes) + (f" ({expected.failure})" if expected.failure else "")
    advice = "; ".join((f"expected {wanted}", *verdict.reasons))
    observed += f" after {plural(len(runs), 'launch')}"
    return checked(name, observed, ok=expected.is_met(verdict), advice=advice)
