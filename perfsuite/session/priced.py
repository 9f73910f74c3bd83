"""Put a price in milliseconds on the collectives that changed between two dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfsuite.analysis.step_time.expected import speeds, why_unknown
from perfsuite.analysis.step_time.price import Group, price
from perfsuite.analysis.step_time.streams import reported_step
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError, PredictionError
from perfsuite.results import device_log_file
from perfsuite.results.amounts import duration
from perfsuite.results.counts import Collective, Counts, collective_name, numbers, of_rank
from perfsuite.results.device_log import Entry
from perfsuite.results.outcome import Cost, CountCheck, Finding
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir

MOST = 5  # maximum number of findings with a price, because each takes seconds


def priced(check: CountCheck, arms: Sequence[Run], directories: Sequence[RunDir]) -> CountCheck:
    """Return the check with a price on changed collectives, and the most expensive findings first.

    `arms` are the dry runs of arm A and arm B, and `directories` have their logs.
    """
    groups = {
        collective_name(collective.kind, collective.ranks, collective.apart): collective
        for run in arms
        for collective in _collectives(run)
    }
    findings = []
    number = 0
    for finding in check.findings:
        collective = groups.get(finding.quantity)
        is_judged = finding.outcome != "passed" and not finding.span and finding.unit == "bytes"
        if is_judged and collective is not None and number < MOST:
            number += 1
            cost = _cost(finding, collective, arms, directories)
            finding = finding.replace(cost=cost, sentence=finding.sentence + in_words(cost))
        findings.append(finding)
    findings.sort(key=_upper_end, reverse=True)  # stable: without a price, the order stays
    return check.replace(findings=tuple(findings))


def _upper_end(finding: Finding) -> float:
    """Return the largest change of the step's time; 0 without a price, and for improvements and remarks."""
    if finding.outcome != "regressed" or finding.cost is None:
        return 0.0
    return finding.cost.most_s or 0.0


def _collectives(run: Run) -> Iterator[Collective]:
    for entry in run.counts:
        yield from entry.counts.collectives


def _cost(
    finding: Finding, collective: Collective, arms: Sequence[Run], directories: Sequence[RunDir]
) -> Cost:
    rank = numbers(finding.ranks)[0]
    is_more = finding.now > finding.before
    larger = int(is_more)  # the arm with more bytes, whose step is replayed
    share = min(finding.now, finding.before) / max(finding.now, finding.before)
    run = arms[larger]
    group = Group(collective.kind, collective.ranks, collective.apart)
    try:
        step = _step(run, rank, directories[larger])
        estimate = price(step, group, share, speeds(run.machine, run.case))
    except (PredictionError, FileError) as error:
        return _naive(finding, collective, run.machine, str(error))
    if estimate.least_s is None or estimate.most_s is None:
        return Cost(hidden_above=estimate.hidden_above)
    ends = (estimate.least_s, estimate.most_s) if is_more else (-estimate.most_s, -estimate.least_s)
    return Cost(least_s=ends[0], most_s=ends[1], step_s=estimate.step_s, hidden_above=estimate.hidden_above)


def _step(run: Run, rank: int, directory: RunDir) -> Sequence[Entry]:
    """Return the log of a rank's reported step. Raises `PredictionError` or `FileError`."""
    counts = of_rank(run.counts, rank) or Counts()
    reason = why_unknown(counts, run.case, run.machine)
    if reason is not None:
        raise PredictionError(reason)
    return reported_step(device_log_file.read(directory.device_log(rank)))


def _naive(finding: Finding, collective: Collective, machine: Machine, why: str) -> Cost:
    """Return the time that the bytes take on the link within a machine, if they use it and it is known."""
    width = collective.ranks * collective.apart
    rate = machine.link_bytes_per_s if width <= machine.devices else None
    moved_s = None if rate is None else (finding.now - finding.before) / rate
    return Cost(least_s=None if moved_s is None else min(0.0, moved_s), most_s=moved_s, why_naive=why)


def in_words(cost: Cost) -> str:
    """Return the price as the end of a sentence."""
    if cost.why_naive is not None:
        return _naive_words(cost.most_s, cost.why_naive)
    nothing = "" if cost.hidden_above is None else f"nothing if each GPU can send {_rate(cost.hidden_above)}"
    if cost.least_s is None or cost.most_s is None or cost.step_s is None:
        but = f", but {nothing}" if nothing else ""
        return f"; predicted cost: unknown, because the speed of the network is unknown{but}"
    largest = max(abs(cost.least_s), abs(cost.most_s)) / cost.step_s
    kind = "saving" if cost.most_s <= 0 and cost.least_s < 0 else "cost"
    ends = sorted((abs(cost.least_s), abs(cost.most_s)))
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
