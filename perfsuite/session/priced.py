"""Put a price in milliseconds on each change of the counts.

If two dry runs are compared, prices are predicted for the changes of collectives, kernels, FLOPs, and waits
of the host for the GPU. The prediction replays the logged steps. A replay takes seconds, so a naive price is
estimated first: the time that the changed work takes by itself, for example to send the bytes of a collective
over its link. Only the changes with the highest naive prices are replayed. The log of a launch does not
contain the waits between streams, so all prices of changes between launches are naive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.analysis.figures import is_in_tf32
from perfsuite.analysis.step_time.expected import speeds
from perfsuite.analysis.step_time.links import is_inside, latency_s, network_bytes_per_s, ranks_on_one_machine
from perfsuite.analysis.step_time.price import (
    Group,
    Price,
    kernels_alone_s,
    price,
    price_of_calls,
    price_of_kernels,
    price_of_waits,
)
from perfsuite.analysis.step_time.streams import HostTimes
from perfsuite.errors import FileError, PredictionError
from perfsuite.results.cost import Cost
from perfsuite.results.counts import PHASES, Collective, Phase, collective_name
from perfsuite.results.dry_facts import SCALED
from perfsuite.results.outcome import Finding, Verdict
from perfsuite.results.quantities import BLOCKING, FLOPS, HOST_READS, KERNELS
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.session.logged_steps import Log, LoggedSteps

MOST = 5  # maximum number of replayed changes of a case, because a replay takes up to some seconds
NOT_REPLAYED = f"only the {MOST} changes that take longest by themselves are replayed"
# Suffix of `Finding.field` for calls such as `torch.cuda.Stream.synchronize`, in which the host waits.
SYNCHRONIZE = ".synchronize"
NO_LOG_OF_LAUNCHES = "only the log of a dry run contains the waits between streams"
NO_LOG_OF_BASELINE = "a baseline does not contain the log of its step"
WAIT_S = HostTimes().read_s + HostTimes().forward_s + HostTimes().launch_s
"""Seconds for which the GPU is idle after the host has waited for it, until its next kernel begins."""


def priced(verdict: Verdict, arms: Sequence[Run], logs: Sequence[Log]) -> Verdict:
    """Return the verdict with prices on the judged changes, and on the change that explains the verdict.

    The most expensive findings come first. `arms` are runs of arm A and arm B, and `logs` are their logs. A
    baseline has no run of its own, so a run of the case takes its place.
    """
    if verdict.counts is None:
        return verdict
    steps = LoggedSteps(arms, logs)
    findings = [*verdict.counts.findings]
    changes = {}
    for index, finding in enumerate(findings):
        is_meant = finding.outcome != "passed" or finding.sentence == verdict.explained
        change = _change(finding, steps) if is_meant and not finding.span else None
        if change is not None:
            changes[index] = change
    costs = _costs([*changes.values()])
    for index, cost in zip(changes, costs, strict=True):
        findings[index] = findings[index].replace(cost=cost)
    findings.sort(key=_upper_end, reverse=True)  # stable: findings without a price keep their order
    return verdict.replace(counts=verdict.counts.replace(findings=tuple(findings)))


def priced_launches(verdict: Verdict, run: Run) -> Verdict:
    """Return a verdict on launches, with naive prices added to the changes of bytes and FLOPs."""
    if run.machine.device == "cpu":
        return verdict
    return priced(verdict, (run, run), (NO_LOG_OF_LAUNCHES, NO_LOG_OF_LAUNCHES))


def _upper_end(finding: Finding) -> float:
    """Return the upper end of a finding's price; 0 if it has no price or is not a regression.

    If a price cannot be predicted, it might be the highest, so infinity is returned. For changes
    that were not replayed because other changes have higher naive prices, 0 is returned.
    """
    cost = finding.cost
    if finding.outcome != "regressed" or cost is None:
        return 0.0
    if cost.most_s is None:
        return 0.0 if cost.why_naive == NOT_REPLAYED else math.inf
    return cost.most_s


@dataclass(frozen=True)
class _Change:
    """A changed count. If the log of the dry run is complete, the time of the change can be predicted."""

    finding: Finding
    steps: LoggedSteps
    collective: Collective | None  # one of the collectives that the finding counts, if it counts any

    @property
    def is_of_kernels(self) -> bool:
        """Whether kernels or their FLOPs changed."""
        return self.finding.quantity in (KERNELS.name, FLOPS.name)

    @property
    def is_of_waits(self) -> bool:
        """Whether the number of times that the host waits for the GPU changed."""
        is_wait = self.finding.quantity in (HOST_READS.name, BLOCKING.name)
        return is_wait or self.finding.field.endswith(SYNCHRONIZE)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases whose kernels or FLOPs may have changed: all phases if the finding is about several."""
        named = tuple(phase for phase in PHASES if self.finding.field.endswith(f" in {phase}"))
        return named or PHASES

    @property
    def more(self) -> int:
        """The difference of the counts."""
        return self.finding.now - self.finding.before

    @property
    def larger(self) -> int:
        """The number of the arm with the larger count: 0 for arm A, 1 for arm B."""
        return int(self.more > 0)


