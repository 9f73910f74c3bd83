"""From a baseline and the launches of today to a verdict. Pure: no clock, no disk.

Each launch is one piece of evidence. Until the evidence suffices the verdict is `undecided`, which asks for
one more launch in fresh processes. Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from perfsuite.results import health
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S, Metric, judged
from perfsuite.results.outcome import WORST_FIRST, Check, Outcome, Verdict
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.run import Run
from perfsuite.verdict.comparable import (
    _device_memory_grew,
    _metrics_gone,
    _probe_changes,
    _same_stack,
    differences,
    environment_changes,
    launch_problems,
)
from perfsuite.verdict.loss import loss_differs
from perfsuite.verdict.noise import PROBE_CORRECTED, ClassNoise, against, is_size, pairs
from perfsuite.verdict.probe_correction import probe_corrected
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES, Noise, decide

MAX_UNHEALTHY = 3
"""Launches on an unhealthy machine after which that is the verdict, unless more were healthy."""
UNKNOWN_NOISE = "the noise between launches is unknown: too few launches in the baselines of this hardware"
TOO_FEW_LAUNCHES = f"only {FEWEST_LAUNCHES} launches or more can show a regression"
UNKNOWN_EXPONENT = "how speed follows the probe is unknown: accept more launches"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How many launches a verdict may cost."""

    max_launches: int = MAX_LAUNCHES
    """Of 1 or 2, which show no regression, the verdict is passed or inconclusive: a quick look."""
    min_launches: int = 1
    """Healthy launches at the least, whatever they show: what a baseline is accepted from."""
    record_launches: int = 3
    """Launches of a baseline that is recorded because there is none."""
    max_unhealthy: int = MAX_UNHEALTHY
    """As `MAX_UNHEALTHY`; fewer where more launches would be in vain."""

    @property
    def most(self) -> int:
        """Healthy launches at the most: those asked for at the least are made in any case."""
        return max(self.max_launches, self.min_launches)


def judge(runs: Sequence[Run], baseline: Baseline | None, noise: ClassNoise, policy: Policy) -> Verdict:
    """Judge the launches so far, in the order they were made. Call again after one more while `undecided`."""
    used = len(runs)
    for run in runs:
        if run.failure is not None:
            reasons = [f"{run.failure.kind}: {run.failure.message}"]
            reasons += [f"meanwhile {why}" for why in health.machine_problems(run.health, run.machine)]
            said = "\n".join(filter(None, [run.failure.message, run.failure.traceback]))
            if (fault := health.hardware_fault(said)) is not None:
                reasons.append(f"meanwhile hardware: {fault}: look at `nvidia-smi -q` and dmesg (Xid)")
            return Verdict(outcome="failed", launches=used, failure=run.failure.kind, reasons=tuple(reasons))
    sick = {number: why for number, run in enumerate(runs, 1) if (why := launch_problems(run, baseline))}
    healthy = [run for number, run in enumerate(runs, 1) if number not in sick]
    if len(sick) >= max(policy.max_unhealthy, len(healthy)):
        verdict = _despite_the_machine(runs, baseline) or Verdict(outcome="unhealthy", launches=used)
    elif not healthy:
        verdict = Verdict(outcome="undecided", launches=used)
    else:
        if baseline is None:
            verdict = _first_time(healthy, used, policy)
        else:
            verdict = _compare(healthy, used, baseline, noise, policy)
        if len(healthy) < policy.min_launches and verdict.failure in (None, "unlike", "loss"):
            verdict = verdict.replace(outcome="undecided", failure=None)
    if baseline is not None:
        verdict = verdict.replace(
            changed=(
                *environment_changes(runs[-1], baseline),
                *_probe_changes(runs[-1], baseline),
                *_device_memory_grew(runs[-1], baseline),
                *_metrics_gone(baseline),
            )
        )
    set_aside = tuple(f"launch {number} set aside: {'; '.join(why)}" for number, why in sick.items())
    return verdict.replace(unhealthy_launches=tuple(sick), reasons=(*verdict.reasons, *set_aside))


def _compare(runs: list[Run], used: int, baseline: Baseline, noise: ClassNoise, policy: Policy) -> Verdict:
    """Judge healthy launches against the baseline."""
    if (failed := _cannot_be_compared(runs, baseline)) is not None:
        return failed.replace(launches=used)
    launches = [run.figures for run in runs] + [launch.figures for launch in baseline.launches]
    checks = tuple(_check(metric, runs, baseline, noise, policy) for metric in judged(launches))
    return _overall(checks, used)


def _cannot_be_compared(runs: Sequence[Run], baseline: Baseline) -> Verdict | None:
    if unlike := differences(runs[-1], baseline):
        why = tuple(
            f"cannot be compared: {key} was {then!r} in the baseline and is {now!r}"
            for key, (then, now) in unlike.items()
        )
        return Verdict(outcome="failed", launches=len(runs), failure="unlike", reasons=why)
    if (difference := loss_differs(runs, baseline)) is not None:
        return Verdict(outcome="failed", launches=len(runs), failure="loss", reasons=(difference,))
    return None


def _despite_the_machine(runs: Sequence[Run], baseline: Baseline | None) -> Verdict | None:
    """What no sick machine explains: other settings, another loss, more memory of a GPU. None: nothing."""
    if baseline is None:
        return None
    if (failed := _cannot_be_compared(runs, baseline)) is not None:
        return failed
    memory = _unjudged(PEAK_MEMORY, runs, baseline)
    if memory.outcome == "recorded" and runs[0].machine.device == "cuda":
        memory = _exact(PEAK_MEMORY, memory)
    return _overall((memory,), len(runs)) if memory.outcome == "regressed" else None


