import json
import math
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Script, Topology, documents
from perfsuite.analysis.collect import LOSS_NOT_OBSERVED, collect_profile, newest_profile
from perfsuite.analysis.figures import NO_TF32_PEAK, UNMEASURED_STEPS
from perfsuite.analysis.health import NOT_SAMPLED
from perfsuite.case.case import CaseFile
from perfsuite.errors import ReportError
from perfsuite.results.counts import COUNTED_STEP, OUTSIDE_OF_STEPS, Counts, PythonCalls, RankCounts
from perfsuite.results.profile import RankProfileFile
from perfsuite.results.rank_report import Failure, Memory, Observed, RankReport, SpanTimes
from perfsuite.results.run import DeviceHealth, Health, LaunchFile
from perfsuite.results.run_dir import RunDir
from perfsuite.verdict.arms import unhealthy_pairs
from perfsuite.verdict.comparability import launch_problems
from tests.collected import COMMAND_FAILED, FLOPS, TIMEOUT, both, collected, crash, failure_of, on_gpu
from tests.counted import make_counts
from tests.packages import Packages
from tests.samples import known, make_case, make_machine, make_report, write_launch
from tests.traces import launch_profile, make_profile


def test_a_good_launch(tmp_path: Path) -> None:
    seen = Observed(settings={"wrapper": "none"}, environment={"torch": "2.11"})
    run = collected(both(tmp_path, flops=FLOPS, observed=seen))
    assert run.failure is None
    assert (run.started_at, run.duration_s, run.machine) == ("now", 1.235, make_machine())
    assert (run.case, run.flops, run.observed) == (make_case(), FLOPS, seen)
    assert (run.step_s, run.window, run.notes) == ((0.1,) * 25, (2, 25), ())
    assert run.figures.tokens_per_s == pytest.approx(2560)
    assert run.figures.tokens_per_s_per_device == pytest.approx(1280)
    assert run.figures.peak_memory_bytes == 10**6


def test_records_an_injected_fault_in_every_run(tmp_path: Path) -> None:
    for ranks in (1, 2):
        run_dir = write_launch(tmp_path / str(ranks), *map(make_report, range(ranks)))
        assert collected(run_dir).inject is None
        documents.write(run_dir.case, documents.read(run_dir.case, CaseFile).replace(inject="slowdown=30%"))
        run = collected(run_dir)
        assert (run.inject, run.failure is not None) == ("slowdown=30%", ranks == 1)


def test_gpu_window_starts_after_ten_seconds(
    tmp_path: Path,
) -> None:
    """The times of the steps are stable at once, but the GPU's clocks and temperature are not."""
    for warmup, start in ((5, 5), (14, 9), (8, 8)):
        case = make_case(max_warmup_steps=warmup, steps=25 - warmup)
        run_dir = both(tmp_path, step_s=(2.0,) * 25, counts=Counts(), case=case)
        run = on_gpu(run_dir)
        assert run.window == (start, 25)
        assert any("temperature settle" in note for note in run.notes) == (start < 9)
        assert collected(run_dir).window == (COUNTED_STEP, 25)


def test_excludes_counted_steps_and_groups_ranks(tmp_path: Path) -> None:
    counts = Counts(flops={"forward": 7})
    counted = collected(both(tmp_path / "a", counts=counts))
    uncounted = collected(both(tmp_path / "b"))
    assert (counted.window[0], uncounted.window[0]) == (COUNTED_STEP, UNMEASURED_STEPS)
    assert counted.counts == (RankCounts(ranks=(0, 1), counts=counts),)
    assert uncounted.counts == ()


def started_with(calls: int) -> Counts:
    """Return the counts of a rank that made this many Python calls before its first step ended."""
    python = PythonCalls(version="3.11", calls={OUTSIDE_OF_STEPS: calls}, functions={})
    return Counts(spans={"start-up: imports": Counts(python=python)})


@pytest.mark.parametrize(("second", "entries"), [(1_000_300, 1), (1_100_000, 2)])
def test_ranks_share_counts_not_start_ups(tmp_path: Path, second: int, entries: int) -> None:
    first = started_with(1_000_000)
    ranks = of_two(tmp_path, {"counts": first}, {"counts": started_with(second)})
    counts = collected(ranks).counts
    assert counts[0].counts == first
    assert len(counts) == entries


