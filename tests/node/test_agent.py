from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile, LoRA, Topology
from perfsuite.case.model import Model
from perfsuite.errors import LaunchError
from perfsuite.frameworks.base import Command
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.script import Script
from perfsuite.node import agent, cpu, health_sampler, rendezvous
from perfsuite.node.agent import AgentJob
from perfsuite.node.health_sampler import Sampler
from perfsuite.node.lease import Lease
from perfsuite.node.processes import JOB_MARK
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import MODEL_CODE, RUN_DIR, RunDir
from perfsuite.worker import leash
from tests.node.fake_nvml import Nvml
from tests.samples import make_case


@pytest.mark.parametrize(
    ("request_changes", "case_changes", "modules"),
    [
        ({}, {"model": "gpt2-tiny"}, "transformers.models.gpt2.modeling_gpt2"),
        ({}, {"model": "mamba-tiny"}, "transformers.models.mamba.modeling_mamba"),
        ({}, {"lora": LoRA(rank=4, alpha=8)}, "transformers.models.gpt2.modeling_gpt2 peft"),
        ({"device": "cuda"}, {}, None),
        ({"preflight": True}, {}, None),
        ({}, {"model": Model.named("net")}, None),
    ],
)
def test_the_fork_server_of_a_cpu_loads_the_models_code(
    request_changes: dict[str, Any], case_changes: dict[str, Any], modules: str | None
) -> None:
    case = make_case(framework=DDP(), **case_changes)
    request = CaseFile(case=case, device="cpu").replace(**request_changes)
    assert agent._model_code(request) == ({} if modules is None else {MODEL_CODE: modules})


