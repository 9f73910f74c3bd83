"""From a baseline and the launches of today to a verdict. Pure: no clock, no disk.

Each launch is one piece of evidence. Until the evidence suffices the verdict is `undecided`, which asks for
one more launch in fresh processes. Imports neither torch nor pytest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal

from perfsuite.case.case import NOT_IN_ID
from perfsuite.documents import Data
from perfsuite.launch import health
from perfsuite.results.baseline import Baseline, loss_curve
from perfsuite.results.metric import GATED, PEAK_MEMORY, TOKENS_PER_S, Metric
from perfsuite.results.rank_report import FailureKind, Observed, Run
from perfsuite.verdict.noise import PROBE_CORRECTED, ClassNoise, against, is_size, pairs
from perfsuite.verdict.probe_correction import probe_corrected
from perfsuite.verdict.robust import clipped_variance, sorted_logs, squares, t_quantile
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES, Noise, decide

Outcome = Literal[
    "passed", "improved", "regressed", "inconclusive", "recorded", "unhealthy", "failed", "undecided"
]
_WORST_FIRST: tuple[Outcome, ...] = (
    "failed",
    "regressed",
    "undecided",
    "inconclusive",
    "improved",
    "passed",
    "recorded",
)
UNMEASURED: frozenset[Outcome] = frozenset({"failed", "unhealthy"})
"""Outcomes that say nothing about the speed of the code."""

SAME_MACHINE = (0.8, 1.25)
"""Speeds of the machine relative to its baseline, by the probe, up to which launches are comparable."""
DEVICE_PROBE_SLOWER = 0.1
"""A GPU whose own matrix product, copy or all-reduce is slower than at the baseline by more than this is
unhealthy; by more, where the launches of the baseline themselves scatter more."""
DEVICE_PROBE_SIGMAS = 2.0
"""Of the baseline's scatter: one healthy launch in 44 lies below, and only three of them end a case."""
POWER_LIMIT_LOWER = 0.01
"""A GPU that may draw less than at the baseline by more than this is unhealthy."""
DEVICE_MEMORY_GREW = 256 * 2**20
"""Bytes that NVML sees beyond the baseline's before it is listed among what changed."""
MAX_UNHEALTHY = 3
"""Launches on an unhealthy machine, if not outnumbered by healthy ones, before that is the verdict."""
THROUGH_THE_STACK = ("torch", "cuda", "cudnn", "nccl", "driver")
"""What a probe runs through: where one of these changed, a slower probe does not blame the machine."""
UNKNOWN_NOISE = "the noise between launches is unknown: too few launches in the baselines of this hardware"
TOO_FEW_LAUNCHES = f"only {FEWEST_LAUNCHES} launches or more can show a regression"
UNKNOWN_EXPONENT = "how speed follows the probe is unknown: accept more launches"
LOSS_SIGMAS = 4.3
"""A tenth of a loss curve that lies beyond so many is another loss: 1 in 60,000 by the normal."""
LOSS_DEGREES = 3
"""Degrees of freedom of the spread that ten tenths of one launch tell: they are correlated (simulated)."""
LOSS_FLOOR = 0.02
"""Relative difference of the loss curve that is always allowed: reductions in another order drift apart."""


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


class Check(Data):
    """One metric of today's launches beside its baseline."""

    metric: str
    label: str
    unit: str
    outcome: Outcome
    measured: float | None
    """Median of the launches."""
    baseline: float | None
    """Median of the baseline's launches."""
    tolerance: float
    worsening: float | None = None
    """Estimated relative change of the cost (seconds per token, bytes): +0.05 is 5 % slower, or larger."""
    interval: tuple[float, float] | None = None
    """99 % interval of `worsening`, the baseline's own uncertainty included."""
    minimum_detectable: float | None = None
    """The smallest worsening that this gate finds 95 times in 100."""
    probe_exponent: float | None = None
    """How far the machine's own speed, by the probe, was taken out; None: as measured."""
    note: str | None = None

    @property
    def blind(self) -> bool:
        """Whether this gate would often miss a change as large as its tolerance."""
        return self.minimum_detectable is not None and self.minimum_detectable > self.tolerance


