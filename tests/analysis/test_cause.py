from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfsuite import documents
from perfsuite.analysis.cause import with_log
from perfsuite.case.case import Topology
from perfsuite.results.rank_report import UNREPORTED, Failure, RankReport
from perfsuite.results.run import LaunchFile, OomKills
from tests.collected import COMMAND_FAILED, TIMEOUT, collected, crash, failure_of
from tests.samples import make_case, make_report, write_launch


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank_is_named(tmp_path: Path, missing: int) -> None:
    run = collected(write_launch(tmp_path, make_report(1 - missing)))
    failure = failure_of(run)
    assert (failure.kind, failure.rank) == ("missing_report", missing)
    assert failure.message == f"no report from rank {missing} of 2: see {tmp_path}"


def test_every_missing_rank_is_named(tmp_path: Path) -> None:
    failure = failure_of(collected(write_launch(tmp_path)))
    assert failure.message.startswith("no report from rank 0, 1 of 2")
    assert failure.rank == 0


def test_a_launcher_that_died_is_the_cause_whatever_a_rank_saw_of_it(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0, failure=crash(0, 1.0, "Connection closed by peer")))
    run_dir.launch(0).unlink()
    failure = failure_of(collected(run_dir))
    assert (failure.kind, failure.rank) == ("missing_report", 1)
    assert failure.message == (
        f"the agent died before rank 1 of 2 had reported: was it killed? See {tmp_path}"
    )


@pytest.mark.parametrize(("free", "kind"), [(0, "error"), (2**16 - 1, "error"), (2**16, "missing_report")])
def test_a_report_that_found_no_room_is_no_fault_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: str
) -> None:
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    failure = failure_of(collected(write_launch(tmp_path)))
    assert (failure.kind, failure.rank) == (kind, 0)
    assert ("no space is left on the disk of" in failure.message) is (kind == "error")


WATCHDOG = (
    "[rank0]:[E ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600071 milliseconds"
)


ABORTED = "exit code -6 (SIGABRT)"


def test_a_hang_that_only_nccls_watchdog_ended_is_a_timeout(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, ended=(crash(0, 5.0, ABORTED), crash(1, 6.0, "SignalException: 15")))
    run_dir.rank_log(0).write_text(f"step 7\n{WATCHDOG}\n" + "frame #0\n" * 200)
    failure = failure_of(collected(run_dir))
    assert (failure.kind, failure.message) == ("timeout", f"NCCL's watchdog ended a hang: {WATCHDOG}")


def test_a_commands_hang_that_only_nccls_watchdog_ended_is_a_timeout(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, ended=(COMMAND_FAILED,))
    run_dir.agent_log(0).write_text(f"{WATCHDOG}\n")
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
        "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server "
        "shutdown or crash?",
    ],
)
def test_what_a_healthy_rank_says_when_another_died_is_never_the_cause(tmp_path: Path, said: str) -> None:
    reports = [make_report(0, failure=crash(0, 1.0, said)), make_report(1, failure=crash(1, 2.0))]
    assert failure_of(collected(write_launch(tmp_path, *reports))).rank == 1


def test_of_two_causes_the_earlier_one_counts(tmp_path: Path) -> None:
    reports = [make_report(0, failure=crash(0, 2.0)), make_report(1, failure=crash(1, 1.0))]
    assert failure_of(collected(write_launch(tmp_path, *reports))).rank == 1


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (
            "KeyError: 1\nmore",
            "ValueError: x (by the clocks of two nodes, before rank 2 of another one: KeyError: 1)",
        ),
        ("ValueError: x", "ValueError: x"),
        (PEER, "ValueError: x"),
    ],
)
def test_a_cause_on_one_node_is_told_with_that_of_another_one_whose_clock_may_differ(
    tmp_path: Path, second: str, told: str
) -> None:
    failures = [crash(1, 1.0, "ValueError: x"), crash(0, 2.0, "TypeError: same node"), crash(2, 3.0, second)]
    case = make_case(topology=Topology(nodes=2, processes_per_node=2))
    reports = [make_report(each.rank or 0, failure=each) for each in failures]
    run_dir = write_launch(tmp_path, *reports, case=case)
    assert failure_of(collected(run_dir)).message == told


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
    expected = [f"line {line}" for line in range(40, 100)]
    assert shown == "\n".join(["last lines of rank-1.log:", *expected])


