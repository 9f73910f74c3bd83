import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.analysis.cause import read_stacks
from perfsuite.results.collective_calls import CollectiveCall, CollectiveCallsFile, GroupCalls
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import RunDir
from tests.collected import COMMAND_FAILED, TIMEOUT, collected, crash, failure_of
from tests.samples import make_case, make_report, write_launch

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:6843"
OTHER = "ValueError: x"
WATCHDOG = (
    "[rank0]:[E ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600071 milliseconds"
)
ABORTED = "exit code -6 (SIGABRT)"
SIGKILL = "exit code -9 (SIGKILL)"
RAN_OUT = Failure(kind="out_of_memory", message="OutOfMemoryError: x", rank=0, traceback="a\nb", at=3)


PEERS_SAY = (
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
)


def failed(*failures: Failure) -> list[RankReport]:
    return [make_report(failure.rank or 0, failure=failure) for failure in failures]


def cause(
    directory: Path,
    *reports: RankReport,
    ended: Sequence[Failure] = (),
    logs: dict[str, str] | None = None,
    failure: Failure | None = None,
    **launch: Any,
) -> Failure:
    """Return why a launch with these reports and logs failed. `ended` are the failures that its agent saw."""
    run_dir = write_launch(directory, *reports, ended=tuple(ended), **launch)
    for name, text in (logs or {}).items():
        (run_dir.path / name).write_text(text)
    return failure_of(collected(run_dir, failure=failure))


@pytest.mark.parametrize(
    ("reports", "ended", "rank", "message"),
    [
        (failed(crash(0, 10.0, PEER), crash(1, 11.0, OTHER)), [], 1, OTHER),
        (failed(crash(0, 2.0, "late"), crash(1, 1.0, "early")), [], 1, "early"),
        (failed(crash(0, 2.0, PEER), crash(1, 1.0, PEER)), [], 1, PEER),
        ([make_report(0)], [crash(1, 5.0, ABORTED)], 1, ABORTED),
        (failed(crash(0, 1.0, PEER)), [crash(1, 5.0, SIGKILL)], 1, SIGKILL),
        ([make_report(0)], [crash(0, 1.0, "exit code 1"), crash(1, 5.0, SIGKILL)], 1, SIGKILL),
        (failed(crash(0, 1.0, PEER)), [COMMAND_FAILED], None, COMMAND_FAILED.message),
        (failed(crash(0, 1.0, OTHER)), [COMMAND_FAILED], 0, OTHER),
        # The error that a healthy rank reports after another rank died is never the cause.
        *((failed(crash(0, 1.0, said), crash(1, 2.0, OTHER)), [], 1, OTHER) for said in PEERS_SAY),
    ],
)
def test_cause_is_not_the_failure_of_a_peer(
    tmp_path: Path, reports: list[RankReport], ended: list[Failure], rank: int | None, message: str
) -> None:
    failure = cause(tmp_path, *reports, ended=ended)
    assert (failure.kind, failure.rank, failure.message) == ("crash", rank, message)


@pytest.mark.parametrize(
    ("reporting", "rank", "ranks"),
    [([0], 1, "1"), ([1], 0, "0"), ([], 0, "0, 1")],
    ids=["rank 1", "rank 0", "both"],
)
def test_ranks_that_left_no_report_are_named(
    tmp_path: Path, reporting: list[int], rank: int, ranks: str
) -> None:
    directory = tmp_path / str(reporting)
    failure = cause(directory, *map(make_report, reporting))
    assert (failure.kind, failure.rank) == ("missing_report", rank)
    assert failure.message == f"no report from rank {ranks} of 2: see {directory}"
    RunDir(directory).launch(0).unlink()  # a missing file means that the launcher died
    failure = failure_of(collected(RunDir(directory)))
    assert (failure.kind, failure.rank) == ("missing_report", rank)
    died = f"the agent died before rank {ranks} of 2 had reported: was it killed? See {directory}"
    assert failure.message == died


def test_reports_the_error_of_a_dead_agent(tmp_path: Path) -> None:
    """An example is an arm with an older pydantic than perfsuite needs."""
    traceback = 'Traceback (most recent call last):\n  File "x.py", line 1\nImportError: no name X\n'
    run_dir = RunDir(tmp_path)
    cause(tmp_path, logs={"agent-0.log": traceback})
    run_dir.launch(0).unlink()
    said = f"ImportError: no name X. See {run_dir.agent_log(0)}"
    assert failure_of(collected(run_dir)).message.endswith(f"of 2 had reported: {said}")


