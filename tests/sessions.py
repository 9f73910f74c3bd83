"""Makes whole sessions that look as if measured on 8 GPUs.

They are made up from a seed, and judged by the real engine.
"""

from collections.abc import Callable
from random import Random
from statistics import fmean, median, quantiles

from perfsuite.case.case import Case, Topology
from perfsuite.case.catalog import MODELS
from perfsuite.frameworks.fake import Fake
from perfsuite.results.rank_report import Failure, Memory, Observed
from perfsuite.results.run import DeviceHealth, Figures, Health, Run
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from perfsuite.verdict.judge import judge
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.policy import Policy
from tests.counted import EXPLAINED, make_check, make_collective, make_counts, make_entries
from tests.samples import judged, make_baseline, make_gpu_machine, make_result, make_session_file

GIB = 2**30
COUNTS = make_counts(
    collectives=(
        make_collective(ranks=8),
        make_collective(ranks=8, kind="reduce_scatter", phase="backward", dtype="float32", bytes=30 * GIB),
    )
)
SETTINGS = {"world_size": "8", "wrapper": "FSDPModule", "sharding": "Shard(0)", "attention": "sdpa"}
ENVIRONMENT = {"nccl": "2.28.3", "cuda": "13.0", "python": "3.11.9", "NCCL_ALGO": "Ring"}
TRACEBACK = """Traceback (most recent call last):
  File "/opt/train/loop.py", line 88, in step
    loss.backward()
RuntimeError: NCCL error: unhandled system error, world size <8>"""