def of_two(directory: Path, first: dict[str, Any], second: dict[str, Any], **launch: Any) -> RunDir:
    """Return a launch of two ranks with different reports."""
    return write_launch(directory, make_report(0, **first), make_report(1, **second), **launch)


@pytest.mark.fault("ranks contradict each other")
@pytest.mark.parametrize(
    ("changes", "of_both", "said"),
    [
        ({"step_s": (0.1,) * 24}, False, "ranks disagree on the number of steps (rank 0: 25, rank 1: 24)"),
        ({"loss": (1.0,) * 3}, False, "ranks disagree on the number of losses (rank 0: 25, rank 1: 3)"),
        ({"probe_s": (0.1,)}, False, "ranks disagree on the number of probes (rank 0: 0, rank 1: 1)"),
        ({"cpu_s": (0.1,)}, False, "ranks disagree on the number of CPU times (rank 0: 0, rank 1: 1)"),
        ({"tokens_per_step": 128}, False, "ranks disagree on tokens per step (rank 0: 256, rank 1: 128)"),
        ({"world_size": 4}, False, "ranks disagree on the world size (rank 0: 2, rank 1: 4)"),
        ({"clock": "x"}, False, "ranks disagree on the clock (rank 0: simulated, rank 1: x)"),
        *(
            ({"step_s": (0.1,) * n}, True, f"25 steps were requested, but {n} were taken")
            for n in (0, 5, 24, 26)
        ),
        ({"world_size": 1}, True, "a world size of 2 was requested, but the actual size was 1"),
        ({"loss": (3.0, 2.0)}, True, "25 losses were requested, but 2 were recorded"),
        *(
            ({"step_s": (0.1, seconds, *[0.1] * 22, -1.0)}, False, f"rank 1: a step cannot take {seconds} s")
            for seconds in (0.0, -0.1, math.nan, math.inf)
        ),
    ],
)
def test_disagreeing_ranks_fail_with_their_values(
    tmp_path: Path, changes: dict[str, Any], of_both: bool, said: str
) -> None:
    failure = failure_of(collected(of_two(tmp_path, changes if of_both else {}, changes)))
    assert (failure.kind, failure.message) == ("ranks_disagree", said)


def test_counts_machines_of_several_nodes(tmp_path: Path) -> None:
    case = make_case(topology={"nodes": 2, "processes_per_node": 1})
    for host, said in (("n1", "2 nodes were requested, but the ranks ran on n1"), ("n2", None)):
        reports = make_report(0, host="n1"), make_report(1, host=host)
        failure = collected(write_launch(tmp_path / host, *reports, case=case)).failure
        assert (failure and (failure.kind, failure.message)) == (said and ("ranks_disagree", said))


def sealed(content: dict[str, Any]) -> str:
    """Return a document that perfsuite could have written, with its digest."""
    return json.dumps(documents.sealed(content))


@pytest.mark.parametrize(
    "changes", [{"loss": (*[7.0] * 24, math.nan)}, {"failure": Failure(kind="crash", message="boom", rank=1)}]
)
def test_a_damaged_report_hides_no_failure(tmp_path: Path, changes: dict[str, Any]) -> None:
    run_dir = write_launch(tmp_path, make_report(0), make_report(1, **changes))
    whole = json.loads(run_dir.rank(1).read_text())
    run_dir.rank(1).write_text(json.dumps({**whole, "loss": [*whole["loss"][:-1], 6.0], "failure": None}))
    failure = failure_of(collected(run_dir))
    assert failure.kind == "missing_report"
    assert "it was edited or damaged" in failure.message


def test_damaged_agent_report_fails_a_launch(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), make_report(1))
    file = run_dir.launch(0)
    file.write_text(file.read_text().replace('"oom_kills": 0', '"oom_kills": 1'))
    assert "it was edited or damaged" in failure_of(collected(run_dir)).message