def _change(finding: Finding, steps: LoggedSteps) -> _Change | None:
    """Return the change of a finding. None for counts whose time is not predicted, such as memory."""
    change = _Change(finding, steps, _collective(finding, steps.arms))
    if change.collective is not None:
        return change
    is_on_gpu = steps.arms[0].machine.device != "cpu"
    return change if is_on_gpu and (change.is_of_kernels or change.is_of_waits) else None


def _collective(finding: Finding, arms: Sequence[Run]) -> Collective | None:
    """Return one of the collectives that the finding counts. None if the finding counts something else.

    Barriers are left out, because the host waits for them in ways that the log does not show.
    """
    for run in arms:
        for entry in run.counts:
            for collective in entry.counts.collectives:
                shape = (collective.kind, collective.ranks, collective.apart)
                if collective_name(*shape) == finding.quantity and collective.kind != "barrier":
                    return collective
    return None


def _costs(changes: Sequence[_Change]) -> list[Cost | None]:
    """Return the cost of each change. The regressions with the highest naive prices are replayed first."""
    alone = [_alone_s(change) for change in changes]

    def rank(index: int) -> tuple[bool, float]:
        change = changes[index]
        alone_s = change.more * WAIT_S if change.is_of_waits else alone[index]
        return change.finding.outcome == "regressed", abs(alone_s or 0.0)

    costs: list[Cost | None] = [None] * len(changes)
    replays = 0
    for index in sorted(range(len(changes)), key=rank, reverse=True):
        if replays == MOST:
            costs[index] = _naive(alone[index], NOT_REPLAYED)
            continue
        costs[index] = cost = _cost(changes[index], alone[index])
        replays += cost is not None and cost.why_naive is None
    return costs


def _cost(change: _Change, alone_s: float | None) -> Cost | None:
    """Return the price of a change: from a replay if that is possible, and otherwise the naive price.

    Returns None if nothing can be priced: the change is not about collectives, has no naive price, and has no
    log to replay.
    """
    try:
        if change.collective is not None:
            return _of_collective(change, change.collective)
        return _of_waits(change) if change.is_of_waits else _of_kernels(change)
    except (PredictionError, FileError) as error:
        logs = change.steps.logs
        needed = logs if change.is_of_kernels else [logs[change.larger]]
        if (
            alone_s is None
            and change.collective is None
            and not all(isinstance(log, RunDir) for log in needed)
        ):
            return None
        return _naive(alone_s, str(error))


def _naive(alone_s: float | None, why: str) -> Cost:
    least_s = None if alone_s is None else min(0.0, alone_s)
    return Cost(least_s=least_s, most_s=alone_s, why_naive=why)