def make_gpu_case(number: int) -> Case:
    models = ("llama-3.1-8b", "llama-3.2-1b", "gpt2-xl", "gpt2-large")
    return Case(
        model=MODELS[models[number % len(models)]],
        framework=Fake(),
        sequence_length=256 + 8 * (number // 16),
        micro_batch=(1, 2, 4, 8)[number // 4 % 4],
        precision="bf16-mixed",
        activation_checkpointing="full",
        topology=Topology(processes_per_node=8),
        hardware="h100",
    )


def make_gpu_run(
    case: Case,
    random: Random,
    *,
    slower: float = 1.0,
    larger: float = 1.0,
    throttled: bool = False,
    torch: str = "2.13.0",
) -> Run:
    """Return a launch of 70 to 120 steps with a little noise, a slow start and a stall."""
    typical = 0.35 * slower * random.gauss(1, 0.003) * (1 + case.micro_batch / 4)
    count = random.randint(70, 120)
    steps = [typical * random.gauss(1, 0.004) for _ in range(count)]
    steps[:8] = [step * (1 + 6 / (1 + index) ** 2) for index, step in enumerate(steps[:8])]
    steps[random.randrange(25, count)] *= 2.2
    window = (9, count)
    measured = steps[9:]
    p50 = median(measured)
    p95 = quantiles(measured, n=20)[-1]
    tokens = case.sample_length * case.micro_batch * 8
    peak = (28 + 3 * case.micro_batch) * GIB * larger
    devices = tuple(
        DeviceHealth(
            index=index,
            sm_clock_mhz=1980 - 405 * throttled,
            sm_clock_mhz_min=1965 - 600 * throttled,
            utilisation=random.uniform(95, 99.5),
            power_w=random.uniform(610, 690),
            energy_j=random.uniform(15e3, 21e3),
            temperature_c=random.randint(55, 70) + 20 * throttled,
            throttled={
                "SwPowerCap": 0.31,
                **({"HwThermalSlowdown": 0.42} if throttled and index == 3 else {}),
            },
            foreign_memory_bytes=0,
        )
        for index in range(8)
    )
    return Run(
        case=case,
        machine=make_gpu_machine(),
        started_at="2026-01-02T03:04:05+00:00",
        duration_s=sum(steps) + 41,
        figures=Figures(
            tokens_per_s=tokens / p50,
            tokens_per_s_per_device=tokens / p50 / 8,
            tokens_per_s_mean=tokens / fmean(measured),
            step_s_p50=p50,
            step_s_p95=p95,
            step_s_mean=fmean(measured),
            step_jitter=p95 / p50,
            peak_memory_bytes=int(peak),
            mfu=0.42 / slower,
        ),
        step_s=tuple(steps),
        loss=tuple(10.8 * 0.985**step + random.gauss(0, 0.01) for step in range(count)),
        window=window,
        memory=tuple(
            Memory(peak=int(peak) - rank * 2**20, reserved=int(peak * 1.1), alloc_retries=0, method="cuda")
            for rank in range(8)
        ),
        observed=Observed(settings=SETTINGS, environment={"torch": torch, **ENVIRONMENT}),
        health=Health(
            samples=400,
            seconds=sum(steps),
            steps=count,
            devices=devices,
            job_cpu=0.21,
            foreign_cpu=0.01,
            steal=0.0,
        ),
        counts=make_entries(COUNTS, ranks=8),
        device_probe={"matmul_tflops": random.gauss(712, 2), "copy_gb_per_s": random.gauss(2900, 9)},
    )


def make_blind(result: Measurement) -> Measurement:
    """Return the same measurement, but noise hides changes of the first metric of up to 32.4%."""
    [first, *others] = result.verdict.checks
    return judged(result, checks=(first.replace(minimum_detectable=0.324), *others))


def make_explained(result: Measurement) -> Measurement:
    """Return the measurement with regressed counts, which explain why it is slower."""
    return judged(result, counts=make_check(), explained=EXPLAINED)


def make_gpu_result(number: int, kind: str = "passed", launches: int = 3) -> Measurement:
    """Return a case of a kind: `passed`, `regressed`, `larger`, `improved`, `throttled`, `crash` or
    `recorded`."""
    case = make_gpu_case(number)
    random = Random(number)
    before = make_baseline(*(make_gpu_run(case, random, torch="2.12.1") for _ in range(10)))
    runs = [
        make_gpu_run(
            case,
            random,
            slower={"regressed": 1.08, "improved": 0.9}.get(kind, 1.0),
            larger=1.06 if kind == "larger" else 1.0,
            throttled=kind == "throttled",
        )
        for _ in range(launches)
    ]
    if kind == "crash":
        said = "NCCL error: unhandled system error"
        failure = Failure(kind="crash", message=said, rank=5, traceback=TRACEBACK)
        steps = runs[0].step_s[:31]
        runs = [runs[0].replace(failure=failure, figures=Figures(), window=(0, 0), step_s=steps)]
    policy = Policy(max_launches=launches, min_launches=launches)
    verdict = judge(runs, None if kind == "recorded" else before, class_noise([before]), policy)
    return make_result(
        *runs,
        nodeid=f"bench_cases/test_llama.py::test_llama[{case.id}]",
        verdict=verdict,
        baseline_file=None if kind == "recorded" else f"baselines/h100-80gb-sxm/{case.id}.json",
        directory=f".perfsuite/runs/20260102-030405-000000/{case.id}",
    )


KINDS = ("passed", "crash", "regressed", "throttled", "larger", "improved", "recorded")


def make_session(cases: int = 14, kind_of: Callable[[int], str] | None = None) -> SessionFile:
    """Return a session with every kind of result: three of every ten cases did not simply pass."""

    def some_of_each(number: int) -> str:
        return KINDS[number % 20] if number % 20 < len(KINDS) else "passed"

    kind_of = kind_of or some_of_each
    reason = "it needs 2 nodes (processes per node: 8), but this is one machine"
    left = [make_gpu_case(1000 + number).id for number in range(3)]
    return make_session_file(
        *(make_gpu_result(number, kind_of(number)) for number in range(cases)),
        perfsuite="0.1.0",
        started_at="2026-01-02T03:00:00+00:00",
        commit="0123456789abcdef0123456789abcdef01234567",
        machine=make_gpu_machine(),
        skipped=tuple(Skipped(nodeid="n", case_id=name, framework="fake", reason=reason) for name in left),
    )