class Verdict(Data):
    """What the launches mean."""

    outcome: Outcome
    launches: int
    checks: tuple[Check, ...] = ()
    failure: FailureKind | None = None
    reasons: tuple[str, ...] = ()
    """Why it failed, where no metric says it; and why launches were set aside."""
    unhealthy_launches: tuple[int, ...] = ()
    """Numbers, from 1, of the launches that are no evidence and can be no baseline."""
    changed: tuple[str, ...] = ()
    """What differs in the environment since the baseline: it may explain, it does not forbid to compare."""

    def healthy(self, runs: Sequence[Run]) -> list[Run]:
        """Those of the judged launches that are evidence, and may be a baseline."""
        return [run for number, run in enumerate(runs, 1) if number not in self.unhealthy_launches]


def judge(runs: Sequence[Run], baseline: Baseline | None, noise: ClassNoise, policy: Policy) -> Verdict:
    """Judge the launches so far, in the order they were made. Call again after one more while `undecided`."""
    used = len(runs)
    for run in runs:
        if run.failure is not None:
            reasons = [f"{run.failure.kind}: {run.failure.message}"]
            reasons += [f"meanwhile {why}" for why in health.unhealthy(run.health, run.machine)]
            said = "\n".join(filter(None, [run.failure.message, run.failure.traceback]))
            if (fault := health.hardware_fault(said)) is not None:
                reasons.append(f"meanwhile hardware: {fault}: look at `nvidia-smi -q` and dmesg (Xid)")
            return Verdict(outcome="failed", launches=used, failure=run.failure.kind, reasons=tuple(reasons))
    sick = {number: why for number, run in enumerate(runs, 1) if (why := unhealthy(run, baseline))}
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
            )
        )
    set_aside = tuple(f"launch {number} set aside: {'; '.join(why)}" for number, why in sick.items())
    return verdict.replace(unhealthy_launches=tuple(sick), reasons=(*verdict.reasons, *set_aside))


def _compare(runs: list[Run], used: int, baseline: Baseline, noise: ClassNoise, policy: Policy) -> Verdict:
    """Judge healthy launches against the baseline."""
    if (failed := _cannot_be_compared(runs, baseline)) is not None:
        return failed.replace(launches=used)
    checks = tuple(_check(metric, runs, baseline, noise, policy) for metric in GATED)
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
    checks = tuple(_unjudged(metric, runs) for metric in GATED)
    verdict = _overall(checks, used)
    if verdict.outcome == "recorded" and len(runs) < policy.record_launches:
        return verdict.replace(outcome="undecided")
    return verdict


def _overall(checks: tuple[Check, ...], used: int) -> Verdict:
    outcome = min((check.outcome for check in checks), key=_WORST_FIRST.index)
    failure: FailureKind | None = "missing_metric" if outcome == "failed" else None
    return Verdict(outcome=outcome, launches=used, checks=checks, failure=failure)


