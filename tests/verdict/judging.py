"""Helpers that make launches, baselines and noise for tests of verdicts, and that read a verdict."""

import json
from collections.abc import Sequence
from typing import Any

from perfsuite.documents import plain
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.metric import GATED
from perfsuite.results.outcome import Check, Outcome, Verdict
from perfsuite.results.rank_report import Observed, SpanTimes
from perfsuite.results.run import Run
from perfsuite.verdict.judge import judge
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import Noise
from tests.samples import make_figures, make_gpu_machine, make_launches, make_run

MIB = 2.0**20
NAMES = [metric.name for metric in GATED]
USUAL = (1.001, 0.997, 1.003, 1.0, 0.998, 1.004, 0.996, 1.002, 0.999, 1.001, 0.998, 1.0, 1.002, 0.997, 1.003)
"""Speeds of launches of unchanged code, relative to the baseline."""


H100 = make_gpu_machine()


def noise_of(sigma: float, *, exponent: float = 0.0) -> ClassNoise:
    noise = Noise(sigma=sigma, degrees_of_freedom=30)
    return ClassNoise(by_metric=dict.fromkeys(NAMES, noise), probe_exponent=exponent)


QUIET = noise_of(0.005)
ORDINARY = noise_of(0.04)
LOUD = noise_of(0.1)
BASELINE = from_runs(make_launches(1.0, 1.003, 0.998, 1.001, 0.997))
BASELINE_H100 = from_runs(make_launches(1.0, 1.003, 0.998, 1.001, 0.997, machine=H100))


def judged(
    runs: Sequence[Run], baseline: Baseline | None = BASELINE, noise: ClassNoise = QUIET, **policy: Any
) -> Verdict:
    """Judge these launches. Check that writing the verdict as JSON and reading it does not change it."""
    verdict = judge(runs, baseline, noise, Policy(**policy))
    written = json.dumps(plain(verdict), allow_nan=False)
    assert plain(Verdict.model_validate_json(written)) == json.loads(written)
    return verdict


def session(
    runs: Sequence[Run], baseline: Baseline | None = BASELINE, noise: ClassNoise = QUIET, **policy: Any
) -> Verdict:
    """Judge one launch after the other until there is a verdict, like `run.measure`."""
    for used in range(1, len(runs) + 1):
        verdict = judged(runs[:used], baseline, noise, **policy)
        if verdict.outcome != "undecided":
            break
    return verdict


def usual(factor: float = 1, **figures: Any) -> list[Run]:
    return make_launches(*(factor * speed for speed in USUAL), **figures)


def run_with(**figures: Any) -> Run:
    return make_run(figures=make_figures(**figures))


def check_of(verdict: Verdict, metric: str) -> Check:
    return next(check for check in verdict.checks if check.metric == metric)


def outcomes(verdict: Verdict) -> dict[str, Outcome]:
    return {check.metric: check.outcome for check in verdict.checks}


def of_sessions(*factors: float) -> Baseline:
    """Return a baseline on a GPU with five launches per session. `factors` are the speeds of the sessions."""
    speeds = [factor * speed for factor in factors for speed in USUAL[:5]]
    names = [str(number) for number in range(len(factors)) for _ in range(5)]
    return from_runs(make_launches(*speeds, machine=H100), sessions=names)


def in_environment(**environment: str) -> Run:
    return make_run(observed=Observed(settings={}, environment=environment))


def with_loss(factor: float, *, first: int = 0, last: int = 25, speed: float = 1) -> Run:
    """Return a launch whose loss is the usual one times `factor` from step `first` to before step `last`."""
    loss = [4.0 - 0.05 * step for step in range(25)]
    changed = [value * factor if first <= step < last else value for step, value in enumerate(loss)]
    return make_launches(speed)[0].replace(loss=tuple(changed))


PROBED = from_runs(make_launches(1.0, 1.003, 0.998, 1.001, 0.997, probe_s_p50=0.010))


def on_machine(speed: float, *, tokens: float = 1) -> Run:
    """Return a launch on a machine whose probe runs at `speed`, relative to the baseline."""
    return make_launches(tokens, probe_s_p50=0.010 / speed)[0]


def on_gpu(matmul: float | None, **probe: float) -> Run:
    """Return a launch on a GPU whose matrix product reached `matmul` TFLOP/s before the workload."""
    probes = probe if matmul is None else {"matmul_tflops": matmul, **probe}
    return make_launches(1, machine=H100)[0].replace(device_probe=probes)


def with_stack(run: Run, **versions: str) -> Run:
    seen = run.observed or Observed(settings={}, environment={})
    before = {"torch": "2.13.0", "nccl": "2.27.3", "cuda": "12.8", "cudnn": "9.1", "driver": "580"}
    return run.replace(observed=seen.replace(environment={**before, **versions}))


SICK_GPU = on_gpu(600)

CHOSEN = frozenset(
    [
        # If the case sets a dtype or compilation, a difference is a `mismatch`. The case does not set, for
        # example, the dtype of adapters, or whether a library compiles the loss.
        *("parameter_dtype", "compute_dtype", "reduce_dtype", "compiled", "optimizer_parameters"),
        *("parameters_changed", "adapters", "optimizer", "wrapped_modules", "backend", "attention_kernel"),
        *("mamba_ssm", "fabric_strategy", "fabric_precision", "gradient_norm", "gradient_clipping"),
        *("spmd_backend", "loss_chunks", "rope", "forced", "patched", "replaced"),
    ]
)
"""Settings that cases do not ask for. A library chooses them, or perfsuite does for a library's version.

Each new setting must be added either here, or to `perfsuite.verdict.comparability.ASKED` if cases ask for it.
"""


def gpu(factor: float = 1, **figures: Any) -> list[Run]:
    return usual(factor, machine=H100, **figures)


def lasting(span: str, *seconds: float, scatter: float = 0.02) -> list[Run]:
    """Return launches on a GPU with a span of about these seconds. Their speed is unchanged."""
    factors = [1 + scatter * sign for sign in (0, 1, -1, 0.5, -0.5)] * 3
    several = [*seconds] * 15 if len(seconds) == 1 else seconds
    return [
        run.replace(
            figures=run.figures.replace(spans_s={span: duration_s * factor}),
            spans={span: SpanTimes(seconds=(duration_s * factor,))},
        )
        for run, duration_s, factor in zip(usual(machine=H100), several, factors, strict=False)
    ]


IMPORTS = "start-up: imports"
OF_IMPORTS = f"seconds of {IMPORTS}"
OF_SPANS = ClassNoise(by_metric={**QUIET.by_metric, OF_IMPORTS: Noise(sigma=0.02, degrees_of_freedom=30)})
NO_SPAN = usual(machine=H100)
