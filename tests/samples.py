"""Valid objects to start from. Each function takes the fields that a test wants to change."""

from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings

from perfsuite import documents
from perfsuite.analysis.health import all_shared
from perfsuite.case.case import Case, CaseFile, Topology
from perfsuite.case.hardware import Machine
from perfsuite.case.model import Model
from perfsuite.frameworks.fake import Fake
from perfsuite.frameworks.script import Script
from perfsuite.node.machine import gpu_machine
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.metric import GATED
from perfsuite.results.outcome import Check, Verdict
from perfsuite.results.rank_report import Failure, Memory, RankReport
from perfsuite.results.run import Figures, Health, LaunchFile, Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import ArmFacts, Conditions, Measurement, PytestRun, SessionFile
from perfsuite.verdict.arms import judge_pairs
from perfsuite.verdict.judge import judge
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import Noise

T = TypeVar("T")
deterministic = settings(deadline=None, derandomize=True, database=None, max_examples=60)
"""Settings for hypothesis: the same examples in every run, no matter how slow the machine is."""


def known(value: T | None) -> T:
    """Return a value that must not be None."""
    assert value is not None
    return value


_CASE = Case(
    model="gpt2-tiny",
    framework=Fake(),
    sequence_length=64,
    micro_batch=2,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    max_warmup_steps=5,
    steps=20,
)


def make_case(**changes: Any) -> Case:
    """Return a case of two simulated processes on a CPU: at most 5 warm-up steps and 20 measured steps."""
    return _CASE.replace(**changes)


def make_machine(**changes: Any) -> Machine:
    """Return a processor with two cores."""
    cores = {"device": "cpu", "device_name": "Test CPU", "hardware_class": "cpu-test-2c", "devices": 2}
    return Machine(**{**cores, "memory_bytes": 8 * 2**30, **changes})


def make_figures(**changes: Any) -> Figures:
    """Return the figures of a launch: 1,000 tokens/s in 64 MiB, with fairly even steps."""
    values = {"tokens_per_s": 1000.0, "tokens_per_s_mean": 990.0, "step_jitter": 1.1}
    return Figures(**{**values, "peak_memory_bytes": 64.0 * 2**20, **changes})


def make_run(**changes: Any) -> Run:
    """Return a launch that went well."""
    return _RUN.replace(**changes)


_RUN = Run(
    case=_CASE,
    machine=make_machine(),
    started_at="2026-01-02T03:04:05+00:00",
    duration_s=1.5,
    figures=make_figures(),
    step_s=(0.25,) * 25,
    loss=tuple(7 - 0.1 * step for step in range(25)),
    window=(0, 25),
)


def make_launches(*speeds: float, machine: Machine | None = None, **figures: Any) -> list[Run]:
    """Return one launch per speed, relative to 1,000 tokens/s. All launches have the `figures`."""
    of_each = (
        make_figures(**{"tokens_per_s": 1000 * speed, "tokens_per_s_mean": 990 * speed, **figures})
        for speed in speeds
    )
    return [make_run(machine=machine or make_machine(), figures=of_launch) for of_launch in of_each]


def make_baseline(*runs: Run) -> Baseline:
    """Return a baseline of these launches, or of five equal ones."""
    return from_runs(runs or [make_run()] * 5)


def make_report(rank: int = 0, **changes: Any) -> RankReport:
    """Return the report of one rank of `make_case`: 25 steps of 0.1 s, 256 tokens each, a falling loss."""
    steps = changes.get("step_s", (0.1,) * 25)
    return RankReport(
        rank=rank,
        world_size=2,
        host="here",
        clock="simulated",
        tokens_per_step=256,
        step_s=steps,
        wall_s=sum(steps),
        loss=_RUN.loss,
        memory=Memory(peak=10**6, method="simulated"),
    ).replace(**changes)


def make_gpu_machine(name: str = "NVIDIA H100 80GB HBM3", *, count: int = 8) -> Machine:
    """Return a machine with GPUs. The peak FLOP/s of the default GPU is known."""
    return gpu_machine([name], count=count, memory_bytes=85899345920, driver="580.1")


def write_launch(
    directory: Path,
    *reports: RankReport,
    case: Case | None = None,
    ended: tuple[Failure, ...] = (),
    peak_flops: float | None = None,
) -> RunDir:
    """Write the files that driver, launcher and workers leave behind."""
    run_dir = RunDir(directory)
    asked = CaseFile(case=case or make_case(), device="cpu", peak_flops=peak_flops)
    documents.write(run_dir.case, asked)
    documents.write(run_dir.launch(0), LaunchFile(node=0, failures=ended))
    for report in reports:
        documents.write(run_dir.rank(report.rank), report)
    return run_dir


