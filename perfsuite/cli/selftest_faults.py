"""Injects each fault into a small real case, and checks that the gate reports it with the right outcome.

A gate that was never seen to fail a case is not known to work. Imports neither torch nor pytest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perfsuite.case.case import Case, Topology
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import framework_of
from perfsuite.measure import Reference, measure
from perfsuite.report.text import plural
from perfsuite.results import baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.outcome import Outcome, Verdict
from perfsuite.results.rank_report import FailureKind
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.noise import class_noise


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

Answer = Literal["caught", "missed", "untried"]
"""Result of one injection. `untried`: the machine was unhealthy each time, or cannot run its case."""


def worst(answers: Iterable[Answer]) -> Answer:
    """Return `missed` if one is; else `untried` if one is; else `caught`."""
    return max(answers, key=("caught", "untried", "missed").index)


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
    say: Callable[[str], None],
    *,
    expectations: tuple[Expectation, ...] = EXPECTED,
) -> Answer:
    """Record a baseline, then try each fault, and last the case without a fault.

    Returns `missed` if one verdict was wrong; else `untried` if one fault could not be judged; else `caught`.
    `say` is called with a line for each.
    """
    with tempfile.TemporaryDirectory(prefix="perfsuite-selftest-") as directory:
        root = Path(directory)
        policy = Policy(record_launches=BASELINE_LAUNCHES)
        runs, verdict = measure(case, machine, root / "baseline", Reference(policy=policy))
        say(f"baseline: {verdict.outcome} from {plural(len(runs), 'launch')}")
        if verdict.outcome != "recorded":
            say("\n".join(verdict.reasons))
            return "untried" if verdict.outcome == "unhealthy" else "missed"
        recorded = baseline.from_runs(verdict.healthy(runs))
        answers = [
            _try(case, machine, root, expected, recorded, say)
            for expected in (*expectations, CLEAN)  # last, so that a process that a fault left would show
        ]
        return worst(answers)


def _try(
    case: Case,
    machine: Machine,
    root: Path,
    expected: Expectation,
    recorded: Baseline,
    say: Callable[[str], None],
) -> Answer:
    """Measure the case with one fault against the recorded baseline, and compare the verdict."""
    name = expected.inject or "nothing"
    if expected.inject == "hang":
        needs_torch = framework_of(case).plan(case).needs_torch
        case = case.replace(timeout_s=HANG_TIMEOUT_S[machine.device] if needs_torch else 3)
    noise = class_noise([recorded])
    for attempt in range(1, UNHEALTHY_ATTEMPTS + 1):
        runs, verdict = measure(
            case,
            machine,
            root / f"{name}-{attempt}",
            Reference(baseline=recorded, noise=noise),
            inject=expected.inject,
        )
        if verdict.outcome != "unhealthy":
            break
        say(f"... inject {name}: the machine was unhealthy: {verdict.reasons[-1]}")
    else:
        say(f"??? inject {name}: the machine was unhealthy {UNHEALTHY_ATTEMPTS} times, so nothing is known")
        return "untried"
    is_met = expected.is_met(verdict)
    found = verdict.outcome if verdict.failure is None else f"{verdict.outcome} ({verdict.failure})"
    wanted = " or ".join(expected.outcomes) + (f" ({expected.failure})" if expected.failure else "")
    line = f"inject {name}: {found} after {plural(len(runs), 'launch')}"
    if is_met:
        say(f"ok  {line}")
        return "caught"
    say(f"BAD {line}, expected {wanted}")
    for reason in verdict.reasons:
        say(f"    {reason}")
    return "missed"
