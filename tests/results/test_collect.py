from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import pytest

from perfsuite import Script, documents
from perfsuite.case.case import Case, CaseFile
from perfsuite.extensions import METRICS
from perfsuite.results.collect import LOG_TAIL_LINES, collect
from perfsuite.results.figures import job_steps
from perfsuite.results.rank_report import Failure, Flops, Memory, Observed, RankReport
from perfsuite.results.run import DeviceHealth, Health, Run
from perfsuite.results.run_dir import RunDir
from tests.packages import install
from tests.samples import make_case, make_gpu_machine, make_machine, make_report, write_launch

FLOPS = Flops(formula="palm-1", per_token=2e9, parameters=3, matmul_parameters=2)


def collected(run_dir: RunDir, *, failure: Failure | None = None) -> Run:
    run = collect(run_dir, make_machine(), started_at="now", duration_s=1.23456, failure=failure)
    assert Run.model_validate_json(run.model_dump_json()).case == run.case
    return run


def failure_of(run: Run) -> Failure:
    assert run.failure is not None
    assert run.figures.tokens_per_s is None or run.failure.kind == "loss"
    return run.failure


def crash(rank: int, at: float, message: str = "RuntimeError: bad", traceback: str | None = None) -> Failure:
    return Failure(kind="crash", message=message, rank=rank, traceback=traceback, at=at)


def test_a_good_launch(tmp_path: Path) -> None:
    seen = Observed(settings={"wrapper": "none"}, environment={"torch": "2.11"})
    reports = [make_report(rank, flops=FLOPS, observed=seen) for rank in (0, 1)]
    run = collected(write_launch(tmp_path, *reports))
    assert run.failure is None
    assert (run.started_at, run.duration_s, run.machine) == ("now", 1.235, make_machine())
    assert (run.case, run.flops, run.observed) == (make_case(), FLOPS, seen)
    assert (run.step_s, run.window, run.notes) == ((0.1,) * 25, (2, 25), ())
    assert run.figures.tokens_per_s == pytest.approx(2560)
    assert run.figures.tokens_per_s_per_device == pytest.approx(1280)
    assert run.figures.peak_memory_bytes == 10**6


def test_a_step_takes_as_long_as_on_its_slowest_rank(tmp_path: Path) -> None:
    first = make_report(0, step_s=(0.1, 0.2) * 12 + (0.1,))
    second = make_report(1, step_s=(0.2, 0.3) * 12 + (0.05,))
    run = collected(write_launch(tmp_path, first, second))
    assert run.step_s == (0.2, 0.3) * 12 + (0.05,)
    assert run.slowest_rank == 1


def synchronous(work_s: list[list[float]], late_s: list[list[float]]) -> list[list[float]]:
    """Step times by rank of a job whose ranks meet in a collective in each step: before it rank r works for
    `work_s[r][i]`, after it, until its optimizer steps, for `late_s[r][i]`."""
    at = [0.0] * len(work_s)
    taken: list[list[float]] = [[] for _ in work_s]
    for step in range(len(work_s[0])):
        meet = max(at[rank] + work[step] for rank, work in enumerate(work_s))
        for rank, late in enumerate(late_s):
            taken[rank].append(meet + late[step] - at[rank])
            at[rank] = meet + late[step]
    return taken


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_stall_counts_once_though_the_other_ranks_see_it_a_step_later(tmp_path: Path, ranks: int) -> None:
    work, late = ([[seconds] * 25 for _ in range(ranks)] for seconds in (0.09, 0.01))
    for rank in range(ranks):
        late[rank][6 + 2 * rank] += 1.0  # each has a hiccup of its own, after its last collective
    steps = synchronous(work, late)
    assert sum(max(each) for each in zip(*steps, strict=True)) == pytest.approx(2.5 + 2 * ranks)  # twice
    reports = [make_report(rank, step_s=tuple(each), world_size=ranks) for rank, each in enumerate(steps)]
    case = make_case(topology={"processes_per_node": ranks})
    run = collected(write_launch(tmp_path, *reports, case=case))
    assert sum(run.step_s) == pytest.approx(max(map(sum, steps)))
    assert sum(run.step_s) == pytest.approx(2.5 + ranks)
    assert run.figures.step_s_p50 == pytest.approx(0.1)
    assert run.window == (2, 25)