def test_survived_error_is_not_why_an_agent_died(tmp_path: Path) -> None:
    log = "Traceback (most recent call last):\nImportError: no name X\nstep: 3\nwarning: leaked semaphore\n"
    run_dir = RunDir(tmp_path)
    cause(tmp_path, logs={"agent-0.log": log})
    run_dir.launch(0).unlink()
    assert "was it killed?" in failure_of(collected(run_dir)).message


@pytest.mark.parametrize(("free", "kind"), [(0, "error"), (2**16 - 1, "error"), (2**16, "missing_report")])
def test_a_full_disk_is_not_the_codes_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    failure = cause(tmp_path)
    assert (failure.kind, failure.rank) == (kind, 0)
    assert ("no space is left on the disk of" in failure.message) is (kind == "error")


@pytest.mark.parametrize(
    ("reports", "ended", "logs", "message"),
    [
        (
            *([], [crash(0, 5.0, ABORTED), crash(1, 6.0, "SignalException: 15")]),
            *({"rank-0.log": f"step 7\n{WATCHDOG}\n" + "frame #0\n" * 200}, WATCHDOG),
        ),
        ([], [COMMAND_FAILED], {"agent-0.log": f"{WATCHDOG}\n"}, WATCHDOG),
        (
            *([], [crash(0, 7.0, ABORTED), crash(1, 5.0, ABORTED)]),
            *({"rank-0.log": f"{WATCHDOG} late", "rank-1.log": f"{WATCHDOG} early"}, f"{WATCHDOG} early"),
        ),
        ([crash(rank, 7.0 - rank, f"E: {WATCHDOG}") for rank in (0, 1)], [], {}, f"E: {WATCHDOG}"),
    ],
    ids=["rank", "command", "the earlier", "the ranks themselves"],
)
def test_hang_ended_by_the_watchdog_is_a_timeout(
    tmp_path: Path, reports: list[Failure], ended: list[Failure], logs: dict[str, str], message: str
) -> None:
    failure = cause(tmp_path, *failed(*reports), ended=ended, logs=logs)
    assert (failure.kind, failure.message) == ("timeout", f"NCCL's watchdog ended a hang: {message}")
    assert failure.at == min(failure.at for failure in [*reports, *ended])


def test_rank_or_death_outranks_the_watchdog(tmp_path: Path) -> None:
    logs = {"rank-0.log": WATCHDOG}
    for at in (4.0, 603.0):
        said = cause(tmp_path / f"{at}", *failed(RAN_OUT), ended=[crash(0, at, ABORTED)], logs=logs)
        assert said == RAN_OUT
    died = cause(tmp_path / "died", ended=[crash(0, 5.0, ABORTED), crash(1, 700.0, SIGKILL)], logs=logs)
    assert (died.kind, died.message) == ("crash", SIGKILL)


def test_shows_the_log_without_a_traceback(tmp_path: Path) -> None:
    run_dir = write_launch(tmp_path, make_report(0), ended=(crash(1, 1.0, "exit code 13"),))
    run_dir.rank_log(0).write_text("of another rank\n")
    run_dir.rank_log(1).write_bytes(b"\xff" + b"".join(b"line %d\n" % line for line in range(100)))
    shown = failure_of(collected(run_dir)).traceback
    expected = [f"line {line}" for line in range(40, 100)]
    assert shown == "\n".join(["last lines of rank-1.log:", *expected])


RANK_SAYS = "train.py: error: unrecognized arguments: --foo"
AGENT_SAYS = "failed (exitcode: 1)"
BOTH = f"last lines of rank-1.log:\n{RANK_SAYS}\nlast lines of agent-0.log:\n{AGENT_SAYS}"


OF_AGENT = {"agent-0.log": AGENT_SAYS, "rank-1.log": RANK_SAYS}


