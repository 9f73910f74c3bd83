"""Put a price in milliseconds on the counts that changed.

Between two dry runs, prices are predicted for collectives, kernels, FLOPs and waits of the host for the GPU.
Launches log no streams, so there the price of a collective is the time that its bytes take on the link.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.analysis.step_time.expected import speeds, why_unknown
from perfsuite.analysis.step_time.price import Group, Price, price, price_of_kernels, price_of_waits
from perfsuite.analysis.step_time.streams import reported_step
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError, PredictionError
from perfsuite.results import device_log_file
from perfsuite.results.amounts import duration
from perfsuite.results.counts import PHASES, Collective, Counts, collective_name, numbers, of_rank
from perfsuite.results.device_log import Entry
from perfsuite.results.outcome import Cost, CountCheck, Finding
from perfsuite.results.quantities import BLOCKING, FLOPS, HOST_READS, KERNELS
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir

MOST = 5  # maximum number of findings with a price, because predicting a price takes seconds
SYNCHRONIZE = ".synchronize"  # ends the field of counted calls that wait for all work, a stream or an event
NO_LOG_OF_LAUNCHES = "only dry runs log when streams wait for each other"
NO_LOG_OF_BASELINE = "a baseline does not contain the log of its step"

Log = RunDir | str  # the directory with the log of a dry run, or the reason why there is no log


def priced(check: CountCheck, arms: Sequence[Run], logs: Sequence[Log]) -> CountCheck:
    """Return the check with prices on changed counts, and the most expensive findings first.

    `arms` are runs of arm A and arm B, and `logs` are their logs. A baseline has no run of its own, so a run
    of the case takes its place.
    """
    priced_findings = []
    number = 0
    for finding in check.findings:
        if finding.outcome != "passed" and not finding.span and number < MOST:
            cost = _cost(finding, arms, logs)
            if cost is not None:
                number += 1
                finding = finding.replace(cost=cost, sentence=finding.sentence + in_words(cost))
        priced_findings.append(finding)
    priced_findings.sort(key=_upper_end, reverse=True)  # stable: findings without a price keep their order
    return check.replace(findings=tuple(priced_findings))


def priced_launches(check: CountCheck, run: Run) -> CountCheck:
    """Return the check of launches with the time that the changed bytes take on the links of a machine."""
    if run.machine.device == "cpu":
        return check
    return priced(check, (run, run), (NO_LOG_OF_LAUNCHES, NO_LOG_OF_LAUNCHES))


def _cost(finding: Finding, arms: Sequence[Run], logs: Sequence[Log]) -> Cost | None:
    """Return the price of a finding. Returns None for counts whose time is not predicted, such as memory."""
    collective = _collective(finding, arms)
    if collective is not None:
        return _of_collective(finding, collective, arms, logs)
    is_of_kernels = finding.quantity in (KERNELS.name, FLOPS.name)
    is_of_waits = finding.quantity in (HOST_READS.name, BLOCKING.name) or finding.field.endswith(SYNCHRONIZE)
    if arms[0].machine.device == "cpu" or not (is_of_kernels or is_of_waits):
        return None
    needed = logs if is_of_kernels else [logs[_larger(finding)]]
    if not all(isinstance(log, RunDir) for log in needed):
        return None
    try:
        return _of_waits(finding, arms, logs) if is_of_waits else _of_kernels(finding, arms, logs)
    except (PredictionError, FileError) as error:
        return Cost(why_naive=str(error))


def _of_collective(
    finding: Finding, collective: Collective, arms: Sequence[Run], logs: Sequence[Log]
) -> Cost | None:
    """Return the price of changed bytes. Without a log, returns None if the speed of the link is unknown."""
    try:
        return _of_bytes(finding, collective, arms, logs)
    except (PredictionError, FileError) as error:
        moved_s = _moved_s(finding, collective, arms[1].machine)
        if moved_s is None and not isinstance(logs[1], RunDir):
            return None
        return Cost(
            least_s=None if moved_s is None else min(0.0, moved_s), most_s=moved_s, why_naive=str(error)
        )


def _collective(finding: Finding, arms: Sequence[Run]) -> Collective | None:
    """Return one of the collectives whose bytes the finding counts. None if it counts something else."""
    if finding.unit != "bytes":
        return None
    for run in arms:
        for entry in run.counts:
            for collective in entry.counts.collectives:
                shape = (collective.kind, collective.ranks, collective.apart)
                if collective_name(*shape) == finding.quantity:
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


def _of_bytes(finding: Finding, collective: Collective, arms: Sequence[Run], logs: Sequence[Log]) -> Cost:
    larger = _larger(finding)  # the step of this arm is replayed
    share = min(finding.now, finding.before) / max(finding.now, finding.before)
    run = arms[larger]
    group = Group(collective.kind, collective.ranks, collective.apart)
    step = _step(run, finding, logs[larger])
    return _as_cost(price(step, group, share, speeds(run.machine, run.case)), is_more=larger == 1)


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


def _step(run: Run, finding: Finding, log: Log) -> Sequence[Entry]:
    """Return the reported step of the first rank of a finding. Raises `PredictionError` or `FileError`."""
    if isinstance(log, str):
        raise PredictionError(log)
    rank = numbers(finding.ranks)[0]
    counts = of_rank(run.counts, rank) or Counts()
    reason = why_unknown(counts, run.case, run.machine)
    if reason is not None:
        raise PredictionError(reason)
    return reported_step(device_log_file.read(log.device_log(rank)))


def _moved_s(finding: Finding, collective: Collective, machine: Machine) -> float | None:
    """Return the time that the changed bytes take on the link within a machine.

    Returns None if the collective does not use this link, or if the speed of the link is unknown.
    """
    width = collective.ranks * collective.apart
    rate = machine.link_bytes_per_s if width <= machine.devices else None
    return None if rate is None else (finding.now - finding.before) / rate


def in_words(cost: Cost) -> str:
    """Return the price as the end of a sentence."""
    if cost.why_naive is not None:
        return _naive_words(cost.most_s, cost.why_naive)
    nothing = "" if cost.hidden_above is None else f"nothing if each GPU can send {_rate(cost.hidden_above)}"
    if cost.least_s is None or cost.most_s is None or cost.step_s is None:
        but = f", but {nothing}" if nothing else ""
        return f"; predicted cost: unknown, because the speed of the network is unknown{but}"
    largest = max(abs(cost.least_s), abs(cost.most_s)) / cost.step_s
    is_saving = cost.most_s <= 0 and cost.least_s < 0
    kind = "saving" if is_saving else "cost"
    ends = (-cost.most_s, -cost.least_s) if is_saving else (cost.least_s, cost.most_s)
    also = f", and {nothing}" if nothing else ""
    return (
        f"; predicted {kind}: {duration(ends[0])} to {duration(ends[1])} of a step of "
        f"{duration(cost.step_s)} (at most {largest:.1%}){also}"
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2g} GB/s or more"


def _naive_words(moved_s: float | None, why: str) -> str:
    if moved_s is None:
        return f"; how much the step waits for it is unknown: {why}"
    alone = duration(abs(moved_s))
    return f"; sending these bytes takes {alone}, but how much of that the step waits for is unknown: {why}"
