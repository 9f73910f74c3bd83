import math
import random
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.analysis.figures import (
    FLAT,
    NO_BF16_PEAK,
    NO_FLOAT8_PEAK,
    NO_TF32_PEAK,
    ROLL,
    UNMEASURED_STEPS,
    Window,
    extra_figures,
    figures_of,
    find_window,
    job_steps,
    lowest_device_probe,
    peak_for_mfu,
    settled,
    settling_notes,
)
from perfsuite.case.hardware import Machine
from perfsuite.errors import ReportError
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.metric import Metric
from perfsuite.results.rank_report import Memory, Observed
from perfsuite.results.run import DeviceHealth, Figures
from tests.analysis.test_health import make_health
from tests.collected import FLOPS, both, collected, on_gpu
from tests.counted import make_counts, make_entries
from tests.samples import (
    deterministic,
    make_case,
    make_gpu_machine,
    make_machine,
    make_report,
    make_run,
    write_launch,
)

GPUS = tuple(
    DeviceHealth(index=index, utilisation=90.0 + index, energy_j=3000.0 + index) for index in range(3)
)


def make_metric(**changes: Any) -> Metric:
    values = {"name": "x", "label": "x", "unit": "", "better": "lower", "judged": "shown", "recorder": object}
    return Metric(**{**values, **changes})


@pytest.mark.parametrize(
    ("across_ranks", "values", "expected"),
    [
        *(("max", (2.0, 4.0, 1.0), 4.0), ("min", (2.0, 4.0, 1.0), 1.0)),
        *(("sum", (2.0, 4.0, 1.0), 7.0), ("mean", (2.0, 4.0, 1.0), 7 / 3)),
        *(("mean", (None, 4.0), 4.0), ("max", (None, None), None)),  # ranks without a value are left out
    ],
    ids=["max", "min", "sum", "mean", "one value", "no value"],
)
def test_combines_rank_values_into_a_launch_value(
    across_ranks: Any, values: tuple[float | None, ...], expected: float | None
) -> None:
    extras = [{} if value is None else {"x": value, "y": 9.0} for value in values]
    reports = [make_report(rank, world_size=2, extra=extra) for rank, extra in enumerate(extras)]
    figures = extra_figures(make_run(), reports, [make_metric(across_ranks=across_ranks)])
    assert figures == ({} if expected is None else {"x": pytest.approx(expected)})


@pytest.mark.parametrize(
    ("steps", "expected"), [((0.1, 0.5), {"x": 1.0}), ((0.5,), {})], ids=["value", "none"]
)
def test_metric_reads_the_run(steps: tuple[float, ...], expected: dict[str, float]) -> None:
    metric = make_metric(recorder=None, read=lambda run: run.step_s.index(0.5) or None)
    assert extra_figures(make_run(step_s=steps, window=(0, 1)), [make_report()], [metric]) == expected


def test_metric_that_cannot_be_read_names_its_error() -> None:
    metric = make_metric(recorder=None, read=lambda run: run.step_s.index(0.5) or None)
    said = r"metric 'x' could not be read from the launch: ValueError: tuple\.index.*\. Fix the package"
    with pytest.raises(ReportError, match=said):
        extra_figures(make_run(), [], [metric])


def test_medians_skip_launches_without_a_figure() -> None:
    launches = [
        Figures(tokens_per_s=1, mfu=0.4, extra={"x": 5}),
        Figures(tokens_per_s=3, extra={"x": 7}),
        Figures(tokens_per_s=math.inf, extra={"y": 1}),
    ]
    assert Figures.median_of(launches) == Figures(tokens_per_s=3, mfu=0.4, extra={"x": 6, "y": 1})
    assert Figures.median_of([]) == Figures()