@pytest.mark.parametrize(
    ("ended", "logs", "expected"),
    [
        ([], {"agent-0.log": "ImportError: x\n"}, "last lines of agent-0.log:\nImportError: x"),
        ([crash(1, 1.0, "exit code 2")], OF_AGENT, BOTH),
        ([COMMAND_FAILED], {"rank-0.log": "", **OF_AGENT}, BOTH),  # the rank is unknown
        ([], {"agent-0.log": ""}, "no process wrote anything"),
        ([], {}, "no process wrote anything"),
    ],
    ids=["agent", "rank", "unknown rank", "empty log", "no log"],
)
def test_without_a_traceback_logs_are_shown(
    tmp_path: Path, ended: list[Any], logs: dict[str, str], expected: str
) -> None:
    reports = [make_report(0)] if ended else []
    assert cause(tmp_path, *reports, ended=ended, logs=logs).traceback == expected


def test_a_mismatch_has_neither_traceback_nor_logs(tmp_path: Path) -> None:
    mismatch = Failure(kind="mismatch", message="loader='train:x': 'x' does not exist", rank=1, at=1)
    logs = {"rank-1.log": "step 1\n", "agent-0.log": AGENT_SAYS}
    assert cause(tmp_path, *failed(mismatch), logs=logs).traceback is None


def test_names_the_first_death_and_first_witness(tmp_path: Path) -> None:
    reports = failed(*(crash(rank, 1.0, f"{PEER}{rank}") for rank in (0, 1)))
    failure = cause(tmp_path, *reports, case=make_case(topology={"processes_per_node": 4}))
    assert (failure.kind, failure.rank) == ("crash", 2)
    assert failure.message == f"rank 2, 3 of 4 died without a report; rank 0 then reported: {PEER}0"


def test_names_deaths_before_the_agents(tmp_path: Path) -> None:
    reports = failed(*(crash(rank, 1.0, f"{PEER}{rank}") for rank in (0, 1)))
    cause(tmp_path, *reports, case=make_case(topology={"processes_per_node": 4}))
    RunDir(tmp_path).launch(0).unlink()
    assert failure_of(collected(RunDir(tmp_path))).message.startswith(
        "the agent died before rank 2, 3 of 4 had"
    )


@pytest.mark.parametrize(
    ("own", "traceback"),
    [
        ("exit code 1", "last lines of rank-1.log:\nbad option"),
        ("Trace\n  x", "Trace\n  x"),
    ],
    ids=["one line", "traceback"],
)
def test_one_line_traceback_gives_way_to_the_log(tmp_path: Path, own: str, traceback: str) -> None:
    logs = {"rank-1.log": "bad option\n"}
    reports = failed(crash(0, 1.0, PEER, "Trace\n  peer"), crash(1, 2.0, traceback=own))
    assert cause(tmp_path, *reports, logs=logs).traceback == traceback


def test_stacks_come_before_logs(tmp_path: Path) -> None:
    logs = {"stacks-0-0-7.txt": "Thread\n  waits", "rank-0.log": "step 7\n", "agent-0.log": "waiting\n"}
    assert cause(tmp_path, logs=logs, failure=TIMEOUT).traceback == (
        "rank 0 stopped at:\nThread\n  waits\nlast lines of rank-0.log:\nstep 7\n"
        "last lines of agent-0.log:\nwaiting"
    )


@pytest.mark.parametrize(("more", "first"), [(0, "first"), (1, "irst")])
def test_of_a_long_log_the_last_256_kib_are_read(tmp_path: Path, more: int, first: str) -> None:
    log = "first\n" + "y" * (256 * 1024 - len("first\n") + more)
    assert str(cause(tmp_path, logs={"agent-0.log": log}).traceback).splitlines()[1] == first


def test_a_secret_in_a_log_is_not_kept(tmp_path: Path) -> None:
    token = "hf_" + "a1" * 17
    log = f"cannot log in with {token} at https://u:pw@host\n"
    traceback = str(cause(tmp_path, logs={"agent-0.log": log}).traceback)
    assert "cannot log in with *** at https://***@host" in traceback
    cut_in_two = "x" * 10 + token + "\n" + "y" * (256 * 1024 - 20)
    assert token[10:] not in str(cause(tmp_path, logs={"agent-0.log": cut_in_two}).traceback)


def test_a_log_that_is_a_fifo_hangs_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "agent-0.log")
    assert "it is a FIFO" in str(cause(tmp_path).traceback)


