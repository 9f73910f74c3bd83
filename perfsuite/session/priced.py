"""Put a price in milliseconds on the counts that changed.

Between two dry runs, prices are predicted for collectives, kernels, FLOPs and waits of the host for the GPU.
Launches log no streams, so there the price is naive: the time that the bytes of a collective take on the
link, or the FLOPs on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.analysis.figures import is_in_tf32
from perfsuite.analysis.step_time.expected import speeds, why_unknown
from perfsuite.analysis.step_time.links import is_inside, network_bytes_per_s, ranks_on_one_machine
from perfsuite.analysis.step_time.prediction import Replays
from perfsuite.analysis.step_time.price import (
    Group,
    Price,
    price,
    price_of_calls,
    price_of_kernels,
    price_of_waits,
)
from perfsuite.analysis.step_time.streams import reported_step
from perfsuite.errors import FileError, PredictionError
from perfsuite.results import device_log_file
from perfsuite.results.cost import Cost
from perfsuite.results.counts import (
    COUNTED_STEP,
    PHASES,
    Collective,
    Counts,
    collective_name,
    numbers,
    of_rank,
)
from perfsuite.results.dry_facts import SCALED
from perfsuite.results.outcome import Finding, Verdict
from perfsuite.results.quantities import BLOCKING, FLOPS, HOST_READS, KERNELS
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir

MOST = 5  # maximum number of findings with a price, because predicting a price takes seconds
SYNCHRONIZE = ".synchronize"  # ends the field of counted calls that wait for all work, a stream or an event
NO_LOG_OF_LAUNCHES = "only dry runs log when streams wait for each other"
NO_LOG_OF_BASELINE = "a baseline does not contain the log of its step"
NOT_IN_EACH_STEP = f"not all steps have this change, and a dry run logs only step {COUNTED_STEP}"
IN_TF32 = "the script multiplies fp32 matrices in TF32, whose speed is not known"

Log = RunDir | str  # the directory with the log of a dry run, or the reason why there is no log


def priced(verdict: Verdict, arms: Sequence[Run], logs: Sequence[Log]) -> Verdict:
    """Return the verdict with prices on changed counts, also on the change that explains it.

    The most expensive findings come first. `arms` are runs of arm A and arm B, and `logs` are their logs. A
    baseline has no run of its own, so a run of the case takes its place.
    """
    if verdict.counts is None:
        return verdict
    priced_findings = []
    number = 0
    for finding in verdict.counts.findings:
        explains = finding.sentence == verdict.explained
        is_meant = explains or finding.outcome != "passed"
        if is_meant and not finding.span and number < MOST:
            cost = _cost(finding, arms, logs)
            if cost is not None:
                number += 1
                finding = finding.replace(cost=cost)
        priced_findings.append(finding)
    priced_findings.sort(key=_upper_end, reverse=True)  # stable: findings without a price keep their order
    counts = verdict.counts.replace(findings=tuple(priced_findings))
    return verdict.replace(counts=counts)


def priced_launches(verdict: Verdict, run: Run) -> Verdict:
    """Return the verdict on launches with the time that changed bytes and FLOPs take by themselves."""
    if run.machine.device == "cpu":
        return verdict
    return priced(verdict, (run, run), (NO_LOG_OF_LAUNCHES, NO_LOG_OF_LAUNCHES))


def _cost(finding: Finding, arms: Sequence[Run], logs: Sequence[Log]) -> Cost | None:
    """Return the price of a finding.

    Returns None for counts whose time is not predicted, such as memory, and for counts without a naive price
    whose log is missing.
    """
    collective = _collective(finding, arms)
    is_of_kernels = finding.quantity in (KERNELS.name, FLOPS.name)
    is_of_waits = finding.quantity in (HOST_READS.name, BLOCKING.name) or finding.field.endswith(SYNCHRONIZE)
    if collective is None and (arms[0].machine.device == "cpu" or not (is_of_kernels or is_of_waits)):
        return None
    try:
        if collective is not None:
            return _of_collective(finding, collective, arms, logs)
        return _of_waits(finding, arms, logs) if is_of_waits else _of_kernels(finding, arms, logs)
    except (PredictionError, FileError) as error:
        naive_s = _naive_s(finding, collective, arms[1])
        needed = logs if is_of_kernels else [logs[_larger(finding)]]
        if naive_s is None and collective is None and not all(isinstance(log, RunDir) for log in needed):
            return None
        return Cost(
            least_s=None if naive_s is None else min(0.0, naive_s), most_s=naive_s, why_naive=str(error)
        )


def _collective(finding: Finding, arms: Sequence[Run]) -> Collective | None:
    """Return one of the collectives that the finding counts. None if it counts something else.

    Barriers are left out, because the host waits for them in ways that the log does not show.
    """
    for run in arms:
        for entry in run.counts:
            for collective in entry.counts.collectives:
                shape = (collective.kind, collective.ranks, collective.apart)
                if collective_name(*shape) == finding.quantity and collective.kind != "barrier":
                    return collective
    return None


def _larger(finding: Finding) -> int:
    """Return the number of the arm with the larger count: 0 for arm A, 1 for arm B."""
    return int(finding.now > finding.before)


def _upper_end(finding: Finding) -> float:
    """Return the upper end of a finding's price; 0 if it has no price or is not a regression."""
    if finding.outcome != "regressed" or finding.cost is None:
        return 0.0
    return finding.cost.most_s or 0.0