@pytest.mark.parametrize(
    ("health", "tokens", "utilisation", "energy"),
    [
        (make_health(devices=GPUS), 100, 91, 9003 / 1900),
        (make_health(devices=(*GPUS, DeviceHealth(index=3))), 100, 91, None),  # one GPU reports nothing
        *((make_health(), 100, None, None), (None, 100, None, None)),
        *((make_health(devices=GPUS, steps=0), 100, 91, None), (make_health(devices=GPUS), 0, 91, None)),
    ],
    ids=["two GPUs", "one unknown", "no GPU", "no health", "no steps", "no tokens"],
)
def test_utilisation_skips_gpus_that_report_none(
    health: Any, tokens: int, utilisation: float | None, energy: float | None
) -> None:
    figures = figures_of(make_run(health=health), [make_report(tokens_per_step=tokens)], None)
    assert figures.gpu_utilisation == utilisation
    assert figures.energy_per_token_j == pytest.approx(energy)


def synchronous(work_s: list[list[float]], late_s: list[list[float]]) -> list[list[float]]:
    """Return step times by rank of a job whose ranks meet in a collective in each step.

    In step i, rank r works for `work_s[r][i]` before the collective, and for `late_s[r][i]` between the
    collective and the end of its optimizer step.
    """
    at = [0.0] * len(work_s)
    taken: list[list[float]] = [[] for _ in work_s]
    for step in range(len(work_s[0])):
        meet = max(at[rank] + work[step] for rank, work in enumerate(work_s))
        for rank, late in enumerate(late_s):
            taken[rank].append(meet + late[step] - at[rank])
            at[rank] = meet + late[step]
    return taken


def test_job_steps_allow_for_a_late_start() -> None:
    steps = [0.1 + 1e-7 * step**2 for step in range(50)]
    assert job_steps([steps]) == job_steps([steps] * 8) == steps
    early, late = synchronous([[0.1] * 20] * 2, [[0.0] * 20] * 2)
    early[0] += 3.0  # the clock of the first rank began earlier
    assert job_steps([early, late]) == pytest.approx([3.1] + [0.1] * 19)


@pytest.mark.parametrize("ranks", [2, 8])
def test_counts_a_stall_once_across_ranks(tmp_path: Path, ranks: int) -> None:
    work, late = ([[seconds] * 25 for _ in range(ranks)] for seconds in (0.09, 0.01))
    for rank in range(ranks):
        late[rank][6 + 2 * rank] += 1.0  # each rank stalls once, after its last collective
    steps = synchronous(work, late)
    assert sum(max(of_ranks) for of_ranks in zip(*steps, strict=True)) == pytest.approx(
        2.5 + 2 * ranks
    )  # the sum of the slowest steps counts each stall twice
    reports = [
        make_report(rank, step_s=tuple(seconds), world_size=ranks) for rank, seconds in enumerate(steps)
    ]
    case = make_case(topology={"processes_per_node": ranks})
    run = collected(write_launch(tmp_path, *reports, case=case))
    assert sum(run.step_s) == pytest.approx(max(map(sum, steps)))
    assert sum(run.step_s) == pytest.approx(2.5 + ranks)
    assert run.figures.step_s_p50 == pytest.approx(0.1)
    assert run.window == (2, 25)


def test_figures_are_those_of_the_window(tmp_path: Path) -> None:
    measured = [0.1 + 0.0001 * step for step in range(22)]
    steps = (5.0, 4.0, 3.0, *measured)
    probes = (9.0,) * 3 + (0.02,) * 22
    run = collected(both(tmp_path, step_s=steps, probe_s=probes))
    assert (run.window, run.measured_steps) == ((3, 25), tuple(measured))
    p95 = quantiles(measured, n=20, method="inclusive")[18]
    mean = fmean(measured)
    figures = run.figures
    assert (figures.step_s_p50, figures.step_s_p95) == pytest.approx((0.10105, p95))
    assert (figures.step_s_mean, figures.step_jitter) == pytest.approx((mean, p95 / 0.10105))
    speeds = figures.tokens_per_s, figures.tokens_per_s_mean
    assert speeds == pytest.approx((256 / 0.10105, 256 / mean))
    assert figures.tokens_per_s_per_device == pytest.approx(128 / 0.10105)
    assert figures.probe_s_p50 == 0.02