def test_of_one_rank_or_of_equal_ones_the_steps_are_its_own_to_the_last_digit() -> None:
    steps = [0.1 + 1e-7 * step**2 for step in range(50)]
    assert job_steps([steps]) == steps
    assert job_steps([steps] * 8) == steps


def test_a_rank_that_starts_late_waits_less_in_the_first_step_only() -> None:
    work = [[0.1] * 20, [0.1] * 20]
    early, late = synchronous(work, [[0.0] * 20] * 2)
    early[0] += 3.0  # its clock began before the other's
    assert job_steps([early, late]) == pytest.approx([3.1] + [0.1] * 19)


def test_figures_are_those_of_the_window(tmp_path: Path) -> None:
    measured = [0.1 + 0.0001 * step for step in range(22)]
    steps = (5.0, 4.0, 3.0, *measured)
    probes = (9.0,) * 3 + (0.02,) * 22
    reports = [make_report(rank, step_s=steps, probe_s=probes) for rank in (0, 1)]
    run = collected(write_launch(tmp_path, *reports))
    figures = run.figures
    assert run.window == (3, 25)
    assert run.measured_steps == tuple(measured)
    assert figures.step_s_p50 == pytest.approx(0.10105)
    assert figures.step_s_p95 == pytest.approx(quantiles(measured, n=20, method="inclusive")[18])
    assert figures.step_s_mean == pytest.approx(fmean(measured))
    assert figures.tokens_per_s == pytest.approx(256 / 0.10105)
    assert figures.step_jitter == pytest.approx(quantiles(measured, n=20, method="inclusive")[18] / 0.10105)
    assert figures.tokens_per_s_mean == pytest.approx(256 / fmean(measured))
    assert figures.probe_s_p50 == 0.02


def test_a_stall_shows_in_the_mean_and_not_in_the_median(tmp_path: Path) -> None:
    steps = (0.1,) * 15 + (10.0,) + (0.1,) * 9
    run = collected(write_launch(tmp_path, *(make_report(rank, step_s=steps) for rank in (0, 1))))
    assert run.figures.tokens_per_s == pytest.approx(2560)
    assert run.figures.tokens_per_s_mean == pytest.approx(256 * 23 / 12.2)
    assert run.figures.step_jitter == 1  # one stall in 25 steps lies beyond the 95th percentile


def test_uneven_steps_show_in_the_jitter(tmp_path: Path) -> None:
    steps = (0.1,) * 20 + (0.3,) * 5
    run = collected(write_launch(tmp_path, *(make_report(rank, step_s=steps) for rank in (0, 1))))
    assert run.figures.step_jitter == pytest.approx(3)


@pytest.mark.parametrize("inject", ["slowdown=30%", None])
@pytest.mark.parametrize("failed", [True, False])
def test_an_injected_fault_stands_in_the_run_whether_it_failed_or_not(
    tmp_path: Path, inject: str | None, failed: bool
) -> None:
    run_dir = write_launch(tmp_path, make_report(0), *([] if failed else [make_report(1)]))
    documents.write(run_dir.case, documents.read(run_dir.case, CaseFile).replace(inject=inject))
    run = collected(run_dir)
    assert (run.inject, run.failure is not None) == (inject, failed)


def test_the_loss_is_the_mean_over_ranks_and_the_last_one_over_the_last_tenth(tmp_path: Path) -> None:
    first = make_report(0, loss=tuple(8.0 - step * 0.1 for step in range(25)))
    second = make_report(1, loss=tuple(6.0 - step * 0.1 for step in range(25)))
    run = collected(write_launch(tmp_path, first, second))
    assert run.loss == pytest.approx([7.0 - step * 0.1 for step in range(25)])
    assert run.figures.loss_first == pytest.approx(7.0)
    assert run.figures.loss_last == pytest.approx((4.7 + 4.6) / 2)


def test_memory_is_that_of_the_rank_that_used_most(tmp_path: Path) -> None:
    one = Memory(peak=10, reserved=40, alloc_retries=0, method="x")
    other = Memory(peak=20, reserved=30, alloc_retries=2, method="x")
    run = collected(write_launch(tmp_path, make_report(0, memory=one), make_report(1, memory=other)))
    figures = run.figures
    assert run.memory == (one, other)
    assert (figures.peak_memory_bytes, figures.reserved_memory_bytes, figures.alloc_retries) == (20, 40, 2)
    assert run.notes == ("2 allocator retries: memory is nearly full, which slows steps down",)