@pytest.mark.fault("report is cut short")
def test_bad_report_names_the_file_and_field(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0))
    for content, said in (
        ('{"schema_version": 1, "ra', "not JSON"),
        ('{"schema_version": 3}', "field schema_version: this perfsuite reads 1, got 3"),
        (
            sealed({"schema_version": 1, "rank": 1, "world_size": 2, "host": "h"}),
            "field clock: Field required",
        ),
    ):
        run_dir.rank(1).write_text(content)
        failure = failure_of(collected(run_dir))
        assert failure.kind == "missing_report"
        assert failure.message.startswith(f"{run_dir.rank(1)}: {said}")
        assert failure_of(collected(run_dir, failure=TIMEOUT)).kind == "timeout"
    run_dir.launch(0).write_text("[]")
    failure = failure_of(collected(run_dir))
    assert failure.message.startswith(f"{run_dir.launch(0)}: expected a JSON object")


def test_failure_after_all_reports_is_a_note(tmp_path: Path) -> None:
    """An example is a command that lingers for a logger.

    Nothing is missing, even though the agent has not reported.
    """
    for ended, killed, note in (
        (crash(1, 1.0, "exit code -11"), None, "processes failed after reporting: rank 1: exit code -11"),
        (COMMAND_FAILED, None, f"processes failed after reporting: {COMMAND_FAILED.message}"),
        (None, TIMEOUT, "every rank had reported, but the job did not end: killed after 900 s"),
        (None, None, None),
    ):
        run_dir = write_launch(tmp_path, make_report(0), make_report(1), ended=(ended,) if ended else ())
        if ended is None:
            run_dir.launch(0).unlink()
        run = collected(run_dir, failure=killed)
        assert (run.failure, run.notes) == (None, (note,) if note else ())
        assert run.figures.tokens_per_s is not None


FALLS = make_report(0).loss


def rises(first: float, steps: int, last: float) -> str:
    of_each = f"its mean is {first:.4f} in the first {steps} steps and {last:.4f} in the last {steps} steps; "
    return f"the loss does not fall: {of_each}"


WARM_UP = tuple(2.3 + 0.01 * (step % 5) for step in range(25))
"""The losses of random data, or of a learning rate that is still close to 0."""
HARD_BATCH = (6.25, 6.08, 5.94, 5.91, 5.85, 5.80, 5.79, 5.60, 5.50, 4.90, 5.01, 7.28)
"""Measured losses of llama-tiny with one sequence per step over 12 steps. The last one is odd."""


@pytest.mark.parametrize(
    ("loss", "script", "said"),
    [
        *(
            ((*FALLS[:7], value, *FALLS[8:-1], then), None, f"the loss is {value} at step 7")
            for value, then in ((math.nan, 6.0), (math.inf, 6.0), (math.inf, math.nan))
        ),
        ((6.2,) * 25, None, f"{rises(6.2, 3, 6.2)}give more steps or another learning_rate"),
        (tuple(6.2 + step for step in range(25)), None, rises(7.2, 3, 29.2)),
        ((6.2,) * 110, None, rises(6.2, 11, 6.2)),  # a tenth of the steps at each end
        ((), None, "no loss was recorded"),
        (HARD_BATCH, None, None),
        (WARM_UP, {}, None),
        (WARM_UP, {"loss": "falls"}, 'give loss="finite" if it need not fall (random data'),
        ((*WARM_UP[:24], math.nan), {}, "the loss is nan at step 24"),
        ((), {}, "no loss was recorded"),
    ],
)
def test_scripts_loss_need_not_fall_but_be_finite(
    tmp_path: Path, loss: tuple[float, ...], script: dict[str, Any] | None, said: str | None
) -> None:
    framework = {} if script is None else {"framework": Script(path="train.py", **script)}
    steps = len(loss) or 25
    case = make_case(max_warmup_steps=2, steps=steps - 2, **framework)
    failure = collected(both(tmp_path, loss=loss, step_s=(0.1,) * steps, case=case)).failure
    assert (failure is None) == (said is None)
    assert failure is None or (failure.kind == "loss" and str(said) in failure.message)


def test_a_loss_of_nan_fails(
    tmp_path: Path,
) -> None:
    run_dir = of_two(tmp_path / "a", {}, {"loss": (*FALLS[:7], math.nan, *FALLS[8:])})
    assert failure_of(collected(run_dir)).message == "the loss is nan at step 7"