@pytest.mark.parametrize(
    ("steps", "p50", "mean", "jitter"),
    [
        ((0.1,) * 15 + (10.0,) + (0.1,) * 9, 0.1, 12.2 / 23, 1),  # the stall is beyond the 95th percentile
        ((0.1,) * 20 + (0.3,) * 5, 0.1, 3.3 / 23, 3),
    ],
    ids=["stall", "unevenness"],
)
def test_stall_shows_in_mean_unevenness_in_jitter(
    tmp_path: Path, steps: tuple[float, ...], p50: float, mean: float, jitter: float
) -> None:
    figures = collected(both(tmp_path, step_s=steps)).figures
    speeds = figures.tokens_per_s, figures.tokens_per_s_mean
    assert (*speeds, figures.step_jitter) == pytest.approx((256 / p50, 256 / mean, jitter))


def test_averages_loss_and_takes_peak_memory(tmp_path: Path) -> None:
    one = Memory(peak=10, reserved=40, alloc_retries=0, method="x")
    other = Memory(peak=20, reserved=30, alloc_retries=2, method="x")
    reports = [
        make_report(rank, memory=memory, loss=tuple(8.0 - 2 * rank - n * 0.1 for n in range(25)))
        for rank, memory in enumerate((one, other))
    ]
    run = collected(write_launch(tmp_path, *reports))
    figures = run.figures
    assert run.loss == pytest.approx([7.0 - step * 0.1 for step in range(25)])
    assert (figures.loss_first, figures.loss_last) == pytest.approx((7.0, (4.7 + 4.6) / 2))
    assert run.memory == (one, other)
    assert run.notes == ("2 allocator retries: memory is nearly full, which slows down steps",)
    assert (figures.peak_memory_bytes, figures.reserved_memory_bytes, figures.alloc_retries) == (20, 40, 2)


def test_memory_is_unknown_if_one_ranks_is(tmp_path: Path) -> None:
    run = collected(write_launch(tmp_path, make_report(0), make_report(1, memory=None)))
    assert (run.failure, run.figures.peak_memory_bytes, run.figures.reserved_memory_bytes) == (None,) * 3


@pytest.mark.parametrize(
    ("flops", "peak_flops", "tflops", "mfu"),
    [
        *((FLOPS, 10e12, 2.56, 0.256), (FLOPS, None, 2.56, None)),
        (None, 10e12, None, None),
    ],
    ids=["known", "unknown peak", "unknown FLOPs"],
)
def test_mfu_only_where_the_peak_is_known(
    tmp_path: Path, flops: Any, peak_flops: float | None, tflops: float | None, mfu: float | None
) -> None:
    figures = collected(both(tmp_path, flops=flops, peak_flops=peak_flops)).figures
    assert figures.tflops_per_device == pytest.approx(tflops)
    assert figures.mfu == pytest.approx(mfu)


def test_roofline_share_needs_a_known_peak() -> None:
    counts = RankCounts(ranks=(0, 1), counts=Counts(flops={"forward": round(0.1 * 67e12)}))
    run = make_run(machine=make_gpu_machine(), step_s=(0.2,) * 3, window=(0, 3), counts=(counts,))
    report = make_report(tokens_per_step=256)
    shares = [figures_of(run, [report], peak_flops).roofline_share for peak_flops in (67e12, None)]
    assert shares == [pytest.approx(0.5), None]


def test_reports_gpu_clock_and_nvml_memory(tmp_path: Path) -> None:
    run_dir = both(tmp_path, clock="cuda events")
    devices = tuple(DeviceHealth(index=index, job_memory_bytes=7 + 2 * index) for index in range(2))
    clocks = ((2, 1980), (5, 1980), (6, 1700), (9, 1750), (25, 1720))
    run = on_gpu(run_dir, make_health(devices=devices, sm_clocks_mhz=clocks))
    assert run.window == (5, 25)
    assert (run.figures.sm_clock_mhz, run.figures.device_memory_bytes) == (1720, 9)
    run = on_gpu(run_dir, make_health(sm_clocks_mhz=((1, 1980),)))
    assert (run.figures.sm_clock_mhz, run.figures.device_memory_bytes) == (None, None)