def test_what_the_ranks_note_is_told_once(tmp_path: Path) -> None:
    reports = make_report(0, notes=("odd", "slow")), make_report(1, notes=("slow", "late"))
    assert collected(write_launch(tmp_path, *reports)).notes == ("odd", "slow", "late")


def test_memory_that_one_rank_did_not_tell_is_no_figure(tmp_path: Path) -> None:
    run = collected(write_launch(tmp_path, make_report(0), make_report(1, memory=None)))
    assert run.failure is None
    assert run.figures.peak_memory_bytes is None
    assert run.figures.reserved_memory_bytes is None


@pytest.mark.parametrize(
    ("flops", "peak_flops", "tflops", "mfu"),
    [
        (FLOPS, 10e12, 2.56, 0.256),
        (FLOPS, None, 2.56, None),
        (None, 10e12, None, None),
    ],
)
def test_mfu_only_where_the_peak_is_known(
    tmp_path: Path, flops: Flops | None, peak_flops: float | None, tflops: float | None, mfu: float | None
) -> None:
    reports = [make_report(rank, flops=flops) for rank in (0, 1)]
    figures = collected(write_launch(tmp_path, *reports, peak_flops=peak_flops)).figures
    assert figures.tflops_per_device == (None if tflops is None else pytest.approx(tflops))
    assert figures.mfu == (None if mfu is None else pytest.approx(mfu))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank_is_named(tmp_path: Path, missing: int) -> None:
    run = collected(write_launch(tmp_path, make_report(1 - missing)))
    failure = failure_of(run)
    assert (failure.kind, failure.rank) == ("missing_report", missing)
    assert failure.message == f"no report from rank {missing} of 2: see {tmp_path}"


def test_every_missing_rank_is_named(tmp_path: Path) -> None:
    failure = failure_of(collected(write_launch(tmp_path)))
    assert failure.message.startswith("no report from rank 0, 1 of 2")


def test_without_a_launch_file_the_reports_still_count(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), make_report(1))
    run_dir.launch.unlink()
    assert collected(run_dir).failure is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step_s": (0.1,) * 24}, "the number of steps (rank 0: 25, rank 1: 24)"),
        ({"loss": (1.0,) * 3}, "the number of losses (rank 0: 25, rank 1: 3)"),
        ({"probe_s": (0.1,)}, "the number of probes (rank 0: 0, rank 1: 1)"),
        ({"tokens_per_step": 128}, "tokens per step (rank 0: 256, rank 1: 128)"),
        ({"world_size": 4}, "the world size (rank 0: 2, rank 1: 4)"),
        ({"clock": "perf_counter"}, "the clock (rank 0: simulated, rank 1: perf_counter)"),
    ],
)
def test_ranks_that_disagree_are_named_with_their_values(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    failure = failure_of(collected(write_launch(tmp_path, make_report(0), make_report(1, **changes))))
    assert failure.kind == "ranks_disagree"
    assert failure.message == f"ranks disagree on {said}"


@pytest.mark.parametrize("steps", [0, 5, 24, 26])
def test_steps_other_than_asked_for_are_an_error(tmp_path: Path, steps: int) -> None:
    reports = [make_report(rank, step_s=(0.1,) * steps) for rank in (0, 1)]
    failure = failure_of(collected(write_launch(tmp_path, *reports)))
    assert failure.kind == "ranks_disagree"
    assert failure.message == f"25 steps were asked for, {steps} were made"


def test_a_world_other_than_asked_for_is_an_error(tmp_path: Path) -> None:
    reports = [make_report(rank, world_size=1) for rank in (0, 1)]
    failure = failure_of(collected(write_launch(tmp_path, *reports)))
    assert failure.kind == "ranks_disagree"
    assert "world size" in failure.message


@pytest.mark.parametrize("step_s", [0.0, -0.1, math.nan, math.inf])
def test_steps_that_take_no_time_give_a_failure_and_no_crash(tmp_path: Path, step_s: float) -> None:
    reports = [make_report(rank, step_s=(step_s,) * 25) for rank in (0, 1)]
    assert collected(write_launch(tmp_path, *reports)).failure is not None


WATCHDOG = (
    "[rank0]:[E ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600071 milliseconds"
)
ABORTED = "exit code -6 (SIGABRT)"
"""How a rank ends that NCCL's watchdog, a thread of its own, has ended: it leaves no report."""


def test_a_hang_that_only_nccls_watchdog_ended_is_a_timeout(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, ended=(crash(0, 5.0, ABORTED), crash(1, 6.0, "SignalException: 15")))
    run_dir.rank_log(0).write_text(f"step 7\n{WATCHDOG}\n" + "frame #0\n" * 200)
    failure = failure_of(collected(run_dir))
    assert (failure.kind, failure.message) == ("timeout", f"NCCL's watchdog ended a hang: {WATCHDOG}")


def test_a_commands_hang_that_only_nccls_watchdog_ended_is_a_timeout(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, ended=(COMMAND_FAILED,))
    run_dir.launcher_log.write_text(f"{WATCHDOG}\n")
    assert failure_of(collected(run_dir)).kind == "timeout"


def test_a_rank_that_died_is_the_cause_though_the_others_were_ended_by_the_watchdog(tmp_path: Path) -> None:
    killed = crash(1, 700.0, "exit code -9 (SIGKILL)")
    run_dir = write_launch(tmp_path, ended=(crash(0, 5.0, ABORTED), killed))
    run_dir.rank_log(0).write_text(WATCHDOG)
    failure = failure_of(collected(run_dir))
    assert (failure.kind, failure.message) == ("crash", "exit code -9 (SIGKILL)")


def test_a_rank_that_said_why_it_failed_is_the_cause_though_its_log_has_the_watchdog(tmp_path: Path) -> None:
    own = Failure(kind="out_of_memory", message="OutOfMemoryError: x", rank=0, traceback="a\nb", at=3)
    run_dir = write_launch(tmp_path, make_report(0, failure=own), ended=(crash(0, 603.0, ABORTED),))
    run_dir.rank_log(0).write_text(WATCHDOG)
    assert failure_of(collected(run_dir)) == own


def test_a_crash_by_another_abort_stays_a_crash(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), ended=(crash(1, 5.0, ABORTED),))
    assert failure_of(collected(run_dir)).kind == "crash"


PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:6843"


def test_the_cause_is_the_first_failure_that_is_not_a_peers_death(tmp_path: Path) -> None:
    noticed = make_report(0, failure=crash(0, 10.0, PEER, "Traceback\n  ..."))
    cause = make_report(1, failure=crash(1, 11.0, "ValueError: the cause", "Traceback\n  the cause"))
    failure = failure_of(collected(write_launch(tmp_path, noticed, cause)))
    assert (failure.rank, failure.message) == (1, "ValueError: the cause")
    assert failure.traceback == "Traceback\n  the cause"


@pytest.mark.parametrize(
    "said",
    [
        "Connection reset by peer",
        "Broken pipe",
        "exit code -15 (SIGTERM)",
        "DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1927, remote process exited or there was a "
        "network error, NCCL version 2.27.3",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.",
        "DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, "
        "OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600071 milliseconds",
        "DistBackendError: NCCL communicator was aborted on rank 0.",
    ],
)
def test_what_a_healthy_rank_says_when_another_died_is_never_the_cause(tmp_path: Path, said: str) -> None:
    reports = [make_report(0, failure=crash(0, 1.0, said)), make_report(1, failure=crash(1, 2.0))]
    assert failure_of(collected(write_launch(tmp_path, *reports))).rank == 1


def test_of_two_causes_the_earlier_one_counts(tmp_path: Path) -> None:
    reports = [make_report(0, failure=crash(0, 2.0)), make_report(1, failure=crash(1, 1.0))]
    assert failure_of(collected(write_launch(tmp_path, *reports))).rank == 1


def test_if_all_only_saw_a_peer_die_the_first_of_them_is_told(tmp_path: Path) -> None:
    reports = [make_report(0, failure=crash(0, 2.0, PEER)), make_report(1, failure=crash(1, 1.0, PEER))]
    assert failure_of(collected(write_launch(tmp_path, *reports))).rank == 1


def test_a_rank_that_died_without_a_word_is_the_cause(tmp_path: Path) -> None:
    noticed = make_report(0, failure=crash(0, 1.0, PEER))
    killed = crash(1, 5.0, "exit code -9 (SIGKILL)")
    failure = failure_of(collected(write_launch(tmp_path, noticed, ended=(killed,))))
    assert (failure.rank, failure.message) == (1, "exit code -9 (SIGKILL)")