def test_a_rank_of_a_script_has_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun --nproc-per-node 2` sets these (torch's docs, "torchrun", "Environment Variables")."""
    place = AgentJob(RunDir(Path("d")), CaseFile(case=SCRIPT, device="cpu"))
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, "3")
    assert agent._rank(place, 0)[name] == "3", "a user's own"
    monkeypatch.delenv(name)
    assert agent._rank(place, 1) == {
        "LOCAL_RANK": "1",
        "RANK": "1",
        "GROUP_RANK": "0",
        "ROLE_RANK": "1",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "perfsuite",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "exit code -9 (SIGKILL)"),
        (-15, "exit code -15 (SIGTERM)"),
    ],
)
def test_an_exit_code_names_its_signal(code: int, words: str) -> None:
    assert agent._exit_code(code) == words


SCRIPT = make_case(framework=Script(path="train.py"), topology=Topology(processes_per_node=2))
REPORT = RankReport(rank=0, world_size=2, host="here", clock="perf_counter")


class Process:
    """A rank that ends with a code when it has been polled so many times; None: never by itself."""

    def __init__(self, code: int | None, *, after: int = 0) -> None:
        self.code, self.polls, self.was_killed = code, after, False

    def poll(self) -> int | None:
        self.polls -= 1
        return None if self.polls >= 0 else self.code

    def kill(self) -> None:
        self.was_killed = True


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that were slept, which did not pass."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    return slept


def wait(run_dir: RunDir, *ranks: Process) -> list[Failure]:
    running: dict[int, Any] = dict(enumerate(ranks))
    place = AgentJob(run_dir, CaseFile(case=SCRIPT, device="cpu"))
    say = partial(agent._script_ended, place)
    told: list[int] = []
    failures = agent._wait(running, Process.poll, place, say, lambda so_far: told.append(len(so_far)))
    assert told == list(range(1, len(failures) + 1)), "each at once: srun may end this agent before its ranks"
    return failures


def test_ranks_that_have_reported_may_take_their_time(tmp_path: Path, passing: list[float]) -> None:
    run_dir = RunDir(tmp_path)
    for rank in (0, 1):
        documents.write(run_dir.rank(rank), REPORT.replace(rank=rank))
    late = Process(0, after=400)
    assert wait(run_dir, Process(0), late) == []
    assert not late.was_killed
    assert sum(passing) > 3 * agent.GRACE_S


def test_where_one_has_failed_the_others_have_some_seconds_to_say_why(
    tmp_path: Path, passing: list[float]
) -> None:
    hangs = Process(None)
    failures = wait(RunDir(tmp_path), Process(3), hangs)
    assert hangs.was_killed
    assert sum(passing) == pytest.approx(agent.GRACE_S, abs=2 * agent.POLL_S)
    assert [(failure.rank, failure.message) for failure in failures] == [
        (0, "the script ended with exit code 3, before an optimizer step could be seen")
    ]


def test_who_ends_well_without_a_report_has_not_trained(tmp_path: Path, passing: list[float]) -> None:
    failures = wait(RunDir(tmp_path), Process(0), Process(0))
    assert [failure.message for failure in failures] == 2 * [
        "the script ended with exit code 0, before an optimizer step could be seen: it does not train, or "
        "not with an optimizer of torch, or in a process that it starts (give it as command=(...) then)"
    ]


@pytest.mark.parametrize(
    ("code", "why"),
    [(-9, ""), (3, ""), (0, ": not as Python ends, or perfsuite would have reported (os._exit?)")],
)
def test_who_ends_without_a_report_is_told_with_the_steps_that_were_seen(
    tmp_path: Path, passing: list[float], code: int, why: str
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.progress.write_text("10 256")
    (failure,) = wait(run_dir, Process(code))
    assert failure.message == (
        f"the script ended with {agent._exit_code(code)}, when rank 0 had finished at least 10 of "
        f"{SCRIPT.total_steps} optimizer steps{why}"
    )


@pytest.mark.fault("rank does not end")
def test_a_rank_that_stays_after_every_report_is_killed_and_told(
    tmp_path: Path, passing: list[float]
) -> None:
    """It ignores the signal by which the kernel would end it."""
    run_dir = RunDir(tmp_path)
    for rank in (0, 1):
        documents.write(run_dir.rank(rank), REPORT.replace(rank=rank))
    stays = Process(None)
    failures = wait(run_dir, Process(0), stays)
    assert stays.was_killed
    assert [(failure.rank, failure.message) for failure in failures] == [(1, f"it {agent.STAYED}")]
    assert sum(passing) == pytest.approx(agent.STAY_S, abs=2 * agent.POLL_S)


def test_a_rank_may_stay_as_long_as_it_takes_while_another_has_not_reported(
    tmp_path: Path, passing: list[float]
) -> None:
    documents.write(RunDir(tmp_path).rank(0), REPORT)
    late = Process(0, after=2000)
    assert wait(RunDir(tmp_path), late) == []
    assert not late.was_killed
    assert sum(passing) > 2 * agent.STAY_S


class OfADeadServer:
    """A rank that is forked from a server that is gone: it does not start, or nobody knows how it ended."""

    exitcode = 255
    pid = 1
    starts = True

    def __init__(self, target: Any, args: Any) -> None:
        pass

    def start(self) -> None:
        if not self.starts:
            raise EOFError("unexpected EOF")

    def kill(self) -> None:
        pass


@pytest.mark.fault("server of the forks is killed")
@pytest.mark.parametrize("starts", [True, False])
def test_a_fork_server_that_was_killed_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: list[float], starts: bool
) -> None:
    place = AgentJob(RunDir(tmp_path), CaseFile(case=SCRIPT, device="cpu"))
    monkeypatch.setattr(OfADeadServer, "starts", starts)
    kind: Any = OfADeadServer
    with subprocess.Popen(["sleep", "1000"]) as server:
        monkeypatch.setattr(forkserver, "_forkserver", SimpleNamespace(_forkserver_pid=server.pid))
        if starts:
            assert [each.message for each in agent._fork(place, kind, {}, lambda failures: None)] == [
                "exit code 255",
                "exit code 255",
            ], "the ranks' own"
        else:
            with pytest.raises(EOFError):
                agent._fork(place, kind, {}, lambda failures: None)
        server.kill()
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        (failure,) = agent._fork(place, kind, {}, lambda failures: None)
    assert (failure.kind, failure.rank) == ("error", None)
    assert failure.message == (
        "the server from which ranks are forked (multiprocessing's) ended with exit code -9 (SIGKILL)"
    )


@pytest.mark.parametrize(
    ("code", "is_reported", "message"),
    [(13, False, "exit code 13"), (3, True, "exit code 3"), (0, True, None), (0, False, None)],
)
def test_how_a_rank_of_our_own_ended_is_told(code: int, is_reported: bool, message: str | None) -> None:
    """That it left no report the driver sees."""
    assert agent._rank_ended(code, is_reported) == message


def test_a_rank_that_reported_and_then_failed_is_told_by_its_exit_code(
    tmp_path: Path, passing: list[float]
) -> None:
    run_dir = RunDir(tmp_path)
    for rank in (0, 1):
        documents.write(run_dir.rank(rank), REPORT.replace(rank=rank))
    failures = wait(run_dir, Process(0), Process(-11))
    assert [(failure.rank, failure.message) for failure in failures] == [(1, "exit code -11 (SIGSEGV)")]


def test_a_rank_that_reported_a_failure_leaves_the_others_some_seconds(
    tmp_path: Path, passing: list[float]
) -> None:
    run_dir = RunDir(tmp_path)
    documents.write(run_dir.rank(0), REPORT.replace(failure=Failure(kind="mismatch", message="m")))
    hangs = Process(None)
    assert wait(run_dir, Process(0), hangs) == [], "its report says why"
    assert hangs.was_killed


def run(command: Command, run_dir: RunDir) -> list[Failure]:
    return agent._run(command, AgentJob(run_dir, CaseFile(case=SCRIPT, device="cpu")), lambda failures: None)


def python(code: str, directory: Path, *, starts_ranks: bool = True) -> Command:
    return Command(
        words=(sys.executable, "-S", "-c", code), directory=str(directory), starts_ranks=starts_ranks
    )


def test_a_command_finds_the_launch_and_our_startup_and_this_python_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leash, "die_with_parent", lambda: None)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    run_dir = RunDir(tmp_path)
    names = ("PYTHONPATH", "PATH", RUN_DIR)
    told = tmp_path / "files" / "told"
    told.parent.mkdir()
    code = f"import os, sys; open(sys.argv[1], 'w').write('\\n'.join(os.environ[n] for n in {names}))"
    command = python(code, tmp_path)
    command = Command(words=(*command.words, "{launch_dir}/told"), directory=str(tmp_path), starts_ranks=True)
    run(command, run_dir)
    python_path, path, directory = told.read_text().split("\n")
    startup, theirs = python_path.split(os.pathsep)
    assert (Path(startup) / "sitecustomize.py").exists()
    assert theirs == "/theirs"
    assert path.split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert directory == str(tmp_path)


@pytest.mark.parametrize(
    ("code", "is_reported", "message"),
    [
        ("", True, None),
        (
            "",
            False,
            "the command ended with exit code 0, before an optimizer step could be seen: it does not train, "
            "or not with an optimizer of torch",
        ),
        ("raise SystemExit(3)", True, "the command ended with exit code 3"),
        (
            "raise SystemExit(3)",
            False,
            "the command ended with exit code 3, before an optimizer step could be seen",
        ),
    ],
)
def test_how_a_command_ended_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, is_reported: bool, message: str | None
) -> None:
    monkeypatch.setattr(leash, "die_with_parent", lambda: None)
    run_dir = RunDir(tmp_path)
    if is_reported:
        documents.write(run_dir.rank(0), REPORT)
    failures = run(python(code, tmp_path), run_dir)
    assert [(failure.kind, failure.message) for failure in failures] == (
        [] if message is None else [("crash", message)]
    )


def test_each_rank_of_a_script_is_started_with_its_number_log_and_a_free_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leash, "die_with_parent", lambda: None)
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')))"
    run_dir = RunDir(tmp_path)
    failures = run(python(code, tmp_path, starts_ranks=False), run_dir)
    assert [failure.rank for failure in failures] in ([0, 1], [1, 0]), "none of them trains"
    said = [run_dir.rank_log(rank).read_text().split() for rank in (0, 1)]
    assert [each[:2] for each in said] == [["0", "2"], ["1", "2"]]
    assert said[0][2] == said[1][2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(said[0][2])))


def test_the_mark_and_the_descendants_are_what_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[Any] = []
    monkeypatch.setattr(agent, "sweep", lambda mark, pid, spare: swept.append((mark, pid)))
    monkeypatch.delenv(JOB_MARK, raising=False)
    agent._sweep()
    monkeypatch.setenv(JOB_MARK, "mine")
    agent._sweep()
    assert swept == [(None, os.getpid()), ("mine", os.getpid())]


ORPHANS = """
import os, subprocess, time, psutil
from perfsuite.node import agent
from perfsuite.worker import leash
leash.adopt_orphans()
own = subprocess.Popen(["sh", "-c", "read word; exit 3"], stdin=subprocess.PIPE)
ours = agent._children()
for _ in range(3):
    subprocess.run(["sh", "-c", "sleep 0.1 & exit 0"])
us = psutil.Process()
adopted = len(us.children()) - 1
while len(us.children()) > 1:
    agent._bury(ours)
    time.sleep(0.01)
own.stdin.close()
while us.children()[0].status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
agent._bury(ours)
print(adopted > 0, own.wait())
"""


def test_orphans_that_have_ended_are_let_go_and_the_ranks_end_stays_known() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True 3\n"


def test_a_signal_ends_the_job_and_then_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(agent, "_sweep", lambda: ended.append("swept"))
    monkeypatch.setattr(os, "_exit", ended.append)
    agent._end_the_job(signal.SIGTERM, None)
    assert ended == ["swept", 143]


def test_an_agent_that_is_told_to_end_ends_well_however_long_its_ranks_take_to_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another exit status srun would end the nodes that still write the stacks of their ranks."""
    ranks_are_killed, ended = threading.Event(), threading.Event()
    codes: list[int] = []

    def launch(place: AgentJob, tell: agent.Tell) -> list[Failure]:
        ranks_are_killed.wait()
        killed = [Failure(kind="crash", message="exit code -9 (SIGKILL)", rank=0)]
        tell(killed)
        return killed

    def sweep() -> None:
        ranks_are_killed.set()
        time.sleep(0.3)  # a rank on a GPU is not gone at once

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    class Lease:
        def __init__(self, file: Path, on_end: Any, on_lost: Any) -> None:
            self.hold = threading.Thread(target=on_end, daemon=True).start

    monkeypatch.setattr(agent, "Lease", Lease)
    monkeypatch.setattr(agent, "_launch", launch)
    monkeypatch.setattr(agent, "_sweep", sweep)
    monkeypatch.setattr(os, "_exit", end)
    place = AgentJob(RunDir(tmp_path), CaseFile(case=SCRIPT, device="cpu"))
    returned: list[Any] = []
    threading.Thread(target=lambda: returned.append(agent._watched(place)), daemon=True).start()
    assert ended.wait(20)
    assert (codes, returned) == ([0], [])
    assert documents.read(place.run_dir.launch(0), LaunchFile).failures == ()


def test_a_failure_is_on_disk_while_other_ranks_run_and_its_node_is_not_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = AgentJob(RunDir(tmp_path), CaseFile(case=SCRIPT, device="cpu"))
    crash = Failure(kind="crash", message="exit code -9 (SIGKILL)", rank=0, at=1.0)
    seen: list[LaunchFile] = []

    def launch(place: AgentJob, tell: agent.Tell) -> list[Failure]:
        tell([crash])
        seen.append(documents.read(place.run_dir.launch(0), LaunchFile))
        assert not agent._is_over(place, 0)
        return [crash]

    monkeypatch.setattr(Lease, "hold", lambda self: None)
    monkeypatch.setattr(agent, "_launch", launch)
    assert agent._watched(place) == [crash]
    assert seen[0].failures == (crash,)
    assert agent._is_over(place, 0)


@pytest.mark.parametrize(("nodes", "where"), [(1, ""), (2, f"{socket.gethostname()}: ")])
def test_what_stops_an_agent_is_a_failure_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, where: str
) -> None:
    case = SCRIPT.replace(topology=Topology(nodes=nodes, processes_per_node=1))
    place = AgentJob(RunDir(tmp_path), CaseFile(case=case, device="cpu"))

    def launch(place: AgentJob, tell: agent.Tell) -> NoReturn:
        raise LaunchError("node 0 has not told")

    monkeypatch.setattr(Lease, "hold", lambda self: None)
    monkeypatch.setattr(agent, "_launch", launch)
    with pytest.raises(LaunchError):
        agent._watched(place)
    (failure,) = documents.read(place.run_dir.launch(0), LaunchFile).failures
    assert (failure.kind, failure.message) == ("error", f"{where}LaunchError: node 0 has not told")


def test_ranks_are_bound_to_the_cores_near_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that perfsuite forks and those that it starts as a user's command; not what starts its own."""

    class Process:
        pids = iter((71, 72))

        def __init__(self, **_: Any) -> None:
            self.pid = next(self.pids)

        def start(self) -> None:
            pass

    def launch(place: AgentJob, tell: agent.Tell) -> list[Failure]:
        places.append(place)
        return []

    bound: list[tuple[int, frozenset[int]]] = []
    places: list[AgentJob] = []
    two_sockets = Nvml(*({"nvmlDeviceGetCpuAffinity": (mask,)} for mask in ([0b0011], [0b1100])))
    monkeypatch.setattr(Lease, "hold", lambda self: None)
    monkeypatch.setattr(health_sampler, "sampler", lambda *_: Sampler(devices=2, nvml=two_sockets))
    monkeypatch.setattr(agent, "_launch", launch)
    agent._watched(AgentJob(RunDir(tmp_path), CaseFile(case=SCRIPT, device="cuda")))

    monkeypatch.setattr(cpu, "bind", lambda pid, cores: bound.append((pid, cores)))
    monkeypatch.setattr(agent, "_wait", lambda *_: [])
    monkeypatch.setattr(rendezvous, "meeting", lambda *_: contextlib.nullcontext({}))
    monkeypatch.setattr(agent, "_start", lambda *_: Process())
    near = [frozenset({0, 1}), frozenset({2, 3})]
    agent._fork(places[0], cast(type[BaseProcess], Process), {}, lambda failures: None)
    assert bound == [(71, near[0]), (72, near[1])]
    Process.pids = iter((81, 82))
    command = Command(words=("train",), directory=".", starts_ranks=False)
    agent._run(command, places[0], lambda failures: None)
    assert bound[2:] == [(81, near[0]), (82, near[1])]


def test_an_agent_ends_though_it_cannot_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def print_(*words: str, flush: bool) -> None:
        raise OSError("no space left on the disk of the log")

    def sweep() -> None:
        ended.append("swept")
        raise LaunchError("a process cannot be killed")

    ended: list[Any] = []
    monkeypatch.setattr("builtins.print", print_)
    monkeypatch.setattr(agent, "_sweep", sweep)
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(LaunchError):
        agent._end("the driver is gone")
    assert ended == ["swept", 1]


@pytest.mark.parametrize(("after", "waited"), [(0, 0), (3, 3 * agent.POLL_S), (float("inf"), agent.PEERS_S)])
def test_a_node_that_ends_the_job_waits_for_the_stacks_of_the_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: list[float], after: float, waited: float
) -> None:
    """Ranks end when those of another node are killed, and then they write no stacks."""
    case = SCRIPT.replace(topology=Topology(nodes=2, processes_per_node=1))
    place = AgentJob(RunDir(tmp_path), CaseFile(case=case, device="cpu"), node=1)
    documents.write(place.run_dir.launch(1), LaunchFile())

    def sleep(seconds: float) -> None:
        passing.append(seconds)
        if len(passing) >= after:
            documents.write(place.run_dir.launch(0), LaunchFile())

    monkeypatch.setattr(time, "sleep", sleep)
    if not after:
        documents.write(place.run_dir.launch(0), LaunchFile())
    agent._wait_for_peers(place)
    assert sum(passing) == pytest.approx(waited, abs=1.01 * agent.POLL_S)


def test_a_file_of_the_repository_is_that_of_the_worktree(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "/repo/train.py",
        "/repository/train.py",
        "--out=/repo/x",
        "train.py",
        "/repo/.venv/bin/python",
        "/repo/.perfsuite/arms/abc",
        "/repo/.perfsuite/arms/abc/train.py",
    )
    assert [agent._moved(word) for word in words] == list(words), "without an arm of another commit"
    monkeypatch.setenv("PERFSUITE_MOVED", "/repo:/repo/.perfsuite/arms/abc")
    monkeypatch.setattr(sys, "prefix", "/repo/.venv")
    moved = [agent._moved(word) for word in words]
    assert moved == ["/repo/.perfsuite/arms/abc/train.py", *words[1:]]
    assert agent._moved("/repo") == "/repo/.perfsuite/arms/abc", "the directory that a script starts in"


def test_a_repository_below_the_interpreters_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setenv("PERFSUITE_MOVED", "/usr/src/app:/tmp/arms/abc")
    assert agent._moved("/usr/src/app/train.py") == "/tmp/arms/abc/train.py"
    assert agent._moved("/usr/bin/python") == "/usr/bin/python"