def _first_time(runs: list[Run], used: int, policy: Policy) -> Verdict:
    """Nothing to compare with: enough launches to make a baseline that knows its noise."""
    checks = tuple(_unjudged(metric, runs) for metric in judged(run.figures for run in runs))
    verdict = _overall(checks, used)
    if verdict.outcome == "recorded" and len(runs) < policy.record_launches:
        return verdict.replace(outcome="undecided")
    return verdict


def _overall(checks: tuple[Check, ...], used: int) -> Verdict:
    outcome = min((check.outcome for check in checks), key=WORST_FIRST.index)
    failure: FailureKind | None = "missing_metric" if outcome == "failed" else None
    return Verdict(outcome=outcome, launches=used, checks=checks, failure=failure)


def _unjudged(metric: Metric, runs: Sequence[Run], baseline: Baseline | None = None) -> Check:
    """The check of a metric before it is judged; `failed` if a launch lacks it or it is no number."""
    values = [metric.of(run.figures) for run in runs]
    measured = [value for value in values if value is not None]
    then = baseline.values(metric.name) if baseline is not None else []
    before = median(then) if then else None
    told = metric.counting(runs[0].case.unit)
    check = Check(
        metric=metric.name,
        label=told.label,
        unit=told.unit,
        outcome="recorded",
        measured=median(measured) if len(measured) == len(values) else None,
        baseline=before,
        tolerance=metric.tolerance(runs[0].machine.device),
    )
    if baseline is not None and before is None and metric in (TOKENS_PER_S, PEAK_MEMORY):
        return check.replace(outcome="failed", note="the baseline lacks it: accept or record it anew")
    if None in values:
        missing = "was not measured" if before is None else "the baseline has it, this run does not"
        return check.replace(outcome="failed", note=missing)
    for what, each in (("measured value", values), ("baseline's value", then)):
        if bad := [value for value in each if not is_size(value)]:
            return check.replace(outcome="failed", note=f"the {what} is {bad[0]}")
    return check


def _check(metric: Metric, runs: list[Run], baseline: Baseline, noise: ClassNoise, policy: Policy) -> Check:
    check = _unjudged(metric, runs, baseline)
    if check.outcome == "failed" or check.measured is None:
        return check
    if check.baseline is None:
        return check.replace(outcome="inconclusive", note="not in the baseline: accept or record it anew")
    if metric.judging(runs[0].machine.device) == "exact":
        return _exact(metric, check)
    now = [metric.cost(value) for run in runs if (value := metric.of(run.figures)) is not None]
    then = [metric.cost(value) for value in baseline.values(metric.name)]
    raw = _decided(check, now, then, noise.of(metric, corrected=False), baseline, policy)
    if metric not in PROBE_CORRECTED:
        return raw
    paired_now = pairs((run.figures for run in runs), metric)
    paired_then = pairs((launch.figures for launch in baseline.launches), metric)
    if len(paired_now) < len(now) or len(paired_then) < len(then):
        return raw
    exponent = noise.probe_exponent or 1.0
    at_its_speed = probe_corrected(paired_then, paired_now, exponent=exponent)
    launches, before = list(at_its_speed.launches), list(at_its_speed.baseline)
    corrected = _decided(check, launches, before, noise.of(metric), baseline, policy).replace(
        probe_exponent=exponent
    )
    if not noise.probe_exponent:
        is_certain = noise.knows_exponent or raw.outcome != "regressed"
        return raw if is_certain else _agreed(raw, corrected, UNKNOWN_EXPONENT)
    if _same_stack(runs[-1], baseline):
        return corrected
    return _agreed(corrected, raw, "the software that the probe runs through changed, too")


def _decided(
    check: Check,
    now: Sequence[float],
    then: Sequence[float],
    noise: Noise | None,
    baseline: Baseline,
    policy: Policy,
) -> Check:
    """The check with what the sequential test says of today's costs beside the baseline's."""
    if noise is None:
        return check.replace(outcome="inconclusive", note=UNKNOWN_NOISE)
    noise = against(noise, baseline.session_sizes(check.metric))
    most = max(policy.most, FEWEST_LAUNCHES)
    decision = decide(then, now, tolerance=check.tolerance, noise=noise, max_launches=most)
    told = check.replace(
        outcome=decision.outcome,
        worsening=decision.estimate,
        interval=decision.interval,
        minimum_detectable=decision.minimum_detectable_drop,
    )
    if policy.most >= FEWEST_LAUNCHES:
        return told
    told = told.replace(minimum_detectable=None)  # so few launches find nothing, however large
    if told.outcome == "undecided" and len(now) >= policy.most:
        return told.replace(outcome="inconclusive", note=TOO_FEW_LAUNCHES)
    return told


def _agreed(check: Check, other: Check, why: str) -> Check:
    """`check`, if it says the same with and without the probe; else it is not known."""
    if check.outcome == other.outcome:
        return check
    if "undecided" in (check.outcome, other.outcome):
        return check.replace(outcome="undecided")
    corrected, raw = (check, other) if check.probe_exponent is not None else (other, check)
    said = f"as measured {raw.outcome}, corrected for the machine's own speed {corrected.outcome}"
    return check.replace(outcome="inconclusive", note=f"{said}; {why}")


def _exact(metric: Metric, check: Check) -> Check:
    assert check.measured is not None
    assert check.baseline is not None
    worsening = metric.worsening(check.measured, check.baseline)
    outcome: Outcome = "passed"
    if abs(worsening) > check.tolerance:
        outcome = "regressed" if worsening > 0 else "improved"
    return check.replace(outcome=outcome, worsening=worsening, minimum_detectable=check.tolerance)