@pytest.mark.fault("rank takes fewer steps")
def test_names_the_rank_whose_clock_stopped(tmp_path: Path) -> None:
    total = make_case().total_steps
    late = make_report(1, failure=crash(1, 5.0, PEER, "Traceback\n  its own"), step_s=())
    failure = cause(tmp_path, make_report(0), late.replace(steps=10))
    assert (failure.kind, failure.rank, failure.traceback) == ("crash", 1, "Traceback\n  its own")
    assert failure.message == (
        f"rank 1 had taken 10 of {total} optimizer steps when rank 0 had taken all. Does rank 1 "
        f"replace its optimizer during training, or does it have less data? The error of rank 1: {PEER}"
    )


@pytest.mark.parametrize("steps", [None, make_case().total_steps], ids=["unknown", "all"])
def test_a_rank_with_all_or_unknown_steps_is_not_behind(tmp_path: Path, steps: int | None) -> None:
    late = make_report(1, failure=crash(1, 5.0, PEER, "Traceback\n  its own"), step_s=(), steps=steps)
    assert cause(tmp_path, make_report(0), late).message == PEER


KILLED = "the script ended with exit code -9 (SIGKILL), before an optimizer step was seen"
OUT_OF_MEMORY = "because memory had run out (oom_kill of its control group rose by 1)"


@pytest.mark.fault("kernel kills a process to free memory")
@pytest.mark.parametrize(
    ("failed", "kills", "log", "kind", "said"),
    [
        (crash(1, 1.0, KILLED), 1, "", "out_of_memory", OUT_OF_MEMORY),
        (crash(1, 1.0, KILLED), 0, "", "crash", "was seen"),
        (crash(1, 1.0, "exit code 1"), 1, "", "crash", "exit code 1"),
        *(  # only a log shows the kill
            (COMMAND_FAILED, 1, log, "out_of_memory", OUT_OF_MEMORY)
            for log in (
                "E1121 failed (exitcode: -9) local_rank: 1 (pid: 7)",
                "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
                "Signal 9 (SIGKILL) received by PID 7",
            )
        ),
    ],
)
def test_oom_killed_rank_ran_out_of_memory(
    tmp_path: Path, failed: Failure, kills: int, log: str, kind: str, said: str
) -> None:
    run_dir = write_launch(tmp_path, *[make_report(0)] * (not log))
    documents.write(run_dir.launch(0), LaunchFile(node=0, failures=(failed,), oom_kills=kills))
    run_dir.agent_log(0).write_text(f"{log}\n")
    failure = failure_of(collected(run_dir))
    assert failure.kind == kind
    assert failure.message.startswith(failed.message)
    assert failure.message.endswith(said)


def test_oom_kill_elsewhere_explains_nothing(tmp_path: Path) -> None:
    case = make_case(topology={"nodes": 2, "processes_per_node": 1})
    run_dir = write_launch(tmp_path, make_report(0), case=case)
    documents.write(run_dir.launch(0), LaunchFile(node=0, oom_kills=1))
    documents.write(run_dir.launch(1), LaunchFile(node=1, failures=(crash(1, 1.0, KILLED),)))
    assert failure_of(collected(run_dir)).kind == "crash"


def write_calls(run_dir: RunDir) -> None:
    """Write files in which rank 0 waits for rank 1 in an all-reduce."""
    for rank in (0, 1):
        call = CollectiveCall(number=4 - rank, name="all_reduce", is_done=rank == 1, age_s=120)
        group = GroupCalls(backend="gloo", name="0", description="default_pg", ranks=(0, 1), calls=(call,))
        file = CollectiveCallsFile(rank=rank, world_size=2, groups=(group,))
        documents.write(run_dir.collectives(rank), file)


LACKS = "rank 1 has not called all_reduce 4 of group default_pg, in which rank 0 has waited for 120 s"


def test_a_hang_is_explained_by_the_calls(tmp_path: Path) -> None:
    write_calls(RunDir(tmp_path))
    assert cause(tmp_path, failure=TIMEOUT).message == f"{TIMEOUT.message}: {LACKS}"


def test_calls_do_not_explain_another_failure(tmp_path: Path) -> None:
    write_calls(RunDir(tmp_path))
    assert cause(tmp_path, *failed(crash(1, 1.0, OTHER)), failure=TIMEOUT).message == OTHER


# The stacks of a job that hangs

TORCH = "/lib/torch/distributed/distributed_c10d.py"
HEAD = "Thread (most recent call first):"


