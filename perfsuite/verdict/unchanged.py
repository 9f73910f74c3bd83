"""Recognise sessions in which nothing changed since the baseline. Pure.

If times differ in such a session, only the machine can be the cause. The session is an A/A test: it shows how
much sessions of the same code differ.
"""

from collections.abc import Iterator, Sequence

from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import CPU_S_PER_STEP, DATA_WAIT, TOKENS_PER_S, TOKENS_PER_S_MEAN
from perfsuite.results.outcome import BY_THE_MACHINE, Check, CountCheck, Outcome, Verdict
from perfsuite.results.rank_report import LOADER
from perfsuite.results.run import Run, timed_span
from perfsuite.verdict import comparability

TIMES = {metric.name for metric in (TOKENS_PER_S, TOKENS_PER_S_MEAN, CPU_S_PER_STEP)}
"""Metrics that a machine can change, in addition to the times of spans. The data wait is one of them only if
the settings of the loader are known on both sides. If they are not known, a change of these settings, and not
the machine, might be the cause."""
UNKNOWN_CODE = "it is unknown whether the same code ran"
NOT_OBSERVED = "settings and versions were not observed for the baseline, for a launch, or for both"
MIGHT_BE_THE_MACHINE = "the machine might be the cause, but {why}"
NOTHING_CHANGED = (
    "nothing that is recorded changed since the baseline: code, versions, variables, settings and work are "
    "the same. So the machine is {change}, not the code. If this machine is as it should be, accept a "
    "baseline of several sessions (perfsuite baseline accept --sessions 3 --reason '...')"
)


def unless_unchanged(verdict: Verdict, runs: Sequence[Run], baseline: Baseline) -> Verdict:
    """Return the verdict, or one that does not blame the code if nothing changed since the baseline.

    If nothing changed, slower times are `unhealthy`, and faster times are `passed`. The verdict is kept if
    another metric, such as memory, changed. The machine cannot change such a metric, so the cause must be
    something that is not recorded.
    """
    not_compared = _work_not_compared(verdict.counts)
    if verdict.outcome not in ("regressed", "improved") or not (verdict.is_same_work or not_compared):
        return verdict
    moved = [check for check in verdict.checks if check.outcome in ("regressed", "improved")]
    data_wait = verdict.check(DATA_WAIT.name)
    knows_loader = _knows_loader(runs, baseline)
    if not all(_is_time(check, knows_loader=knows_loader) for check in moved):
        return verdict
    if data_wait is not None and data_wait.outcome != "passed" and not knows_loader:
        return verdict
    changed = dict.fromkeys(change for run in runs for change in changes(run, baseline))
    if not_compared is not None:
        changed[not_compared] = None
    unknown = {UNKNOWN_CODE, NOT_OBSERVED, not_compared}
    if changed and changed.keys() <= unknown and verdict.outcome == "regressed":
        why = MIGHT_BE_THE_MACHINE.format(why=next(iter(changed)))
        return verdict.replace(reasons=(*verdict.reasons, why))
    if changed:
        return verdict
    is_slower = verdict.outcome == "regressed"
    outcome: Outcome = "unhealthy" if is_slower else "passed"
    checks = [
        check.replace(outcome="inconclusive" if is_slower else "passed", note=BY_THE_MACHINE)
        if check in moved
        else check
        for check in verdict.checks
    ]
    reason = NOTHING_CHANGED.format(change="slower" if is_slower else "faster")
    others = dict.fromkeys(
        change for run in runs for change in comparability.allocation_changes(run, baseline)
    )
    if others:
        reason += f". The job got other GPUs or cores of the node: {'; '.join(others)}"
    return verdict.replace(
        outcome=outcome, checks=tuple(checks), explained=None, reasons=(reason, *verdict.reasons)
    )


def _work_not_compared(counts: CountCheck | None) -> str | None:
    """Return which work was not compared, provided that all other work is the same.

    Returns None if all work was compared, or if some work differs.
    """
    if counts is None or not counts.compared or counts.outcome != "passed" or counts.findings:
        return None
    open_work = [*counts.one_sided, *(f"{field}: varies, and was never so large" for field in counts.grown)]
    return f"not all work was compared ({open_work[0]})" if open_work else None


def _is_time(check: Check, *, knows_loader: bool) -> bool:
    if check.metric == DATA_WAIT.name:
        return knows_loader
    return check.metric in TIMES or timed_span(check.metric) is not None


def _knows_loader(runs: Sequence[Run], baseline: Baseline) -> bool:
    """Return whether the settings of the loader are known in all launches and in the baseline."""
    seen = [baseline.observed, *(run.observed for run in runs)]
    return all(observed is not None and LOADER in observed.environment for observed in seen)


def changes(run: Run, baseline: Baseline) -> Iterator[str]:
    """Yield what changed since the baseline, and facts that are unknown on either side.

    These are not compared:

    - the description of the machine itself: the nodes, their clocks and their probes
    - the names of the GPUs and cores of a node that the job got
    - fields of the case that do not change the work
    - the choices of autotuning, which can differ by chance
    - everything that is measured
    """
    if run.inject is not None:
        yield f"the fault {run.inject} was injected"
    if baseline.observed is None or run.observed is None:
        yield NOT_OBSERVED
        return
    if baseline.observed.code is None or run.observed.code is None:
        yield UNKNOWN_CODE
    if run.dtypes != baseline.dtypes:
        yield "the dtypes of the model"
    yield from comparability.setting_differences(run, baseline)
    yield from comparability.environment_changes(run, baseline, of_allocation=False)