def test_an_unobserved_loss_is_noted(tmp_path: Path) -> None:
    unobserved = make_case(framework=Script(path="train.py", loss=None))
    run = collected(both(tmp_path / "b", loss=(), case=unobserved))
    assert (run.failure, run.figures.loss_last, run.notes) == (None, None, (LOSS_NOT_OBSERVED,))
    assert LOSS_NOT_OBSERVED.endswith("nobody would notice if the model stopped learning")


def test_an_unknown_wait_of_a_rank_hides_the_others(tmp_path: Path) -> None:
    waits = {"data_wait_s": (0.01,) * 25, "loss": FALLS}
    known_run = collected(of_two(tmp_path / "known", waits, waits))
    run = collected(
        of_two(tmp_path / "unknown", waits, {**waits, "data_wait_s": (), "data_wait_is_unknown": True})
    )
    assert (len(known_run.data_wait_s), run.data_wait_s, run.figures.data_wait_s) == (25, (), None)


def test_an_unknown_loss_fails_no_launch(tmp_path: Path) -> None:
    """One rank does not know its loss, so the mean of all ranks is unknown."""
    run = collected(of_two(tmp_path, {"loss": FALLS}, {"loss": (), "loss_is_unknown": True}))
    assert (run.failure, run.loss, run.figures.loss_last) == (None, (), None)


STEPS = (1.0, 0.5) * 12 + (1.0,)
"""The sum of the steps is exactly 19 s."""
SMALL, LARGER = (Memory(peak=peak, method="VmHWM") for peak in (0, 5))
RETRIED = "3 allocator retries: memory is nearly full, which slows down steps"
TOO_SMALL = (
    "a peak memory of 0 bytes cannot be compared: training fitted into memory that the process had "
    "before the workload was built. Use a larger model or micro_batch"
)


@pytest.mark.parametrize(
    ("first", "second", "notes"),
    [
        ({"notes": ("odd", "slow")}, {"notes": ("slow", "late")}, ("odd", "slow", "late")),
        *(
            (
                {"step_s": STEPS},
                {"step_s": STEPS, "wall_s": wall_s},
                (f"rank 1: the steps add up to 19.000 s, but the wall clock shows {wall_s:.3f} s",)
                * is_noted,
            )
            for wall_s, is_noted in ((19.0, False), (20.0, False), (20.1, True), (10.0, True), (0.0, True))
        ),
        ({"memory": SMALL}, {"memory": SMALL}, (TOO_SMALL,)),
        ({}, {"memory": LARGER.replace(alloc_retries=3)}, (RETRIED,)),
        ({"memory": SMALL}, {"memory": LARGER}, ()),
        ({"memory": None}, {"memory": None}, ()),
        (
            *({"step_s": tuple(0.1 * 1.2**step for step in range(25))},) * 2,
            ("step times were still drifting at the end: raise max_warmup_steps or steps",),
        ),
    ],
)
def test_notes_what_qualifies_figures_once(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], notes: tuple[str, ...]
) -> None:
    run = collected(of_two(tmp_path, first, second))
    assert (run.failure, run.notes) == (None, notes)


def test_environment_records_the_gpu_set_up(tmp_path: Path) -> None:
    kept = {"torch": "2.13", "TORCH_FR_DUMP_TEMP_FILE": "/runs/launch-1/x"}
    seen = Observed(settings={}, environment=kept)
    run_dir = both(tmp_path, observed=seen, clock="cuda events")
    cards = [
        DeviceHealth(index=index, power_limit_w=watts, sm_clock_limit_mhz=1980, ecc=True, persistence=False)
        for index, watts in enumerate((700, 500.5, 700))
    ]
    health = Health(samples=0, seconds=0, steps=0, devices=tuple(cards))
    run = on_gpu(run_dir, health, driver="580.1")
    unread = on_gpu(run_dir)
    limits = {"gpu_power_limit_w": "500.5, 700", "gpu_sm_clock_limit_mhz": "1980"}
    setup = {"torch": "2.13", "driver": "580.1", **limits, "gpu_ecc": "on", "gpu_persistence": "off"}
    assert known(run.observed).environment == setup
    assert known(unread.observed).environment == {"torch": "2.13"}