def test_a_ranks_own_report_tells_more_than_the_launcher(tmp_path: Path) -> None:
    own = Failure(kind="out_of_memory", message="OutOfMemoryError: x", rank=1, traceback="a\nb", at=3)
    reports = [make_report(0), make_report(1, failure=own)]
    seen = crash(1, 4.0, "exit code 1")
    assert failure_of(collected(write_launch(tmp_path, *reports, ended=(seen,)))) == own


def test_without_a_traceback_the_end_of_that_ranks_log_is_shown(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), ended=(crash(1, 1.0, "exit code 13"),))
    run_dir.rank_log(0).write_text("of another rank\n")
    run_dir.rank_log(1).write_bytes(b"\xff" + b"".join(b"line %d\n" % line for line in range(100)))
    shown = failure_of(collected(run_dir)).traceback
    expected = [f"line {line}" for line in range(100 - LOG_TAIL_LINES, 100)]
    assert shown == "\n".join(["last lines of rank-1.log:", *expected])


def test_without_a_log_of_the_rank_the_launchers_is_shown(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path)
    run_dir.launcher_log.write_text("ImportError: no module\n")
    assert failure_of(collected(run_dir)).traceback == "last lines of launcher.log:\nImportError: no module"


ELASTIC = """\
W1121 19:57:47.255000 8705 torch/multiprocessing/spawn.py:165] Terminating process 8717 via signal SIGTERM
E1121 19:57:47.303000 8705 torch/distributed/elastic/multiprocessing/api.py:836] failed (exitcode: 1)
E1121 19:57:47.303000 8705 torch/distributed/elastic/multiprocessing/api.py:836] Traceback (most recent call
"""


def test_what_a_rank_says_is_not_followed_by_torchs_launcher(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), ended=(crash(1, 1.0, "exit code 2"),))
    run_dir.launcher_log.write_text(ELASTIC)
    assert str(failure_of(collected(run_dir)).traceback).endswith(ELASTIC.strip()), "all that is known"
    run_dir.rank_log(1).write_text("train.py: error: unrecognized arguments: --foo\n")
    alone = "last lines of rank-1.log:\ntrain.py: error: unrecognized arguments: --foo"
    assert failure_of(collected(run_dir)).traceback == alone
    run_dir.launcher_log.write_text(f"{ELASTIC}Out of disk\n")
    assert failure_of(collected(run_dir)).traceback == f"{alone}\nlast lines of launcher.log:\nOut of disk"


@pytest.mark.parametrize("empty", [True, False])
def test_a_log_in_which_nothing_stands_is_said_to_be_empty(tmp_path: Path, empty: bool) -> None:
    run_dir = write_launch(tmp_path)
    if empty:
        run_dir.launcher_log.touch()
    assert failure_of(collected(run_dir)).traceback == "no process wrote anything"


PEER_GONE = Failure(kind="crash", rank=0, message="Connection closed by peer", at=1.0)
TIMEOUT = Failure(kind="timeout", message="killed after 900 s", at=9)


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param((), id="no report"),
        pytest.param((make_report(0),), id="one report"),
        pytest.param((make_report(0, failure=PEER_GONE),), id="only that a peer is gone"),
    ],
)
def test_a_timeout_that_the_driver_saw_is_the_failure(
    tmp_path: Path, reports: tuple[RankReport, ...]
) -> None:
    run_dir = write_launch(tmp_path, *reports)
    run_dir.launcher_log.write_text("waiting\n")
    failure = failure_of(collected(run_dir, failure=TIMEOUT))
    assert failure == TIMEOUT.replace(traceback="last lines of launcher.log:\nwaiting")


def test_a_rank_that_said_why_it_failed_is_the_failure_though_others_hung(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0, failure=crash(0, 1.0)))
    assert failure_of(collected(run_dir, failure=TIMEOUT)).kind == "crash"


def test_a_job_that_did_not_end_is_measured_where_every_rank_had_reported(tmp_path: Path) -> None:
    """As a command that lingers on a logger: nothing is missing."""
    run_dir = write_launch(tmp_path, make_report(0), make_report(1))
    run_dir.launch.unlink()
    run = collected(run_dir, failure=TIMEOUT)
    assert run.failure is None
    assert run.figures.tokens_per_s is not None
    assert run.notes == ("every rank had reported, but the job did not end: killed after 900 s",)


