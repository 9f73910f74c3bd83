"""From a baseline and a run to a verdict. Pure: no clock, no disk; imports neither torch nor pytest."""

from __future__ import annotations

import math
from typing import Literal

from perfsuite.baseline import Baseline
from perfsuite.data import Data
from perfsuite.metric import GATED, PEAK_MEMORY, TOKENS_PER_S, Metric
from perfsuite.result import Run

Outcome = Literal["passed", "improved", "regressed", "recorded", "unhealthy", "failed"]
FAILING: frozenset[Outcome] = frozenset({"regressed", "failed"})
UNMEASURED: frozenset[Outcome] = frozenset({"failed", "unhealthy"})
"""Outcomes that say nothing about the speed of the code."""
_WORST_FIRST: tuple[Outcome, ...] = ("failed", "regressed", "unhealthy", "improved", "passed", "recorded")

SAME_MACHINE = (0.8, 1.25)
"""Speeds of the machine, relative to the baseline, up to which the probe corrects well. Outside, a change
that stands with and without the correction is the code's; one that does not is the machine's."""


class Check(Data):
    """One metric of a run beside its baseline."""

    metric: str
    unit: str
    outcome: Outcome
    measured: float | None
    baseline: float | None
    worsening: float | None = None
    """Relative change for the worse: +0.05 is 5 % slower, or 5 % larger. Negative is better."""
    tolerance: float
    note: str | None = None


class Verdict(Data):
    """What a run means."""

    outcome: Outcome
    checks: tuple[Check, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why it failed, where no metric says it."""
    changed: tuple[str, ...] = ()
    """What differs in the environment since the baseline: it may explain, it does not forbid to compare."""


def judge(run: Run, baseline: Baseline | None) -> Verdict:
    """Compare one run with its baseline, metric by metric; the worst outcome is the verdict."""
    if run.failure is not None:
        return Verdict(outcome="failed", reasons=(f"{run.failure.kind}: {run.failure.message}",))
    if baseline is None:
        return _overall(tuple(_check(metric, run, None) for metric in GATED))
    if unlike := _unlike(run, baseline):
        return Verdict(outcome="failed", reasons=tuple(f"cannot be compared: {reason}" for reason in unlike))
    verdict = _overall(tuple(_check(metric, run, baseline) for metric in GATED))
    return verdict.replace(changed=tuple(_changed(run, baseline)))


def _overall(checks: tuple[Check, ...]) -> Verdict:
    return Verdict(outcome=min((check.outcome for check in checks), key=_WORST_FIRST.index), checks=checks)


def _check(metric: Metric, run: Run, baseline: Baseline | None) -> Check:
    now: float | None = getattr(run.figures, metric.name)
    before = baseline.median(metric.name) if baseline is not None else None
    bad = next((value for value in (now, before) if value is not None and not math.isfinite(value)), None)
    tolerance = metric.tolerance(run.machine.device)
    check = Check(
        metric=metric.name,
        unit=metric.unit,
        outcome="recorded",
        measured=now,
        baseline=before,
        tolerance=tolerance,
    )
    if bad is not None:
        which = "baseline's value" if bad is before else "measured value"
        return check.replace(outcome="failed", note=f"the {which} is {bad}")
    if baseline is None:
        if now is None:
            return check.replace(outcome="failed", note="was not measured")
        return check
    if before is None:
        return check
    if now is None:
        return check.replace(outcome="failed", note="the baseline has it, this run does not")
    worsening = metric.worsening(now, before)
    outcome = _against(tolerance, worsening)
    if metric is not TOKENS_PER_S or (speed := _machine_speed(run, baseline)) is None:
        return check.replace(outcome=outcome, worsening=worsening)
    corrected = metric.worsening(now / speed, before)
    note = f"by the probe between steps, the machine now runs at {speed:.1%} of its speed at the baseline"
    if outcome != _against(tolerance, corrected):
        outcome = _against(tolerance, corrected) if SAME_MACHINE[0] < speed < SAME_MACHINE[1] else "unhealthy"
    return check.replace(outcome=outcome, worsening=corrected, note=f"corrected: {note}")


def _against(tolerance: float, worsening: float) -> Outcome:
    if worsening > tolerance:
        return "regressed"
    return "improved" if worsening < -tolerance else "passed"


def _machine_speed(run: Run, baseline: Baseline) -> float | None:
    """How fast the machine itself is now, relative to the baseline: the same probe, then and now."""
    then = baseline.median("probe_s_p50")
    now = run.figures.probe_s_p50
    return then / now if then is not None and now is not None else None


def _unlike(run: Run, baseline: Baseline) -> list[str]:
    """Settings that make two runs incomparable, with both values."""
    pairs = {"hardware class": (baseline.hardware_class, run.machine.hardware_class)}
    if run.flops is not None and baseline.flops is not None:
        pairs["FLOP formula"] = (baseline.flops.formula, run.flops.formula)
    if run.observed is not None and baseline.observed is not None:
        before, now = baseline.observed.settings, run.observed.settings
        pairs |= {
            f"observed {key}": (before.get(key, "?"), now.get(key, "?")) for key in sorted({*before, *now})
        }
    for name in type(run.case).model_fields:
        if name not in ("timeout_s", "hardware"):
            pairs[name] = (str(getattr(baseline.case, name)), str(getattr(run.case, name)))
    return [
        f"{key} was {then!r} in the baseline and is {now!r}"
        for key, (then, now) in pairs.items()
        if then != now
    ]


def _changed(run: Run, baseline: Baseline) -> list[str]:
    if run.observed is None or baseline.observed is None:
        return []
    before, now = baseline.observed.environment, run.observed.environment
    return [
        f"{key}: {before.get(key, 'unset')} -> {now.get(key, 'unset')}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def sentence(check: Check) -> str:
    """A check in words: what was measured, against what, by how much, allowed how much."""
    name = {TOKENS_PER_S.name: "tokens/s", PEAK_MEMORY.name: "peak memory"}[check.metric]
    now, before = (amount(value, check.unit) for value in (check.measured, check.baseline))
    if check.worsening is None:
        text = f"{name}: {now}" + (f", baseline {before}" if check.baseline is not None else "")
    else:
        word = {"tokens/s": ("slower", "faster"), "bytes": ("more", "less")}[check.unit][check.worsening < 0]
        text = (
            f"{name}: {now}, baseline {before}: {abs(check.worsening):.1%} {word}, "
            f"{check.tolerance:.1%} allowed: {check.outcome}"
        )
    return f"{text} ({check.note})" if check.note else text


def amount(value: float | None, unit: str) -> str:
    """A figure for people: bytes in binary units, tokens/s with separators."""
    if value is None:
        return "-"
    if unit == "bytes":
        for name, size in (("GiB", 2**30), ("MiB", 2**20)):
            if value >= size:
                return f"{value / size:.2f} {name}" if name == "GiB" else f"{value / size:.1f} {name}"
    return f"{value:,.0f} {unit}"