def test_launch_without_a_sample_is_no_evidence(tmp_path: Path) -> None:
    for clock, why in (("perf_counter", [NOT_SAMPLED]), ("simulated", [])):
        run = collected(both(tmp_path, clock=clock))
        assert launch_problems(run, None) == why
        assert [set(unhealthy_pairs([run], [run])), run.health is None] == [{1} if why else set(), not why]


def test_no_mfu_of_fp32_in_tf32(tmp_path: Path) -> None:
    for precision, matmul, given in (("fp32", "tf32", False), ("fp32", "ieee", True), ("bf16", "tf32", True)):
        seen = Observed(settings={"fp32_matmul": matmul}, environment={})
        case = make_case(hardware="gpu", precision=precision)
        run = on_gpu(both(tmp_path, case=case, peak_flops=67e12, observed=seen, flops=FLOPS))
        assert run.figures.tflops_per_device
        assert (run.figures.mfu is not None) == (NO_TF32_PEAK not in run.notes) == given


def test_mfu_of_partial_float8_uses_a_mixed_peak(tmp_path: Path) -> None:
    """Three quarters of the FLOPs are in float8, in which they take half as long as in 16 bits.

    So all FLOPs together take 5/8 of their time in 16 bits.
    """
    seen = Observed(settings={"low_precision_modules": "2 Float8Linear"}, environment={})
    changes: dict[str, Any] = {"peak_flops": 989.5e12, "flops": FLOPS.replace(per_token_float8=1.5e9)}
    run, plain = (on_gpu(both(tmp_path, observed=observed, **changes)) for observed in (seen, None))
    assert run.figures.mfu == pytest.approx(known(plain.figures.mfu) * 1.25 / 2)


def test_as_many_ranks_as_the_case_has(tmp_path: Path) -> None:
    for world in (1, 4):
        reports = [make_report(rank, world_size=world) for rank in range(world)]
        case = make_case(topology={"processes_per_node": world})
        run = collected(write_launch(tmp_path, *reports, case=case))
        assert (run.failure, len(run.memory)) == (None, world)
        assert run.figures.tokens_per_s_per_device == pytest.approx(2560 / world)


def test_steps_and_probes_are_the_slowest_ranks(
    tmp_path: Path,
) -> None:
    ranks: tuple[dict[str, Any], ...] = (
        {"step_s": (0.1, 0.2) * 12 + (0.1,), "probe_s": (0.1, 0.4) * 12 + (0.1,), "device_probe": {"x": 7}},
        {"step_s": (0.2, 0.3) * 12 + (0.05,), "probe_s": (0.2, 0.3) * 12 + (0.1,), "device_probe": {"x": 5}},
    )
    for rank, fields in enumerate(ranks):
        seen = Observed(settings={"rank": str(rank)}, environment={})
        fields |= {"observed": seen, "flops": FLOPS.replace(per_token=2e9 - rank), "cpu_s": (0.5,) * 25}
    run = collected(of_two(tmp_path, *ranks))
    assert run.step_s == (0.2, 0.3) * 12 + (0.05,)
    assert run.probe_s == (0.2, 0.4) * 12 + (0.1,)
    assert run.cpu_s == (1.0,) * 25
    assert (run.flops, run.observed) == (FLOPS, ranks[0]["observed"])
    assert (run.device_probe, run.rank_probes) == ({"x": 5}, ({"x": 7}, {"x": 5}))


@pytest.mark.parametrize(
    ("codes", "is_known"), [(("a", "b"), True), (("a", None), False), ((None, None), False)]
)
def test_code_of_all_ranks_must_be_known(
    tmp_path: Path, codes: tuple[str | None, str | None], is_known: bool
) -> None:
    of_ranks = [{"observed": Observed(settings={}, environment={}, code=code)} for code in codes]
    seen = known(collected(of_two(tmp_path / "one", *of_ranks)).observed)
    assert (seen.code is not None) == is_known
    of_ranks[1] = {"observed": Observed(settings={}, environment={}, code="c")}
    other = known(collected(of_two(tmp_path / "other", *of_ranks)).observed)
    assert (other.code != seen.code) == (codes[0] is not None)