def test_a_timeout_is_told_though_a_report_cannot_be_read(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0))
    run_dir.rank(1).write_text("{")
    assert failure_of(collected(run_dir, failure=TIMEOUT)).kind == "timeout"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema_version": 1, "ra', "not JSON"),
        ('{"schema_version": 3}', "field schema_version: this perfsuite reads 1, got 3"),
        ('{"schema_version": 1, "rank": 1, "world_size": 2, "host": "h"}', "field clock: Field required"),
    ],
)
def test_a_bad_report_file_is_named_with_the_field(tmp_path: Path, content: str, said: str) -> None:
    run_dir = write_launch(tmp_path, make_report(0))
    run_dir.rank(1).write_text(content)
    failure = failure_of(collected(run_dir))
    assert failure.kind == "missing_report"
    assert failure.message.startswith(f"{run_dir.rank(1)}: {said}")


def test_a_bad_launch_file_is_named(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), make_report(1))
    run_dir.launch.write_text("[]")
    failure = failure_of(collected(run_dir))
    assert failure.message.startswith(f"{run_dir.launch}: expected a JSON object")


def test_a_report_in_another_ranks_file_is_an_error(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0))
    documents.write(run_dir.rank(1), make_report(0))
    assert failure_of(collected(run_dir)).kind in ("missing_report", "ranks_disagree")


def test_a_crash_after_every_report_was_written_is_a_note(tmp_path: Path) -> None:
    ended = (crash(1, 1.0, "exit code -11 (SIGSEGV)"),)
    run = collected(write_launch(tmp_path, make_report(0), make_report(1), ended=ended))
    assert run.failure is None
    assert run.figures.tokens_per_s is not None
    assert run.notes == ("died after its report was written: rank 1: exit code -11 (SIGSEGV)",)


COMMAND_FAILED = Failure(kind="crash", message="the command ended with exit code 1", at=2)


def test_a_command_that_fails_after_every_report_was_written_is_a_note(tmp_path: Path) -> None:
    run = collected(write_launch(tmp_path, make_report(0), make_report(1), ended=(COMMAND_FAILED,)))
    assert run.failure is None
    assert run.notes == ("died after its report was written: the command ended with exit code 1",)


def test_a_command_that_fails_before_is_the_cause_unless_a_rank_knows_it(tmp_path: Path) -> None:
    peer = make_report(0, failure=crash(0, 1.0, PEER))
    assert failure_of(collected(write_launch(tmp_path, peer, ended=(COMMAND_FAILED,)))).rank is None
    cause = make_report(0, failure=crash(0, 1.0, "ValueError: the cause"))
    assert failure_of(collected(write_launch(tmp_path, cause, ended=(COMMAND_FAILED,)))).rank == 0


def test_a_loss_that_was_not_to_be_observed_is_a_note(tmp_path: Path) -> None:
    case = make_case(framework=Script(path="train.py", loss=None))
    run = collected(write_launch(tmp_path, *(make_report(rank, loss=()) for rank in (0, 1)), case=case))
    assert run.failure is None
    assert run.figures.loss_last is None
    assert run.notes == (
        "loss not observed, as the case asks for: training that no longer learns would not be seen",
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_named_with_its_step(tmp_path: Path, value: float) -> None:
    good = make_report(0)
    bad = make_report(1, loss=(*good.loss[:7], value, *good.loss[8:]))
    failure = failure_of(collected(write_launch(tmp_path, good, bad)))
    assert (failure.kind, failure.message) == ("loss", f"the loss is {value} at step 7")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            (6.2,) * 25,
            "the loss does not fall: 6.2000 is the mean of the first 3 steps, 6.2000 that of the last 3: "
            "give more steps or another learning_rate",
        ),
        (tuple(6.2 + step for step in range(25)), "7.2000 is the mean of the first 3 steps, 29.2000 that"),
        ((), "no loss was recorded"),
    ],
)
def test_a_loss_that_does_not_fall_is_a_failure(tmp_path: Path, loss: tuple[float, ...], said: str) -> None:
    reports = [make_report(rank, loss=loss) for rank in (0, 1)]
    failure = failure_of(collected(write_launch(tmp_path, *reports)))
    assert failure.kind == "loss"
    assert said in failure.message


WARM_UP = tuple(2.3 + 0.01 * (step % 5) for step in range(25))
"""Of random data, or of a learning rate that is still next to 0."""