def test_device_probe_takes_each_slowest_rank() -> None:
    probes: list[dict[str, float]] = [{"matmul": 7.0, "copy": 2.0}, {"matmul": 5.0}, {"copy": 3.0}]
    reports = [make_report(rank, device_probe=probe) for rank, probe in enumerate(probes)]
    assert lowest_device_probe(reports) == {"copy": 2.0, "matmul": 5.0}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("machine", [make_gpu_machine(), make_machine()], ids=["cuda", "cpu"])
@pytest.mark.parametrize("matmul", ["tf32", "ieee", None])
def test_only_fp32_on_a_gpu_runs_in_tf32(precision: Any, machine: Machine, matmul: str | None) -> None:
    seen = Observed(settings={} if matmul is None else {"fp32_matmul": matmul}, environment={})
    run = make_run(case=make_case(precision=precision), machine=machine, observed=seen)
    is_lower = (precision, machine.device, matmul) == ("fp32", "cuda", "tf32")
    assert peak_for_mfu(run, 1e12) == ((None, NO_TF32_PEAK) if is_lower else (1e12, None))
    assert peak_for_mfu(run.replace(observed=None), 1e12) == (1e12, None)


@pytest.mark.parametrize(
    ("precision", "is_known"), [("bf16", False), ("bf16-mixed", False), ("fp16-mixed", True)]
)
def test_no_mfu_of_emulated_bf16(precision: Any, is_known: bool) -> None:
    run = make_run(case=make_case(precision=precision), machine=make_gpu_machine("Tesla V100-SXM2-16GB"))
    peak = run.machine.peak_flops(precision)
    assert (peak is not None) is is_known
    assert peak_for_mfu(run, peak) == ((peak, None) if is_known else (None, NO_BF16_PEAK))


def test_partial_float8_peak_lies_in_between() -> None:
    seen = Observed(settings={"low_precision_modules": "2 Float8Linear"}, environment={})
    run = make_run(machine=make_gpu_machine(), observed=seen)
    float8 = run.machine.peak_flops("float8")
    assert float8
    flops = FLOPS.replace(per_token=10.0, per_token_float8=4.0)
    peak, why_none = peak_for_mfu(run.replace(flops=flops), float8 / 2)
    assert peak == pytest.approx(10 / (4 + 6 * 2) * float8)
    assert why_none is None
    of_cpu = run.replace(flops=flops, machine=make_machine())
    for unknown, peak in ((run.replace(flops=FLOPS), 1e12), (run, 1e12), (of_cpu, 1e12), (of_cpu, None)):
        assert peak_for_mfu(unknown, peak) == (None, NO_FLOAT8_PEAK)
    assert peak_for_mfu(run.replace(flops=flops), None) == (None, NO_FLOAT8_PEAK)


@pytest.mark.parametrize(
    ("squares", "norm"),
    [
        *(((4.0, 4.0, 4.0), 2), ((4.0, 4.0 + 3e-6), 2), ((9.0, 16.0), 5), ((9.0,), 3), ((0.0, 0.0), 0)),
        *(((9.0, None), None), ((9.0, math.inf), None)),
    ],
    ids=str,
)
def test_gradient_norm_sums_shards_not_replicas(
    squares: tuple[float | None, ...], norm: float | None
) -> None:
    reports = [make_report(rank, gradient_squares=square) for rank, square in enumerate(squares)]
    assert figures_of(make_run(), reports, None).gradient_norm == norm