def test_environments_of_other_nodes_are_recorded(tmp_path: Path) -> None:
    """A night in which another node has another kernel is not a night in which nothing changed."""
    usual = {"kernel": "6.1", "torch": "2.13.0", "cores": "0-7"}
    of_rank_0 = {**usual, "transformers": "5.23.0", "NCCL_ALGO": "Ring"}
    ranks = [
        make_report(rank, world_size=4, observed=Observed(settings={}, environment={**usual, **more}))
        for rank, more in enumerate(
            (
                of_rank_0,
                {"cores": "8-15", "NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "1"},
                {"kernel": "6.8", "NCCL_DEBUG": "INFO"},
                {"kernel": "6.8"},
            )
        )
    ]
    case = make_case(topology=Topology(processes_per_node=4))
    run_dir = write_launch(tmp_path, *ranks, case=case)
    assert known(collected(run_dir).observed).environment == {
        **of_rank_0,
        "kernel of ranks 2-3": "6.8",
        "NCCL_ALGO of ranks 2-3": "unset",
        "NCCL_DEBUG of rank 2": "INFO",
    }


def test_reports_why_a_launch_was_killed(tmp_path: Path) -> None:
    peer, own = (make_report(1, failure=crash(1, 1.0, said)) for said in ("Connection closed by peer", "x"))
    for reports, kind in (
        *(([], "timeout"), ([make_report(0)], "timeout")),
        *(([make_report(0), peer], "timeout"), ([make_report(0), own], "crash")),
    ):
        run_dir = write_launch(tmp_path / str(len(reports)), *reports)
        run_dir.agent_log(0).write_text("waiting\n")
        failure = failure_of(collected(run_dir, failure=TIMEOUT))
        assert (failure.kind, failure.traceback) == (kind, "last lines of agent-0.log:\nwaiting")
        assert failure_of(collected(run_dir)).kind != "timeout"


# Metrics of other packages


EXTRA = """
    from perfsuite.results import Metric

    def metric(name, **how):
        return Metric(name=name, label=name, unit="", better="lower", judged="shown", **how)

    LARGEST = metric("largest", recorder=object)
    STEPS = metric("steps", read=lambda run: run.figures.tokens_per_s)
"""
"""A metric that ranks record, and a metric that is derived from the launch."""


def test_run_has_the_metrics_its_case_names(tmp_path: Path, packages: Packages) -> None:
    metrics = "largest = extra_metrics:LARGEST\nsteps = extra_metrics:STEPS"
    packages.install("extra-metrics", EXTRA, metrics=metrics)
    run_dir = of_two(tmp_path / "a", {"extra": {"largest": 2.0}}, {"extra": {"largest": 3.0}})
    request = documents.read(run_dir.case, CaseFile)
    documents.write(run_dir.case, request.replace(metrics=("largest", "steps")))
    run = collected(run_dir)
    assert run.failure is None
    assert run.figures.extra == {"largest": 3.0, "steps": run.figures.tokens_per_s}
    assert collected(both(tmp_path / "b")).figures == run.figures.replace(extra={})


@pytest.mark.parametrize(
    ("reports", "failure", "said"),
    [
        ([], TIMEOUT, "timeout: killed after 900 s"),
        ([make_report(0, failure=Failure(kind="crash", message="boom"))], None, "crash: boom"),
        ([make_report(rank, notes=("no profile: CUPTI",)) for rank in range(2)], None, "^no profile: CUPTI$"),
        ([make_report(rank) for rank in range(2)], None, "no rank wrote a profile"),
    ],
)
def test_joins_profiles_or_says_why_none(
    tmp_path: Path, reports: list[RankReport], failure: Failure | None, said: str
) -> None:
    run_dir = write_launch(tmp_path, *reports)
    with pytest.raises(ReportError, match=said):
        collect_profile(run_dir, failure)
    for rank in range(2):
        documents.write(run_dir.profile(rank), RankProfileFile(profile=make_profile()))
    assert collect_profile(run_dir, None) == launch_profile(make_profile(), make_profile())
    assert newest_profile([run_dir]) == collect_profile(run_dir, None)
    assert newest_profile([write_launch(tmp_path / "empty")]) is None


def test_refuses_the_report_of_another_rank(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), make_report(1))
    run_dir.rank(1).write_text(run_dir.rank(0).read_text())
    failure = failure_of(collected(run_dir))
    assert failure.kind == "missing_report"
    assert failure.message == f"{run_dir.rank(1)}: it is the report of rank 0, expected 1"