def _unjudged(metric: Metric, runs: Sequence[Run], baseline: Baseline | None = None) -> Check:
    """The check of a metric before it is judged; `failed` if a launch lacks it or it is no number."""
    values = [getattr(run.figures, metric.name) for run in runs]
    then = baseline.values(metric.name) if baseline is not None else []
    before = median(then) if then else None
    told = metric.counting(runs[0].case.unit)
    check = Check(
        metric=metric.name,
        label=told.label,
        unit=told.unit,
        outcome="recorded",
        measured=None if None in values else median(values),
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
    if metric.exact_on_gpu and runs[0].machine.device == "cuda":
        return _exact(metric, check)
    now = [metric.cost(getattr(run.figures, metric.name)) for run in runs]
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


def unhealthy(run: Run, baseline: Baseline | None) -> list[str]:
    """Why the machine, not the code, may be what this launch shows; empty if nothing speaks for it.

    The probes tell as long as the same software runs them: a new NCCL with a slower all-reduce is no sick
    machine.
    """
    reasons = health.unhealthy(run.health, run.machine)
    if baseline is None:
        return reasons
    reasons += _less_power(run, baseline)
    if not _same_stack(run, baseline):
        return reasons
    probe, typical = run.figures.probe_s_p50, baseline.median("probe_s_p50")
    if probe is not None and typical is not None:
        speed = typical / probe if probe else math.inf
        if not SAME_MACHINE[0] < speed < SAME_MACHINE[1]:
            reasons.append(f"by the probe, the machine ran at {speed:.0%} of its speed at the baseline")
    if run.machine.device == "cuda":
        for name, usual in baseline.device_probe().items():
            now, allowed = run.device_probe.get(name), _probe_may_be_slower(name, baseline)
            if now is not None and now < (1 - allowed) * usual:
                reasons.append(
                    f"before the workload, {name} was {now:.4g}, at the baseline {usual:.4g} "
                    f"({allowed:.0%} less is healthy)"
                )
    return reasons


def _probe_may_be_slower(name: str, baseline: Baseline) -> float:
    """How much slower a launch's device probe may be, a share: by the scatter of the baseline's launches."""
    rates = [launch.device_probe[name] for launch in baseline.launches if name in launch.device_probe]
    if len(rates) < 3 or not all(map(is_size, rates)):
        return DEVICE_PROBE_SLOWER
    degrees = len(rates) - 1
    variance = clipped_variance(squares(sorted_logs(name, rates)), degrees) * (1 + 1 / len(rates))
    return max(
        DEVICE_PROBE_SLOWER,
        -math.expm1(-t_quantile(DEVICE_PROBE_SIGMAS, degrees) * math.sqrt(variance)),
    )


def _less_power(run: Run, baseline: Baseline) -> list[str]:
    """Whether the GPUs may draw less power than at the baseline: by the lowest limit that is enforced."""
    limits = [
        min(map(float, observed.environment[health.POWER_LIMIT].split(", ")))
        for observed in (run.observed, baseline.observed)
        if observed is not None and health.POWER_LIMIT in observed.environment
    ]
    if len(limits) < 2 or limits[0] >= (1 - POWER_LIMIT_LOWER) * limits[1]:
        return []
    now, then = limits
    return [f"the GPUs' power limit is {now:g} W, at the baseline it was {then:g} W (`nvidia-smi -pl`)"]


def loss_differs(runs: Sequence[Run], baseline: Baseline) -> str | None:
    """Where today's loss curve leaves the baseline's, beyond what its launches scatter; None if nowhere."""
    usual = _usual_loss(baseline)
    for run in runs:
        for position, (now, (then, allowed)) in enumerate(zip(loss_curve(run.loss), usual, strict=False)):
            if not abs(now - then) <= allowed:
                share = f"{10 * position} to {10 * position + 10} % of the steps"
                return f"the loss over {share} is {now:.4f}, the baseline's {then:.4f} +- {allowed:.4f}"
    return None


def _usual_loss(baseline: Baseline) -> list[tuple[float, float]]:
    """The baseline's loss over each tenth of the steps, and how far from it the same code may be.

    A few launches hardly tell the spread of one tenth, so that of it with its neighbours counts where it is
    larger, and so does the median of all tenths' relative spreads (of no use where a loss crosses zero).
    Student's t, as the spread is estimated, and so is the mean that is compared with.
    """
    curves = [launch.loss for launch in baseline.launches if launch.loss]
    count = len(curves)
    tenths = [
        [curve[position] for curve in curves if len(curve) > position]
        for position in range(max(map(len, curves), default=0))
    ]
    means = [fmean(tenth) for tenth in tenths]
    if count < 3:
        return [(mean, LOSS_FLOOR * abs(mean)) for mean in means]
    spreads = [stdev(tenth) if len(tenth) > 1 else 0.0 for tenth in tenths]
    typical = median(
        [spread / abs(mean) if mean else 0.0 for spread, mean in zip(spreads, means, strict=True)]
    )
    sigmas = t_quantile(LOSS_SIGMAS, LOSS_DEGREES * (count - 1)) * math.sqrt(1 + 1 / count)
    return [
        (mean, max(sigmas * _near(spreads, tenth), max(sigmas * typical, LOSS_FLOOR) * abs(mean)))
        for tenth, mean in enumerate(means)
    ]


def _near(spreads: Sequence[float], tenth: int) -> float:
    """The spread of a tenth, or if that is larger the root mean square of it and its neighbours'."""
    neighbours = spreads[max(0, tenth - 1) : tenth + 2]
    return max(spreads[tenth], math.sqrt(fmean(spread * spread for spread in neighbours)))


def differences(run: Run, baseline: Baseline) -> dict[str, tuple[str, str]]:
    """Settings that make a run incomparable: the baseline's value and the run's, by name.

    A setting that the baseline does not have was not looked at then, by an earlier perfsuite: it is listed
    as a change of the environment (but for `trained`: see `_settings`). One that it has and the run lacks is
    a difference.
    """
    settings = {"hardware class": (baseline.hardware_class, run.machine.hardware_class)}
    if run.flops is not None and baseline.flops is not None:
        settings["FLOP formula"] = (baseline.flops.formula, run.flops.formula)
    if run.observed is not None and baseline.observed is not None:
        before, now = _settings(baseline.observed, run.observed), run.observed.settings
        settings |= {f"observed {key}": (then, now.get(key, "?")) for key, then in sorted(before.items())}
    for name in type(run.case).model_fields:
        then_asked, now_asked = getattr(baseline.case, name), getattr(run.case, name)
        if name not in NOT_IN_ID and then_asked != now_asked:  # their text may still say the same
            settings[name] = (str(then_asked), str(now_asked))
    return {key: (then, now) for key, (then, now) in settings.items() if then != now}


def _settings(then: Observed, now: Observed) -> dict[str, str]:
    """Of a baseline. An earlier perfsuite wrote `trained` where that was not all parameters alone."""
    assumed = {"trained": "all"} if "trained" in now.settings else {}
    return {**assumed, **then.settings}


def environment_changes(run: Run, baseline: Baseline) -> list[str]:
    """What a worker observed to be another version or variable than at the baseline, with both values; and
    settings that were not looked at when that was recorded."""
    if run.observed is None or baseline.observed is None:
        return []
    before, now = baseline.observed.environment, run.observed.environment
    changes = [
        f"{key}: {before.get(key, 'unset')} -> {now.get(key, 'unset')}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    known = _settings(baseline.observed, run.observed)
    if known.get("trained") == "all":  # they are of a model that is trained in part
        known |= dict.fromkeys(("adapters", "lora", "quantised_layers"), "")
    new = sorted((key, value) for key, value in run.observed.settings.items() if key not in known)
    return changes + [f"{key}: not looked at -> {value}" for key, value in new]


def _probe_changes(run: Run, baseline: Baseline) -> list[str]:
    """What the machine's probes found to be much faster or slower."""
    changed = []
    usual = baseline.device_probe() if run.machine.device == "cuda" else {}
    probes = [
        ("probe beside the steps (s)", baseline.median("probe_s_p50"), run.figures.probe_s_p50),
        *((name, rate, run.device_probe.get(name)) for name, rate in usual.items()),
    ]
    for name, then, today in probes:
        if is_size(then) and is_size(today) and abs(math.log(today / then)) > DEVICE_PROBE_SLOWER:
            changed.append(f"{name}: {then:.4g} -> {today:.4g} ({today / then - 1:+.0%})")
    return changed


def _device_memory_grew(run: Run, baseline: Baseline) -> list[str]:
    """What NVML sees in use and no allocator counts, of NCCL and other libraries, may be what grew."""
    then, now = baseline.median("device_memory_bytes"), run.figures.device_memory_bytes
    if then is None or now is None or now - then <= DEVICE_MEMORY_GREW:
        return []
    grown = f"{then / 2**30:.2f} GiB -> {now / 2**30:.2f} GiB (+{(now - then) / 2**30:.2f} GiB)"
    return [f"GPU memory in use, by NVML, also outside torch's allocator: {grown}"]


def _same_stack(run: Run, baseline: Baseline) -> bool:
    if run.observed is None or baseline.observed is None:
        return True
    before, now = baseline.observed.environment, run.observed.environment
    return all(before[key] == now[key] for key in THROUGH_THE_STACK if key in before and key in now)