@pytest.mark.parametrize(
    ("losses", "last"), [(3, 1), (9, 1), (10, 1), (19, 1), (20, 1.5), (29, 1.5), (30, 2)]
)
def test_last_loss_averages_a_tenth_of_the_steps(losses: int, last: float) -> None:
    run = make_run(loss=tuple(float(step) for step in range(losses, 0, -1)))
    figures = figures_of(run, [make_report()], None)
    assert (figures.loss_first, figures.loss_last) == (losses, last)


def test_probe_and_cpu_time_are_window_medians() -> None:
    probe_s = (1.0, 2.0, 4.0, 5.0, 7.0, 20.0)
    cpu_s = (9.0, 9.0, 0.4, 0.6, 0.5, 9.0)
    for series, expected in (((probe_s, cpu_s), (5, 0.5)), (((), ()), (None, None))):
        run = make_run(step_s=(0.1,) * 6, window=(2, 5), probe_s=series[0], cpu_s=series[1])
        figures = figures_of(run, [make_report()], None)
        assert (figures.probe_s_p50, figures.cpu_s_per_step) == expected


def test_framework_rate_is_the_ranks_median() -> None:
    speeds = (100.0, None, 400.0)
    reports = [make_report(rank, own_tokens_per_s=speed) for rank, speed in enumerate(speeds)]
    own = [figures_of(make_run(), ranks, None).own_tokens_per_s for ranks in (reports, reports[1:2])]
    assert own == [250, None]


@pytest.mark.parametrize(
    ("step_s", "start", "measured", "counted", "is_settled"),
    [
        *((2.0, 7, 10, False, True), (2.0, 6, 10, False, False)),
        *((2.0, 9, 10, True, True), (2.0, 8, 10, True, False)),
        *((2.0, 7, 9, False, False), (1.0, 10, 20, False, False), (1.999, 7, 10, False, False)),
    ],
)
def test_notes_a_gpu_that_had_no_time_to_settle(
    step_s: float, start: int, measured: int, counted: bool, is_settled: bool
) -> None:
    """Warm-up begins with the first step that can be measured.

    This is the third step, or the fifth if a step is counted.
    """
    counts = make_entries(make_counts()) if counted else ()
    window = (start, start + measured)
    run = make_run(machine=make_gpu_machine(), step_s=(step_s,) * 30, window=window, counts=counts)
    warmup_s = step_s * (start - (4 if counted else 2))
    note = (
        f"the measured window is {measured * step_s:.0f} s, after {warmup_s:.0f} s of warm-up, but a "
        "GPU's clock and temperature settle in 30 to 60 s: raise steps until the window takes 20 s or "
        "more, and max_warmup_steps until the warm-up takes 10 s or more"
    )
    assert settling_notes(run) == [note] * (not is_settled)
    assert settling_notes(run.replace(machine=make_machine())) == []


SERIES = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=2 * ROLL, max_size=60)


@pytest.mark.parametrize(
    ("series", "max_warmup", "start"),
    [
        ([0.1] * 30, 20, 2),
        ([1 + 0.01 * (-1) ** step for step in range(40)], 20, 2),  # the noise is small
        *(([0.5] * slow + [0.1] * 40, 20, max(slow, 2)) for slow in (1, 2, 3, 4, 7, 12)),
        ([0.8] * 8 + [1.0] * 40, 20, 8),  # the GPU throttles after some steps
        *(([1.0] * at + [10.0] + [1.0] * (39 - at), 20, 2) for at in (0, 5, 19, 20, 25, 39)),
        ([2.0] * 25 + [1.0] * 35, 20, 20),  # the warm-up is longer than allowed
        ([9.0] + [1.0] * 19, 0, 0),  # no warm-up is allowed
        ([0.0] * 20, 5, 2),  # the clock recorded nothing
        # Steps alternate between 0.9 and 1.1 s, which is a scatter of 0.141 s. The start may differ from the
        # level by twice the scatter.
        ([1.28] * 6 + [0.9, 1.1] * 20, 6, 2),
        ([1.29] * 6 + [0.9, 1.1] * 20, 6, 6),
        # In the third step the worker observes what runs.
        *(([1.0] * 40, most, 2) for most in (2, 3, 20)),
    ],
)
def test_warm_up_ends_where_steps_become_flat(series: list[float], max_warmup: int, start: int) -> None:
    assert find_window(series, max_warmup) == Window(start, True)
    assert UNMEASURED_STEPS == 2