NOISE = ClassNoise(by_metric={metric.name: Noise(sigma=0.005, degrees_of_freedom=30) for metric in GATED})
SPEEDS = {"tokens_per_s": 98765, "tokens_per_s_mean": 97000, "tokens_per_s_per_device": 49382, "mfu": 0.423}
STEPS = {"step_s_p50": 0.0123, "step_s_p95": 0.0456}
BEFORE = make_run(figures=make_figures(**SPEEDS, **STEPS, peak_memory_bytes=67_108_900))


def make_result(
    *runs: Run, before: Run | None = BEFORE, noise: ClassNoise = NOISE, **changes: Any
) -> Measurement:
    baseline = from_runs([before] * 5) if before is not None else None
    verdict = changes.get("verdict") or judge(runs, baseline, noise, Policy(record_launches=1))
    return Measurement(
        nodeid="bench_cases/test_x.py::test_x[a]",
        case_id=runs[0].case.id,
        framework=runs[0].case.framework.name,
        runs=runs,
        verdict=verdict,
        baseline_file=None,
        directory="/tmp/runs/x",
        shared=all_shared(verdict, runs),
    ).replace(**changes)


def judged(result: Measurement, **changes: Any) -> Measurement:
    """Return the same measurement with another verdict."""
    return result.replace(verdict=result.verdict.replace(**changes))


def metric_check(**changes: Any) -> Check:
    """Return the check of the speed of a case that passed, a fifth below its baseline."""
    values = {"metric": "tokens_per_s", "label": "tokens/s", "unit": "tokens/s", "outcome": "passed"}
    return Check(**{**values, "measured": 98_765.0, "baseline": 123_456.0, "allowed": 0.13, **changes})


DISTURBED = Health(samples=40, seconds=10, steps=25, foreign_cpu=0.6)


def make_compared(speed: float = 0.7, pairs: int = 5, **changes: Any) -> Measurement:
    """Return pairs of launches of two arms. Arm B has this speed relative to arm A."""
    a = [now(tokens_per_s=98_765 * usual) for usual in (1.0, 1.001, 0.999, 1.002, 1.0)[:pairs]]
    b = [now(tokens_per_s=98_765 * speed * usual) for usual in (1.001, 0.999, 1.0, 0.998, 1.001)[:pairs]]
    compared = make_result(*b, verdict=judge_pairs(a, b), **changes)
    return compared.replace(before=tuple(a))


ARMS = (ArmFacts(text="main X=1", facts={"commit": "0123abcd0123", "X": "1"}), ArmFacts(text=".", facts={}))


def make_shared() -> Measurement:
    """Return one launch that is unhealthy because other processes used the machine."""
    run = BEFORE.replace(health=DISTURBED)
    return make_result(run, verdict=judge([run], None, NOISE, Policy(max_unhealthy=1)))


def never_run() -> Measurement:
    """Return the result of a case that has no baseline, with `--perf-missing-baseline=fail`."""
    reason = "no baseline on cpu-test-2c in baselines (--perf-missing-baseline=fail)"
    return Measurement(
        nodeid="n",
        case_id=make_case().id,
        framework="fake",
        runs=(),
        verdict=Verdict(outcome="failed", launches=0, failure="no_baseline", reasons=(reason,)),
        baseline_file=None,
        directory="/tmp/runs/x",
    )


def now(**figures: Any) -> Run:
    return BEFORE.replace(figures=BEFORE.figures.replace(**figures))


IMAGES = make_case(framework=Script(path="train.py"), model=Model.named("resnet"), sequence_length=None)
"""A case whose speed is in samples."""


def make_image_result(**figures: Any) -> Measurement:
    """Return a result of `IMAGES`: 1,234 samples/s by default, and twice as many in the baseline."""
    values = {"tokens_per_s": 1234.0, "tokens_per_s_mean": 1200.0, "energy_per_token_j": 0.002, **figures}
    before = BEFORE.replace(case=IMAGES, figures=make_figures(tokens_per_s=2468.0, tokens_per_s_mean=2400.0))
    return make_result(*[before.replace(figures=make_figures(**values))] * 3, before=before)


COMMIT = "0123abcd" * 5
CONDITIONS = Conditions(changes=None, options={"--perf-inject": "nothing"}, environment={"torch": "2.13.0"})


def make_session_file(*results: Measurement, **changes: Any) -> SessionFile:
    """Return the file of a session in one part on a clean commit."""
    fields: dict[str, Any] = {"status": "complete", "started_at": _RUN.started_at, **changes}
    part = PytestRun(started_at=fields["started_at"], status=fields["status"], cases=len(results))
    common = {"perfsuite": "0.1", "commit": COMMIT, "machine": make_machine(), "conditions": CONDITIONS}
    return SessionFile(**{**common, "parts": (part,), "results": results, "skipped": (), **fields})


def write_session(directory: Path, *results: Measurement, **changes: Any) -> Path:
    """Write `make_session_file` as `results.json`."""
    file = directory / "results.json"
    documents.write(file, make_session_file(*results, **changes))
    return file