def test_refuses_what_another_node_wrote(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), make_report(1))
    documents.write(run_dir.launch(0), LaunchFile(node=1))
    failure = failure_of(collected(run_dir))
    assert failure.kind == "missing_report"
    assert failure.message == f"{run_dir.launch(0)}: it was written on node 1, expected 0"


def test_data_wait_is_the_longest_ranks(tmp_path: Path) -> None:
    waits = [(0.01, 0.05) * 12 + (0.01,), (0.03,) * 25]
    reports = [make_report(rank, data_wait_s=wait_s) for rank, wait_s in enumerate(waits)]
    run = collected(write_launch(tmp_path, *reports))
    assert run.data_wait_s == (0.03, 0.05) * 12 + (0.03,)


def test_rank_without_loader_keeps_the_wait(tmp_path: Path) -> None:
    """Later stages of a pipeline, for example, have no loader."""
    waits = [(), (0.03,) * 25]
    run = collected(
        write_launch(tmp_path, *(make_report(n, data_wait_s=wait_s) for n, wait_s in enumerate(waits)))
    )
    assert run.data_wait_s == waits[1]


def test_one_compiling_rank_makes_a_cold_start(tmp_path: Path) -> None:
    """The other ranks wait for this rank, so their start-up also differs from that of a later launch."""
    spans = {name: SpanTimes(seconds=(1.0,)) for name in ("start-up", "start-up: imports", "save")}
    counts = make_counts(spans={"start-up": Counts(modules={"torch": 9})})
    of_each: dict[str, Any] = {"spans": spans, "counts": counts}
    run = collected(of_two(tmp_path, {**of_each, "compiled_anew": True}, of_each))
    assert sorted(run.spans) == ["cold start-up", "cold start-up: imports", "save"]
    assert [list(entry.counts.spans) for entry in run.counts] == [["cold start-up"]]


def spans_of_ranks(directory: Path, *spans: SpanTimes) -> SpanTimes:
    first, second = ({"spans": {"save": saves}} for saves in spans)
    return collected(of_two(directory, first, second)).spans["save"]


def test_span_takes_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    first = SpanTimes(seconds=(1.0, 5.0), steps=(10, 20))
    second = SpanTimes(seconds=(3.0, 2.0), steps=(10, 20))

    assert spans_of_ranks(tmp_path, first, second) == SpanTimes(seconds=(3.0, 5.0), steps=(10, 20))


def test_extra_span_belongs_to_its_rank(tmp_path: Path) -> None:
    first = SpanTimes(seconds=(1.0, 5.0), steps=(10, 20))
    second = SpanTimes(seconds=(3.0,), steps=(10,))

    assert spans_of_ranks(tmp_path, first, second) == first


def test_a_wait_of_one_rank_is_no_occurrence_of_another(tmp_path: Path) -> None:
    first = SpanTimes(seconds=(1.0, 5.0), steps=(10, 20), waits=1)
    second = SpanTimes(seconds=(3.0, 2.0), steps=(10, 20))

    assert spans_of_ranks(tmp_path, first, second) == first


NAMES_A_PHASE = Script(path="train.py", phases={"rollout": "train:generate"})


def failure_with_phases(directory: Path, *spans: dict[str, SpanTimes]) -> str:
    """Return why a launch of two ranks failed, for a case that names a phase."""
    first, second = ({"spans": phases} for phases in spans)
    failure = collected(of_two(directory, first, second, case=make_case(framework=NAMES_A_PHASE))).failure
    return "" if failure is None else f"{failure.kind}: {failure.message}"


def test_a_phase_of_one_rank_alone_is_enough(tmp_path: Path) -> None:
    spans = {"rollout": SpanTimes(seconds=(1.0,), steps=(3,))}

    assert "phases" not in failure_with_phases(tmp_path, {}, spans)


def test_a_phase_that_ran_on_no_rank_fails(tmp_path: Path) -> None:
    spans = {"score": SpanTimes(seconds=(1.0,), steps=(3,))}

    assert failure_with_phases(tmp_path, {}, spans).startswith(
        "mismatch: phases={'rollout': 'train:generate'}: in the 25 steps, no rank completed a call of this "
    )