def _of_collective(
    finding: Finding, collective: Collective, arms: Sequence[Run], logs: Sequence[Log]
) -> Cost:
    larger = _larger(finding)  # the step of this arm is replayed
    fewer, more = sorted((finding.before, finding.now))
    run = arms[larger]
    group = Group(collective.kind, collective.ranks, collective.apart)
    step = _step(run, finding, logs[larger])
    machine = speeds(run.machine, run.case)
    if finding.unit == "bytes":
        its = price(step, group, fewer / more, machine)
    else:
        its = price_of_calls(step, group, fewer, machine)
    return _as_cost(its, is_more=larger == 1)


def _of_waits(finding: Finding, arms: Sequence[Run], logs: Sequence[Log]) -> Cost:
    larger = _larger(finding)
    run = arms[larger]
    step = _step(run, finding, logs[larger])
    waits = abs(finding.now - finding.before)
    return _as_cost(price_of_waits(step, waits, speeds(run.machine, run.case)), is_more=larger == 1)


def _of_kernels(finding: Finding, arms: Sequence[Run], logs: Sequence[Log]) -> Cost:
    before, now = (_step(run, finding, log) for run, log in zip(arms, logs, strict=True))
    phase = next(phase for phase in PHASES if finding.field.endswith(f" in {phase}"))
    machine = speeds(arms[1].machine, arms[1].case)
    has_flops = finding.quantity == FLOPS.name
    return _as_cost(price_of_kernels(before, now, phase, machine, with_flops=has_flops), is_more=True)


def _as_cost(its: Price, *, is_more: bool) -> Cost:
    """Convert the price of work to a change from arm A to B. Without `is_more`, arm B saves this work."""
    if its.least_s is None or its.most_s is None:
        return Cost(hidden_above=its.hidden_above)
    least_s, most_s = (its.least_s, its.most_s) if is_more else (-its.most_s, -its.least_s)
    return Cost(least_s=least_s, most_s=most_s, step_s=its.step_s, hidden_above=its.hidden_above)


def _step(run: Run, finding: Finding, log: Log) -> Replays:
    """Return the reported step of the first rank of a finding. Raises `PredictionError` or `FileError`."""
    if isinstance(log, str):
        raise PredictionError(log)
    if finding.steps:
        raise PredictionError(NOT_IN_EACH_STEP)
    if is_in_tf32(run):
        raise PredictionError(IN_TF32)
    rank = numbers(finding.ranks)[0]
    counts = of_rank(run.counts, rank) or Counts()
    reason = why_unknown(counts, run.case, run.machine)
    if reason is not None:
        raise PredictionError(reason)
    return Replays(reported_step(device_log_file.read(log.device_log(rank))))


def _naive_s(finding: Finding, collective: Collective | None, run: Run) -> float | None:
    """Return the time that changed bytes or FLOPs take by themselves; None if it is unknown."""
    if collective is not None and finding.unit == "bytes":
        rate = _link_bytes_per_s(collective, run)
    elif finding.quantity == FLOPS.name:
        rate = _peak_flops(run)
    else:
        rate = None
    return None if rate is None else (finding.now - finding.before) / rate


def _link_bytes_per_s(collective: Collective, run: Run) -> float | None:
    """Return the rate of the link that a group of ranks uses; None if it is unknown.

    All members of the group on one machine share their parts of the machine's network.
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
