"""Decide from settings, environment and machine whether a launch can be compared with a baseline. Pure."""

import math
import re
from collections.abc import Mapping, Sequence

from perfsuite.analysis import health
from perfsuite.case.case import NOT_IN_ID
from perfsuite.results.amounts import amount, signed
from perfsuite.results.baseline import Baseline
from perfsuite.results.counts import numbers
from perfsuite.results.rank_report import UNSET, Observed
from perfsuite.results.run import Run
from perfsuite.verdict.noise import is_size
from perfsuite.verdict.robust import clipped_variance, sorted_logs, squares, t_quantile

SAME_MACHINE = (0.8, 1.25)
"""A launch is healthy if the machine's speed, measured with the probe, is between these shares of the speed
that the machine had when the baseline was measured."""
DEVICE_PROBE_SLOWER = 0.1
"""Share by which a GPU's matmul, copy or all-reduce may be slower than at the baseline. They are timed before
the workload. If the launches of the baseline scatter more, a larger share is allowed."""
DEVICE_PROBE_SIGMAS = 2.0
"""The same limit, in standard deviations of the baseline's launches. The larger of the two limits applies.
One healthy launch in 44 exceeds this limit, but a case ends only after three unhealthy launches."""
OBSERVED = "observed "  # prefix of observed settings in `setting_differences`
UNEXPLAINED = "settings differ, but no recorded version or variable does"
POWER_LIMIT_LOWER = 0.01  # share by which the GPUs' power limit may be lower than at the baseline
CLOCK_DIFFERS = 0.02  # the median SM clock in the measured window is listed if it changed by more than this
DEVICE_MEMORY_GREW = 256 * 2**20  # the GPU memory (from NVML) is listed if it grew by more bytes than this
PROBE_STACK = ("torch", "cuda", "cudnn", "nccl", "driver", "threads")
"""The software that affects the probes. If any of it changed, a slow probe does not mean a slow machine."""
OF_RANKS = re.compile(r" of ranks? [\d,-]+$")
"""The suffix of a variable's name if some ranks have another value of the variable than rank 0."""
OF_ALLOCATION = ("cores", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""The parts of the environment that name the GPUs and cores of a job."""
_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")  # of GPUs or cores, such as `0-3,6`
_UUID = re.compile(r"(GPU|MIG)-")
# Settings that the case or the user chose. If one differs, launches are `unlike`. Other settings are only
# listed.
ASKED = frozenset(
    [
        # a field of the case
        *("world_size", "device", "attention", "recomputing_blocks", "trained", "lora", "quantised_layers"),
        # an option of the framework, a configuration of the user, or the script
        *("wrapper", "sharding", "parallelism", "tp_mode", "tp_linear_async_communication", "pp_engine"),
        *("gradient_dtype", "config_sha256", "mesh", "cuda_graphs", "accelerate_config"),
        *("context_parallel", "experts_per_rank", "low_precision_modules"),
        *("rank_holds", "offload", "pipeline"),
        # a switch of torch, or NVIDIA_TF32_OVERRIDE
        *("fp32_matmul", "fp32_convolution", "deterministic"),
    ]
)
OTHER_CODE = "the code that ran is not the same"
NOT_OBSERVED = "not observed"  # prefix of the value of a setting that could not be observed


def launch_problems(run: Run, baseline: Baseline | None) -> list[str]:
    """List why a launch is set aside: its machine was unhealthy, or was not as fast as at the baseline."""
    reasons = [health.NOT_SAMPLED] if run.health is not None and not run.health.samples else []
    reasons += [*health.machine_problems(run.health, run.machine), *_slow_gpus(run, baseline)]
    if baseline is not None:
        slower = [*_less_power(run, baseline), *_slower_machine(run, baseline)]
        if slower:
            reasons += [*slower, *_clock_change(run, baseline)]
    return reasons


def _slower_machine(run: Run, baseline: Baseline) -> list[str]:
    # A slower all-reduce in a new NCCL does not make the machine unhealthy.
    if not same_stack(run, baseline):
        return []
    reasons = []
    probe = run.figures.probe_s_p50
    typical = baseline.median("probe_s_p50")
    if probe is not None and typical is not None:
        speed = typical / probe if probe else math.inf
        if not SAME_MACHINE[0] < speed < SAME_MACHINE[1]:
            reasons.append(
                f"according to the probe, the machine ran at {speed:.0%} of its speed at the baseline"
            )
    for name, usual in baseline.device_probe().items() if run.machine.device == "cuda" else ():
        now = run.device_probe.get(name)
        allowed = _may_be_less([launch.device_probe.get(name) for launch in baseline.launches])
        if now is not None and now < (1 - allowed) * usual:
            ranks = [rank for rank, probe in enumerate(run.rank_probes) if probe.get(name) == now]
            whose = f" of {health.gpu_of(run, ranks[0])}" if ranks else ""
            reading = f"{name} was {now:.4g}{whose}, compared with {usual:.4g} at the baseline"
            reasons.append(f"before the workload, {reading} (up to {allowed:.0%} less is healthy)")
    return reasons


def _slow_gpus(run: Run, baseline: Baseline | None) -> list[str]:
    """Describe each probe in which the slowest GPU lags further behind the others than at the baseline.

    Without a baseline, describe each probe in which the slowest GPU lags by more than `health.UNEQUAL_LAG`.
    """
    usual_shares = {} if baseline is None else baseline.slowest_share()
    reasons = []
    for name, share in run.slowest_shares().items():
        usual = usual_shares.get(name)
        at_baseline = ""
        least = 1 - health.UNEQUAL_LAG
        if baseline is not None and usual is not None:
            least = (
                1 - _may_be_less([launch.slowest_share.get(name) for launch in baseline.launches])
            ) * usual
            at_baseline = f"{1 - usual:.0%} less at the baseline, "
        if share < least:
            allowed = f"{at_baseline}up to {1 - least:.0%} less is healthy"
            reasons.append(f"{health.slowest_gpu(run, name)} ({allowed})")
    return reasons


def _may_be_less(values: Sequence[float | None]) -> float:
    """Return the share by which a rate may be lower than at the baseline, given the baseline's scatter."""
    rates = [value for value in values if value is not None]
    if len(rates) < 3 or not all(map(is_size, rates)):
        return DEVICE_PROBE_SLOWER
    degrees = len(rates) - 1
    variance = clipped_variance(squares(sorted_logs(rates)), degrees) * (1 + 1 / len(rates))
    scatter = -math.expm1(-t_quantile(DEVICE_PROBE_SIGMAS, degrees) * math.sqrt(variance))
    return max(DEVICE_PROBE_SLOWER, scatter)


def _less_power(run: Run, baseline: Baseline) -> list[str]:
    values = [observed.environment.get(health.POWER_LIMIT) for observed in _observed(run, baseline)]
    limits = [min(map(float, limit.split(", "))) for limit in values if limit is not None]
    if len(limits) < 2 or limits[1] >= (1 - POWER_LIMIT_LOWER) * limits[0]:
        return []
    then, now = limits
    return [f"the GPUs' power limit is {now:g} W, and was {then:g} W at the baseline (`nvidia-smi -pl`)"]


def setting_differences(run: Run, baseline: Baseline) -> dict[str, tuple[str, str]]:
    """Return the settings that differ, by name, with the values of the baseline and of the run.

    Observed settings that the baseline lacks are left out.
    """
    settings = {"hardware class": (baseline.hardware_class, run.machine.hardware_class)}
    if run.flops is not None and baseline.flops is not None:
        settings["FLOP formula"] = (baseline.flops.formula, run.flops.formula)
    before, now = (observed.settings for observed in _observed(run, baseline))
    settings |= {f"{OBSERVED}{key}": (before[key], now.get(key, NOT_OBSERVED)) for key in sorted(before)}
    for name in type(run.case).model_fields:
        asked = getattr(baseline.case, name), getattr(run.case, name)
        # Compare the values themselves, because different values can have the same text.
        if name not in NOT_IN_ID and asked[0] != asked[1]:
            settings[name] = str(asked[0]), str(asked[1])
    return {key: (then, now) for key, (then, now) in settings.items() if then != now}


def is_unlike(setting: str, then: str, now: str) -> bool:
    """Return whether these two values mean that the user requested different work."""
    return setting in ASKED and then != now and is_seen(then) and is_seen(now)


def is_seen(value: str) -> bool:
    """Return whether a worker could observe the setting."""
    return value != "?" and not value.startswith(NOT_OBSERVED)


def unlike(run: Run, baseline: Baseline) -> list[str]:
    """Describe the `setting_differences` that prevent a comparison.

    Only settings that a library chose may differ.
    """
    return [
        f"cannot be compared: {key} was {then!r} in the baseline and is {now!r}"
        for key, (then, now) in setting_differences(run, baseline).items()
        if not key.startswith(OBSERVED) or is_unlike(key.removeprefix(OBSERVED), then, now)
    ]


def library_choices(run: Run, baseline: Baseline) -> list[str]:
    """Describe the settings that a library chose differently, and those that only the baseline observed."""
    return [
        f"{key.removeprefix(OBSERVED)}: {then} -> {now}"
        + (" (not requested by the case)" if is_seen(then) and is_seen(now) else "")
        for key, (then, now) in setting_differences(run, baseline).items()
        if key.startswith(OBSERVED) and not is_unlike(key.removeprefix(OBSERVED), then, now)
    ]


def unexplained(run: Run, baseline: Baseline) -> list[str]:
    """Return the `library_choices`, but only if no recorded version, variable or code differs."""
    then, now = _observed(run, baseline)
    is_explained = then.environment != now.environment or _is_other_code(then, now)
    return [] if is_explained else [f"{UNEXPLAINED}: {choice}" for choice in library_choices(run, baseline)]


def run_changes(run: Run, baseline: Baseline) -> tuple[str, ...]:
    """Return all changes since the baseline that can explain a verdict but do not prevent a comparison."""
    return (
        *environment_changes(run, baseline),
        *_other_nodes(run, baseline),
        *_probe_changes(run, baseline),
        *_clock_change(run, baseline),
        *_device_memory_grew(run, baseline),
    )


def changed_values(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return a sentence with both values for each name whose value changed, in alphabetical order."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return {name: f"{name}: {before.get(name, UNSET)} -> {now.get(name, UNSET)}" for name in names}


def of_any_allocation(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the number of GPUs and cores in place of their names.

    A scheduler can give a job other GPUs and cores of a node each night. All GPUs of a node are alike, and so
    are all cores. So only the number of GPUs and cores matters.
    """
    return {
        name: _number_of(value) if OF_RANKS.sub("", name) in OF_ALLOCATION else value
        for name, value in environment.items()
    }


def allocation_changes(run: Run, baseline: Baseline) -> list[str]:
    """Return how the GPUs and cores that the job got differ from those of the baseline's job."""
    then, now = (observed.environment for observed in _observed(run, baseline))
    changed = changed_values(then, now)
    return [change for name, change in changed.items() if OF_RANKS.sub("", name) in OF_ALLOCATION]


def _number_of(names: str) -> str:
    """Return how many GPUs or cores a list names, such as `5 of them` for `0-3,6`.

    Any other text, such as `all` or `void`, is returned as it is.
    """
    if _NUMBERS.fullmatch(names):
        return f"{len(numbers(names))} of them"
    uuids = names.split(",")
    return f"{len(uuids)} of them" if all(map(_UUID.match, uuids)) else names


def environment_changes(run: Run, baseline: Baseline, *, of_allocation: bool = True) -> list[str]:
    """Return the versions, variables and newly observed settings that changed, with both values.

    Without `of_allocation`, it does not matter which GPUs and cores of a node the job got.
    """
    then, today = _observed(run, baseline)
    before = then.environment if of_allocation else of_any_allocation(then.environment)
    now = today.environment if of_allocation else of_any_allocation(today.environment)
    changed = [*changed_values(before, now).values()]
    observed = {*then.settings}
    if then.settings.get("trained") == "all":  # these settings are not recorded if all weights are trained
        observed |= {"adapters", "lora", "quantised_layers"}
    new = sorted(today.settings.keys() - observed)
    changed += [f"{key}: not observed -> {today.settings[key]}" for key in new]
    return changed + ([OTHER_CODE] if _is_other_code(then, today) else [])


def _is_other_code(then: Observed, now: Observed) -> bool:
    """Return whether the digests of the code differ; False if a digest is missing, as in an old baseline."""
    return then.code is not None and now.code is not None and then.code != now.code


def _other_nodes(run: Run, baseline: Baseline) -> list[str]:
    measured = sorted({name for launch in baseline.launches for name in launch.nodes})
    new = ", ".join(node.name for node in run.nodes if node.name not in measured)
    reason = f"nodes: {new} did not measure the baseline, which was measured on {', '.join(measured)}"
    return [reason] if measured and new else []


def _probe_changes(run: Run, baseline: Baseline) -> list[str]:
    usual = baseline.device_probe() if run.machine.device == "cuda" else {}
    probes = [
        ("probe between the steps (s)", baseline.median("probe_s_p50"), run.figures.probe_s_p50),
        *((name, rate, run.device_probe.get(name)) for name, rate in usual.items()),
    ]
    return [
        f"{name}: {then:.4g} -> {today:.4g} ({today / then - 1:+.0%})"
        for name, then, today in probes
        # pragma: no mutate >: no quotient of floats has exactly this logarithm
        if is_size(then) and is_size(today) and abs(math.log(today / then)) > DEVICE_PROBE_SLOWER
    ]


def _clock_change(run: Run, baseline: Baseline) -> list[str]:
    """Return the change of the slowest GPU's SM clock. Someone might have locked it (`nvidia-smi -lgc`)."""
    then = baseline.median("sm_clock_mhz")
    now = run.figures.sm_clock_mhz
    if not is_size(then) or not is_size(now) or abs(now / then - 1) <= CLOCK_DIFFERS:
        return []
    return [f"SM clock in the measured window: {then:.0f} -> {now:.0f} MHz ({now / then - 1:+.0%})"]


def _device_memory_grew(run: Run, baseline: Baseline) -> list[str]:
    """Return the growth of GPU memory in use, including memory outside torch's allocator (such as NCCL's)."""
    then = baseline.median("device_memory_bytes")
    now = run.figures.device_memory_bytes
    if then is None or now is None or now - then <= DEVICE_MEMORY_GREW:
        return []
    grown = f"{amount(then, 'bytes')} -> {amount(now, 'bytes')} ({signed(now - then, 'bytes')})"
    return [f"GPU memory in use according to NVML, including memory outside torch's allocator: {grown}"]


def _observed(run: Run, baseline: Baseline) -> tuple[Observed, Observed]:
    """Return what was observed for the baseline and for the run.

    If the observations of either side are missing, both results are empty.
    """
    if baseline.observed is not None and run.observed is not None:
        return baseline.observed, run.observed
    nothing = Observed(settings={}, environment={})
    return nothing, nothing


def same_stack(run: Run, baseline: Baseline) -> bool:
    """Return whether the probes ran with the same software and number of threads, as far as is known."""
    before, now = (observed.environment for observed in _observed(run, baseline))
    return all(before[key] == now[key] for key in PROBE_STACK if key in before and key in now)