def test_without_a_log_of_the_rank_the_launchers_is_shown(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path)
    run_dir.agent_log(0).write_text("ImportError: no module\n")
    assert failure_of(collected(run_dir)).traceback == "last lines of agent-0.log:\nImportError: no module"


ELASTIC = """\
W1121 19:57:47.255000 8705 torch/multiprocessing/spawn.py:165] Terminating process 8717 via signal SIGTERM
E1121 19:57:47.303000 8705 torch/distributed/elastic/multiprocessing/api.py:836] failed (exitcode: 1)
E1121 19:57:47.303000 8705 torch/distributed/elastic/multiprocessing/api.py:836] Traceback (most recent call
"""


def test_what_a_rank_says_is_not_followed_by_torchs_launcher(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), ended=(crash(1, 1.0, "exit code 2"),))
    run_dir.agent_log(0).write_text(ELASTIC)
    assert str(failure_of(collected(run_dir)).traceback).endswith(ELASTIC.strip()), "all that is known"
    run_dir.rank_log(1).write_text("train.py: error: unrecognized arguments: --foo\n")
    alone = "last lines of rank-1.log:\ntrain.py: error: unrecognized arguments: --foo"
    assert failure_of(collected(run_dir)).traceback == alone
    run_dir.agent_log(0).write_text(f"{ELASTIC}Out of disk\n")
    assert failure_of(collected(run_dir)).traceback == f"{alone}\nlast lines of agent-0.log:\nOut of disk"


def test_of_an_unknown_rank_all_logs_are_shown_and_one_that_says_something_replaces_torchs_launcher(
    tmp_path: Path,
) -> None:
    run_dir = write_launch(tmp_path, make_report(0), ended=(COMMAND_FAILED,))
    run_dir.rank_log(0).touch()
    run_dir.rank_log(1).write_text("bad option\n")
    run_dir.agent_log(0).write_text(ELASTIC)
    assert failure_of(collected(run_dir)).traceback == "last lines of rank-1.log:\nbad option"


@pytest.mark.parametrize("empty", [True, False])
def test_a_log_in_which_nothing_stands_is_said_to_be_empty(tmp_path: Path, empty: bool) -> None:
    run_dir = write_launch(tmp_path)
    if empty:
        run_dir.agent_log(0).touch()
    assert failure_of(collected(run_dir)).traceback == "no process wrote anything"


PEER_GONE = Failure(kind="crash", rank=0, message="Connection closed by peer", at=1.0)


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
    run_dir.agent_log(0).write_text("waiting\n")
    failure = failure_of(collected(run_dir, failure=TIMEOUT))
    assert failure == TIMEOUT.replace(traceback="last lines of agent-0.log:\nwaiting")


def test_a_rank_that_said_why_it_failed_is_the_failure_though_others_hung(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0, failure=crash(0, 1.0)))
    assert failure_of(collected(run_dir, failure=TIMEOUT)).kind == "crash"


def test_a_command_that_fails_before_is_the_cause_unless_a_rank_knows_it(tmp_path: Path) -> None:
    peer = make_report(0, failure=crash(0, 1.0, PEER))
    assert failure_of(collected(write_launch(tmp_path, peer, ended=(COMMAND_FAILED,)))).rank is None
    cause = make_report(0, failure=crash(0, 1.0, "ValueError: the cause"))
    assert failure_of(collected(write_launch(tmp_path, cause, ended=(COMMAND_FAILED,)))).rank == 0


def test_of_ranks_that_are_gone_and_ranks_that_saw_it_the_first_of_each_is_named(tmp_path: Path) -> None:
    reports = [make_report(rank, failure=crash(rank, 1.0, f"{PEER}{rank}")) for rank in (0, 1)]
    case = make_case(topology={"processes_per_node": 4})
    failure = failure_of(collected(write_launch(tmp_path, *reports, case=case)))
    assert (failure.kind, failure.rank) == ("crash", 2)
    assert failure.message == f"rank 2, 3 of 4 died without a report; rank 0 then said: {PEER}0"