def stack(file: str, *, address: int = 1) -> str:
    """Return a stack like those of faulthandler: another thread comes first, and the main thread last."""
    frames = f'  File "{file}", line 0 in waits\n'
    helper = 'Thread 0x00007fab (most recent call first):\n  File "/lib/threading.py", line 1 in helps\n'
    return f"{helper}\nCurrent thread 0x{address:08x} (most recent call first):\n{frames}"


def shown(directory: Path, *places: tuple[int | None, str]) -> str:
    """Return the report about processes with these ranks and stacks. Their process ids start at 99."""
    directory.mkdir(exist_ok=True)
    for pid, (rank, text) in enumerate(places, 99):
        RunDir(directory).stacks(rank, pid).write_text(text)
    return read_stacks(RunDir(directory))


@pytest.mark.parametrize(
    ("places", "heads"),
    [
        (
            [
                *((None, stack("launcher.py")), (2, stack("train.py")), (None, "")),
                *((rank, stack(TORCH, address=rank)) for rank in (0, 1, 3)),
            ],
            ["rank 2", "rank 0, rank 1, rank 3", "process 99"],
        ),
        ([(0, stack("train.py")), (1, stack(TORCH))], ["rank 0", "rank 1"]),
        *(
            ([(0, stack(TORCH)), (1, other)], ["rank 1", "rank 0"])
            for other in (
                stack("train.py"),
                f'{HEAD}\n  File "train.py", line 1\n  File "{TORCH}", line 2',
                HEAD,
            )
        ),
        (
            [(None, stack("a.py")), (0, stack("a.py")), *((rank, stack("b.py")) for rank in (1, 2, 3))],
            ["rank 1, rank 2, rank 3", "process 99, rank 0"],
        ),
    ],
)
def test_the_odd_rank_not_waiting_comes_first(
    tmp_path: Path, places: list[tuple[int | None, str]], heads: list[str]
) -> None:
    lines = [line for line in shown(tmp_path, *places).splitlines() if line.endswith("stopped at:")]
    assert lines == [f"{head} stopped at:" for head in heads]


def test_every_thread_is_shown_the_main_one_first(tmp_path: Path) -> None:
    head = "(most recent call first):"
    assert shown(tmp_path, (0, stack("train.py"))) == (
        f'rank 0 stopped at:\nCurrent thread {head}\n  File "train.py", line 0 in waits\n'
        f'thread {head}\n  File "/lib/threading.py", line 1 in helps'
    )


def test_the_thread_that_writes_calls_is_not_shown(tmp_path: Path) -> None:
    """Ranks whose training threads are at the same place are shown together.

    Their call-writing threads may be at different places.
    """
    texts = [
        f'Thread 0x{rank:08x} (most recent call first):\n  File "/x/perfsuite/worker/flight_recorder.py", '
        f"line {rank} in _serve\n\n{stack('train.py')}"
        for rank in (1, 2)
    ]
    printed = shown(tmp_path, *enumerate(texts))
    assert printed.startswith("rank 0, rank 1 stopped at:\nCurrent thread")
    assert "_serve" not in printed


def test_a_hang_in_the_rendezvous_shows_its_stack(tmp_path: Path) -> None:
    """perfsuite's wrapper of `init_process_group` is one of the frames."""
    watched = '  File "/x/perfsuite/worker/flight_recorder.py", line 52 in watched\n'
    place = stack("rendezvous.py")
    head, _, frames = place.rpartition("Current thread (most recent call first):\n")
    text = f"{head}Current thread (most recent call first):\n{frames}\n{watched}"
    assert "rendezvous.py" in shown(tmp_path, (0, text))


@pytest.mark.parametrize("count", [0, 8, 9])
def test_shows_at_most_eight_stacks(tmp_path: Path, count: int) -> None:
    places = [(rank, stack(f"train_{rank}.py")) for rank in range(count)]
    lines = shown(tmp_path / "places", *places, (99, "")).splitlines()
    assert sum(line.endswith("stopped at:") for line in lines) == min(count, 8)
    more = [f"and 1 more places: see {tmp_path / 'places'}"] if count > 8 else []
    assert lines[len(lines) - len(more) :] == more


@pytest.mark.parametrize(("length", "rest"), [(40, "\nline 39"), (41, "\nline 39\n  ...")], ids=["40", "41"])
def test_shows_at_most_forty_lines_of_a_stack(tmp_path: Path, length: int, rest: str) -> None:
    long = "\n".join(f"line {line}" for line in range(length))
    assert shown(tmp_path, (0, long)).endswith(rest)