def test_a_script_is_asked_for_a_finite_loss_unless_it_says_that_it_falls(tmp_path: Path) -> None:
    def failure(losses: tuple[float, ...], **options: Any) -> Failure | None:
        case = make_case(framework=Script(path="train.py", **options))
        reports = [make_report(rank, loss=losses) for rank in (0, 1)]
        return collected(write_launch(tmp_path, *reports, case=case)).failure

    assert failure(WARM_UP) is None
    rising = failure(WARM_UP, loss="falls")
    assert rising is not None
    assert (rising.kind, 'say loss="finite" where it need not (random data' in rising.message) == (
        "loss",
        True,
    )
    assert failure((*WARM_UP[:24], math.nan)) is not None
    assert failure(()) is not None


def test_one_odd_step_does_not_tell_that_a_loss_does_not_fall(tmp_path: Path) -> None:
    """As measured: llama-tiny, one sequence a step, 12 steps; the last one is a hard batch."""
    case = make_case(max_warmup_steps=2, steps=10)
    loss = (6.25, 6.08, 5.94, 5.91, 5.85, 5.80, 5.79, 5.60, 5.50, 4.90, 5.01, 7.28)
    reports = [make_report(rank, loss=loss, step_s=(0.1,) * 12) for rank in (0, 1)]
    assert collected(write_launch(tmp_path, *reports, case=case)).failure is None


def test_losses_of_some_steps_only_are_a_failure(tmp_path: Path) -> None:
    reports = [make_report(rank, loss=(3.0, 2.0)) for rank in (0, 1)]
    assert collected(write_launch(tmp_path, *reports)).failure is not None


@pytest.mark.parametrize(
    ("wall_s", "told"), [(2.5, False), (2.6, False), (2.8, True), (1.0, True), (0.0, True)]
)
def test_a_wall_clock_that_disagrees_is_a_note(tmp_path: Path, wall_s: float, told: bool) -> None:
    run = collected(write_launch(tmp_path, make_report(0), make_report(1, wall_s=wall_s)))
    assert run.failure is None
    note = f"rank 1: the steps sum to 2.500 s, the wall clock says {wall_s:.3f} s"
    assert run.notes == ((note,) if told else ())


def test_a_model_too_small_for_its_memory_to_be_seen_is_a_note(tmp_path: Path) -> None:
    small, larger = (Memory(peak=peak, method="VmHWM") for peak in (0, 5))
    reports = [make_report(rank, memory=small) for rank in (0, 1)]
    (note,) = collected(write_launch(tmp_path, *reports)).notes
    assert note.startswith("a peak memory of 0 bytes cannot be compared: what was trained stayed within the")
    reports[1] = make_report(1, memory=larger)
    assert collected(write_launch(tmp_path, *reports)).notes == ()


def test_steps_that_drift_to_the_end_are_a_note(tmp_path: Path) -> None:
    steps = tuple(0.1 * 1.2**step for step in range(25))
    run = collected(write_launch(tmp_path, *(make_report(rank, step_s=steps) for rank in (0, 1))))
    assert run.notes == ("step times were still drifting at the end: raise max_warmup_steps or steps",)


def on_gpu(run_dir: RunDir, health: Health | None = None, driver: str | None = None) -> Run:
    machine = make_gpu_machine().replace(driver=driver)
    return collect(run_dir, machine, started_at="now", duration_s=1.0, failure=None, health=health)


@pytest.mark.parametrize(
    ("step_s", "note"),
    [
        (
            0.19,
            "the measured window is 4 s, after 1 s of warm-up at the most: a GPU's clocks and temperature "
            "settle in 30 to 60 s; set steps=110 and max_warmup_steps=60, or more",
        ),
        (
            1.0,
            "the measured window is 23 s, after 5 s of warm-up at the most: a GPU's clocks and temperature "
            "settle in 30 to 60 s; set max_warmup_steps=10, or more",
        ),
        (2.1, None),
    ],
)
def test_a_gpu_that_is_measured_before_it_settles_is_a_note(
    tmp_path: Path, step_s: float, note: str | None
) -> None:
    reports = [make_report(rank, step_s=(step_s,) * 25) for rank in (0, 1)]
    run_dir = write_launch(tmp_path, *reports)
    assert on_gpu(run_dir).notes == (() if note is None else (note,))
    assert collected(run_dir).notes == ()