def test_how_a_rank_ended_that_had_reported_is_not_why_another_one_is_missing(tmp_path: Path) -> None:
    ended = (crash(0, 1.0, "exit code 1"), crash(1, 5.0, "exit code -9 (SIGKILL)"))
    failure = failure_of(collected(write_launch(tmp_path, make_report(0), ended=ended)))
    assert (failure.rank, failure.message) == (1, "exit code -9 (SIGKILL)")


def test_a_command_that_fails_when_every_rank_has_reported_is_no_cause(tmp_path: Path) -> None:
    run = collected(write_launch(tmp_path, make_report(0), make_report(1), ended=(COMMAND_FAILED,)))
    assert run.failure is None


def test_of_two_ranks_that_the_watchdog_ended_the_earlier_one_is_told(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, ended=(crash(0, 7.0, ABORTED), crash(1, 5.0, ABORTED)))
    run_dir.rank_log(0).write_text(f"{WATCHDOG} late")
    run_dir.rank_log(1).write_text(f"{WATCHDOG} early")
    failure = failure_of(collected(run_dir))
    assert (failure.at, failure.message) == (5.0, f"NCCL's watchdog ended a hang: {WATCHDOG} early")


def test_a_hang_that_the_ranks_themselves_report_by_the_watchdogs_words_is_a_timeout(tmp_path: Path) -> None:
    reports = [make_report(rank, failure=crash(rank, 7.0 - rank, f"E: {WATCHDOG}")) for rank in (0, 1)]
    failure = failure_of(collected(write_launch(tmp_path, *reports)))
    assert (failure.kind, failure.at) == ("timeout", 6.0)


def test_a_traceback_of_one_line_says_less_than_the_log(tmp_path: Path) -> None:
    failed = make_report(1, failure=crash(1, 1.0, traceback="exit code 1"))
    run_dir = write_launch(tmp_path, make_report(0), failed)
    run_dir.rank_log(1).write_text("bad option\n")
    assert failure_of(collected(run_dir)).traceback == "last lines of rank-1.log:\nbad option"


def test_where_the_processes_stood_comes_before_the_logs(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path)
    run_dir.stacks(0, 7).write_text("Thread\n  waits")
    run_dir.rank_log(0).write_text("step 7\n")
    run_dir.agent_log(0).write_text("waiting\n")
    assert str(failure_of(collected(run_dir, failure=TIMEOUT)).traceback).splitlines() == [
        "rank 0 stood here:",
        "Thread",
        "  waits",
        "last lines of rank-0.log:",
        "step 7",
        "last lines of agent-0.log:",
        "waiting",
    ]


@pytest.mark.parametrize(("more", "first"), [(0, "first"), (1, "irst")])
def test_of_a_long_log_the_last_256_kib_are_read(tmp_path: Path, more: int, first: str) -> None:
    run_dir = write_launch(tmp_path)
    run_dir.agent_log(0).write_text("first\n" + "y" * (256 * 1024 - len("first\n") + more))
    assert str(failure_of(collected(run_dir)).traceback).splitlines()[1] == first


def test_what_the_profiler_says_of_itself_is_no_error(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path)
    says = "USDT:2026-11-22 14:32:38 5185:5185 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
    run_dir.rank_log(1).write_text(f"{says}why\n{says}")
    shown = with_log(Failure(kind="crash", message="x", rank=1), run_dir).traceback
    assert shown == "last lines of rank-1.log:\nwhy"


@pytest.mark.fault("rank makes fewer steps")
def test_a_rank_whose_clock_stopped_is_named_and_not_the_peer_that_left_it(tmp_path: Path) -> None:
    total = make_case().total_steps
    late = make_report(1, failure=crash(1, 5.0, PEER, "Traceback\n  its own")).replace(steps=10, step_s=())
    failure = failure_of(collected(write_launch(tmp_path, make_report(0), late)))
    assert (failure.kind, failure.rank, failure.traceback) == ("crash", 1, "Traceback\n  its own")
    assert failure.message == (
        f"rank 1 had made 10 of {total} optimizer steps when rank 0 had made all: is its optimizer replaced "
        f"on the way, or has it less data? It then said: {PEER}"
    )