def test_decaying_warm_up_ends_within_the_bound() -> None:
    series = [1 + 0.5 * 0.8**step for step in range(60)]
    window = find_window(series, 30)
    assert window.steady
    assert series[window.start] <= 1 + FLAT < series[window.start - 3]


@pytest.mark.parametrize(
    "series",
    [
        # Steps get slower and slower, or faster and faster.
        *([growth**step for step in range(60)] for growth in (1.05, 0.95)),
        [1 + 0.02 * step + 0.01 * (-1) ** step for step in range(60)],
        *([1.0] * 40 + [1.2] * 20, [1.0] * 35 + [2.0] * 25),
    ],
    ids=["slower", "faster", "noisy", "late step", "late jump"],
)
def test_series_that_never_flattens_is_unsteady(series: list[float]) -> None:
    window = find_window(series, 10)
    assert not window.steady
    assert window.start <= 10


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_no_drift(seed: int) -> None:
    draw = random.Random(seed)
    window = find_window([3.0] * 4 + [math.exp(draw.gauss(0, 0.15)) for _ in range(60)], 10)
    assert (window.steady, 4 <= window.start <= 10) == (True, True)


@pytest.mark.parametrize(("count", "max_warmup"), [(0, 0), (9, 0), (29, 20), (20, -1)])
def test_too_few_steps_says_how_many_are_needed(count: int, max_warmup: int) -> None:
    with pytest.raises(ValueError, match=rf"^{count} steps are too few for .*{max_warmup} steps and the 10 "):
        find_window([1.0] * count, max_warmup)


@deterministic
@given(SERIES, st.integers(-10, 10), st.data())
def test_warm_up_is_bounded_and_unit_free(series: list[float], exponent: int, draw: st.DataObject) -> None:
    max_warmup = draw.draw(st.integers(0, len(series) - 2 * ROLL))
    window = find_window(series, max_warmup)
    assert min(UNMEASURED_STEPS, max_warmup) <= window.start <= max_warmup
    assert find_window([step * 2.0**exponent for step in series], max_warmup) == window


@deterministic
@given(st.lists(st.floats(min_value=3, max_value=9), max_size=10), st.integers(20, 40))
def test_window_median_is_that_of_the_flat_part(slow: list[float], flat: int) -> None:
    series = [*slow, *[1.0] * flat]
    window = find_window(series, len(slow))
    assert median(series[window.start :]) == 1.0
    assert window.steady


@pytest.mark.parametrize(
    ("step_s", "first", "start"), [(0.5, 4, 24), (0.3, 4, 38), (20.0, 4, 5), (10.0, 2, 3), (0.01, 4, 80)]
)
def test_gpu_settles_ten_seconds_after_its_start(step_s: float, first: int, start: int) -> None:
    assert settled([60.0] * first + [step_s] * (80 - first), first) == start


def test_data_wait_is_a_share_of_the_window() -> None:
    waits = (9.0, 9.0, 0.1, 0.2, 0.3, 9.0)
    run = make_run(step_s=(1.0,) * 6, window=(2, 5), data_wait_s=waits)
    figures = figures_of(run, [make_report()], None)
    assert [figures.data_wait_s, figures.data_wait] == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize("waits", [(), (9.0, 9.0, 0.0, 0.0, 0.0, 9.0)], ids=["no loader", "none in window"])
def test_no_loader_leaves_data_wait_unknown(waits: tuple[float, ...]) -> None:
    run = make_run(step_s=(1.0,) * 6, window=(2, 5), data_wait_s=waits)
    figures = figures_of(run, [make_report()], None)
    assert (figures.data_wait_s, figures.data_wait) == (None, None)