def test_of_a_gpu_the_clock_in_the_window_and_the_memory_by_nvml_are_figures(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, *(make_report(rank) for rank in (0, 1)))
    health = Health(
        samples=5,
        seconds=2.0,
        steps=20,
        devices=(DeviceHealth(index=0, job_memory_bytes=7), DeviceHealth(index=1, job_memory_bytes=9)),
        sm_clocks_mhz=((2, 1980), (3, 1700), (9, 1750), (25, 1720)),
    )
    run = on_gpu(run_dir, health)
    assert run.window == (2, 25)
    assert (run.figures.sm_clock_mhz, run.figures.device_memory_bytes) == (1720, 9)
    run = on_gpu(run_dir, health.replace(devices=(), sm_clocks_mhz=((1, 1980),)))
    assert (run.figures.sm_clock_mhz, run.figures.device_memory_bytes) == (None, None)


def test_how_the_gpus_are_set_up_stands_in_the_environment(tmp_path: Path) -> None:
    kept = {"torch": "2.13", "TORCH_FR_DUMP_TEMP_FILE": "/runs/launch-1/x"}
    seen = Observed(settings={}, environment=kept)
    run_dir = write_launch(tmp_path, *(make_report(rank, observed=seen) for rank in (0, 1)))
    cards = [
        DeviceHealth(index=index, power_limit_w=watts, sm_clock_limit_mhz=1980, ecc=True, persistence=False)
        for index, watts in enumerate((700, 500.5, 700))
    ]
    health = Health(samples=0, seconds=0, steps=0, devices=tuple(cards))
    run = on_gpu(run_dir, health, driver="580.1")
    assert run.observed is not None
    assert run.observed.environment == {
        "torch": "2.13",
        "driver": "580.1",
        "gpu_power_limit_w": "500.5, 700",
        "gpu_sm_clock_limit_mhz": "1980",
        "gpu_ecc": "on",
        "gpu_persistence": "off",
    }
    unread = on_gpu(run_dir)
    assert unread.observed is not None
    assert unread.observed.environment == {"torch": "2.13"}


@pytest.mark.parametrize("world", [1, 4])
def test_as_many_ranks_as_the_case_has(tmp_path: Path, world: int) -> None:
    case: Case = make_case(topology={"processes_per_node": world})
    reports = [make_report(rank, world_size=world) for rank in range(world)]
    run = collected(write_launch(tmp_path, *reports, case=case))
    assert run.failure is None
    assert len(run.memory) == world
    assert run.figures.tokens_per_s_per_device == pytest.approx(2560 / world)


# Metrics of other packages


@pytest.fixture
def extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a metric that ranks record, and one that is read out of the launch."""
    code = """
        from perfsuite.results import Metric

        def metric(name, **how):
            return Metric(name=name, label=name, unit="", better="lower", judged="shown", **how)

        EQUAL = metric("equal", across_ranks="equal", recorder=object)
        STEPS = metric("steps", read=lambda run: run.figures.tokens_per_s)
    """
    install(
        tmp_path / "site",
        monkeypatch,
        package="extra-metrics",
        group=METRICS,
        entry_points={"equal": "extra_metrics:EQUAL", "steps": "extra_metrics:STEPS"},
        modules={"extra_metrics": code},
    )


def write_extra(directory: Path, *values: float) -> RunDir:
    reports = [make_report(rank, extra={"equal": value}) for rank, value in enumerate(values)]
    run_dir = write_launch(directory, *reports)
    request = documents.read(run_dir.case, CaseFile)
    documents.write(run_dir.case, request.replace(metrics=("equal", "steps")))
    return run_dir


@pytest.mark.usefixtures("extra")
def test_a_run_has_the_metrics_of_other_packages_that_its_case_file_names(tmp_path: Path) -> None:
    run = collected(write_extra(tmp_path / "a", 3.0, 3.0))
    assert run.failure is None
    assert run.figures.extra == {"equal": 3.0, "steps": run.figures.tokens_per_s}
    plain = collected(write_launch(tmp_path / "b", make_report(0), make_report(1)))
    assert plain.figures == run.figures.replace(extra={})


@pytest.mark.usefixtures("extra")
def test_ranks_that_disagree_on_a_metric_that_has_to_be_equal_are_a_failure(tmp_path: Path) -> None:
    failure = collected(write_extra(tmp_path / "a", 3.0, 4.0)).failure
    assert failure is not None
    assert failure.kind == "ranks_disagree"
    assert failure.message.startswith("ranks disagree on equal (rank 0: 3, rank 1: 4)")