@pytest.mark.parametrize("steps", [None, make_case().total_steps])
def test_a_rank_that_is_not_behind_is_told_by_what_it_said(tmp_path: Path, steps: int | None) -> None:
    late = make_report(1, failure=crash(1, 5.0, PEER)).replace(steps=steps, step_s=())
    assert failure_of(collected(write_launch(tmp_path, make_report(0), late))).message == PEER


@pytest.mark.fault("failed rank cannot write")
def test_a_rank_that_could_not_write_its_report_is_told_by_its_log(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), ended=(crash(1, 5.0, "exit code 1"),))
    line = f"{UNREPORTED} mismatch: MismatchError: another model (cannot write rank-1.json: No permission)"
    run_dir.rank_log(1).write_text(f"epoch 1\n[rank1]: {line}\nmore\n")
    failure = failure_of(collected(run_dir))
    assert (failure.kind, failure.rank) == ("mismatch", 1)
    assert failure.message.startswith("MismatchError: another model (cannot write")
    assert str(failure.traceback).startswith("last lines of rank-1.log:\nepoch 1\n")


KILLED = "the script ended with exit code -9 (SIGKILL), before an optimizer step could be seen"
OUT_OF_MEMORY = "as memory had run out (oom_kill of its control group: +1)"


@pytest.mark.fault("kernel kills for want of memory")
@pytest.mark.parametrize(
    ("failed", "kills", "kind", "said"),
    [
        (crash(1, 1.0, KILLED), OomKills(of_group=1, of_machine=1), "out_of_memory", OUT_OF_MEMORY),
        (crash(1, 1.0, KILLED), OomKills(of_machine=2), "crash", "/proc/vmstat: +2): was it this process?"),
        (crash(1, 1.0, KILLED), OomKills(), "crash", "could be seen"),
        (crash(1, 1.0, "exit code 1"), OomKills(of_group=1, of_machine=1), "crash", "exit code 1"),
    ],
)
def test_a_rank_that_the_kernel_killed_for_want_of_memory_ran_out_of_memory(
    tmp_path: Path, failed: Failure, kills: OomKills, kind: str, said: str
) -> None:
    run_dir = write_launch(tmp_path, make_report(0))
    documents.write(run_dir.launch(0), LaunchFile(failures=(failed,), oom_kills=kills))
    failure = failure_of(collected(run_dir))
    assert failure.kind == kind
    assert failure.message.startswith(failed.message)
    assert failure.message.endswith(said)


@pytest.mark.parametrize(
    "log",
    [
        "E1121 failed (exitcode: -9) local_rank: 1 (pid: 7)",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
        "Signal 9 (SIGKILL) received by PID 7",
    ],
)
def test_a_kill_that_only_a_log_tells_is_one_of_the_kernel_where_it_counted_one(
    tmp_path: Path, log: str
) -> None:
    run_dir = write_launch(tmp_path)
    documents.write(run_dir.launch(0), LaunchFile(failures=(COMMAND_FAILED,), oom_kills=OomKills(of_group=1)))
    run_dir.agent_log(0).write_text(f"{log}\n")
    assert failure_of(collected(run_dir)).kind == "out_of_memory"


def test_a_kill_on_another_node_is_not_why_a_rank_was_killed(tmp_path: Path) -> None:
    case = make_case(topology={"nodes": 2, "processes_per_node": 1})
    run_dir = write_launch(tmp_path, make_report(0), case=case)
    documents.write(run_dir.launch(0), LaunchFile(oom_kills=OomKills(of_group=1)))
    documents.write(run_dir.launch(1), LaunchFile(failures=(crash(1, 1.0, KILLED),)))
    assert failure_of(collected(run_dir)).kind == "crash"
