"""Whether a launch may be compared with a baseline: settings, environment, machine. Pure."""

from __future__ import annotations

import math

from perfsuite.case.case import NOT_IN_ID
from perfsuite.results import health
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import find
from perfsuite.results.rank_report import Observed
from perfsuite.results.run import Run
from perfsuite.verdict.noise import is_size
from perfsuite.verdict.robust import clipped_variance, sorted_logs, squares, t_quantile

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


THROUGH_THE_STACK = ("torch", "cuda", "cudnn", "nccl", "driver")
"""What a probe runs through: where one of these changed, a slower probe does not blame the machine."""


def launch_problems(run: Run, baseline: Baseline | None) -> list[str]:
    """Why the machine, not the code, may be what this launch shows; empty if nothing speaks for it.

    The probes tell as long as the same software runs them: a new NCCL with a slower all-reduce is no sick
    machine.
    """
    reasons = health.machine_problems(run.health, run.machine)
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


def _metrics_gone(baseline: Baseline) -> list[str]:
    """Metrics of the baseline that nothing measures any more, because their package is not installed."""
    names = sorted({name for launch in baseline.launches for name in launch.figures.extra})
    return [
        f"metric {name}: in the baseline; the package that measures it is not installed, so it is not judged"
        for name in names
        if find(name) is None
    ]


def _same_stack(run: Run, baseline: Baseline) -> bool:
    if run.observed is None or baseline.observed is None:
        return True
    before, now = baseline.observed.environment, run.observed.environment
    return all(before[key] == now[key] for key in THROUGH_THE_STACK if key in before and key in now)