def _of_collective(change: _Change, collective: Collective) -> Cost:
    finding = change.finding
    fewer, more = sorted((finding.before, finding.now))
    run = change.steps.arms[change.larger]
    group = Group(collective.kind, collective.ranks, collective.apart)
    step = change.steps.step(change.larger, finding)
    machine = speeds(run.machine, run.case)
    if finding.unit == "bytes":
        its = price(step, group, fewer / more, machine)
    else:
        its = price_of_calls(step, group, fewer, machine)
    return _as_cost(its, is_more=change.larger == 1)


def _of_waits(change: _Change) -> Cost:
    run = change.steps.arms[change.larger]
    step = change.steps.step(change.larger, change.finding)
    its = price_of_waits(step, abs(change.more), speeds(run.machine, run.case))
    return _as_cost(its, is_more=change.larger == 1)


def _of_kernels(change: _Change) -> Cost:
    before, now = (change.steps.step(arm, change.finding) for arm in (0, 1))
    run = change.steps.arms[1]
    has_flops = change.finding.quantity == FLOPS.name
    machine = speeds(run.machine, run.case)
    return _as_cost(price_of_kernels(before, now, change.phases, machine, with_flops=has_flops), is_more=True)


def _as_cost(its: Price, *, is_more: bool) -> Cost:
    """Convert the price of work to the cost of a change. Without `is_more`, arm B saves this work."""
    if its.least_s is None or its.most_s is None:
        return Cost(hidden_above=its.hidden_above)
    least_s, most_s = (its.least_s, its.most_s) if is_more else (-its.most_s, -its.least_s)
    return Cost(least_s=least_s, most_s=most_s, step_s=its.step_s, hidden_above=its.hidden_above)


def _alone_s(change: _Change) -> float | None:
    """Return the time that the changed work takes by itself; None if it is unknown.

    The time of waits is unknown, because it depends on the work that the host has given the GPU before.
    """
    run = change.steps.arms[1]
    if change.collective is not None:
        return _collectives_alone_s(change, change.collective)
    if change.finding.quantity == FLOPS.name:
        peak = _peak_flops(run)
        return None if peak is None else change.more / peak
    if change.is_of_waits:
        return None
    try:
        before, now = (change.steps.step(arm, change.finding).step for arm in (0, 1))
        return kernels_alone_s(before, now, change.phases, speeds(run.machine, run.case))
    except (PredictionError, FileError):
        return None


def _collectives_alone_s(change: _Change, collective: Collective) -> float | None:
    run = change.steps.arms[1]
    if change.finding.unit == "bytes":
        rate = _link_bytes_per_s(collective, run)
        return None if rate is None else change.more / rate
    devices = run.case.topology.processes_per_node
    return change.more * latency_s(collective.kind, collective.ranks, collective.apart, devices)


def _link_bytes_per_s(collective: Collective, run: Run) -> float | None:
    """Return the rate of the link that a group of ranks uses; None if it is unknown.

    Each device has an equal part of its machine's network. If the group spans machines, its rate is the sum
    of the parts of its members on one machine.
    """
    machine = run.machine
    devices = run.case.topology.processes_per_node
    if is_inside(collective.ranks, collective.apart, devices):
        return machine.link_bytes_per_s
    network = None if machine.interconnect is None else network_bytes_per_s(machine.interconnect)
    here = ranks_on_one_machine(collective.apart, devices)
    return None if network is None else network * here / devices


def _peak_flops(run: Run) -> float | None:
    """Return the dense peak of the GPU; None if it is unknown. FLOPs in float8 run at twice the speed."""
    has_float8 = any(operator.startswith(SCALED) for entry in run.counts for operator in entry.counts.ops)
    return None if is_in_tf32(run) else run.machine.peak_flops("float8" if has_float8 else run.case.precision)
