from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile, LoRA, Topology
from perfsuite.case.model import Model
from perfsuite.frameworks.base import Command
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.script import Script
from perfsuite.node import cpu, ranks, rendezvous
from perfsuite.node.processes import POLL_S
from perfsuite.node.ranks import AgentJob
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run_dir import MODEL_CODE, RUN_DIR, RunDir
from perfsuite.worker import leash
from tests.node.conftest import Passing
from tests.samples import make_case

SCRIPT = make_case(framework=Script(path="train.py"), topology=Topology(processes_per_node=2))
TORCHRUN = """
LOCAL_RANK=1 RANK=1 GROUP_RANK=0 ROLE_RANK=1 ROLE_NAME=default
LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 GROUP_WORLD_SIZE=1 ROLE_WORLD_SIZE=2
TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RUN_ID=perfsuite
TORCHELASTIC_USE_AGENT_STORE=False TORCH_NCCL_ASYNC_ERROR_HANDLING=1
"""
"""Of the second rank of `torchrun --nproc-per-node 2` (torch's docs, "torchrun", "Environment Variables")."""
REPORT = RankReport(rank=0, world_size=2, host="here", clock="perf_counter")
UNSEEN = "before an optimizer step could be seen"
UNTRAINED = ": it does not train, or not with an optimizer of torch"


@pytest.fixture
def job(tmp_path: Path) -> AgentJob:
    return AgentJob(RunDir(tmp_path), CaseFile(case=SCRIPT, device="cpu"))


@pytest.fixture
def _untied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started does not die with the thread of the test."""
    monkeypatch.setattr(leash, "die_with_parent", lambda: None)


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
    assert ranks._model_code(request) == ({} if modules is None else {MODEL_CODE: modules})


def test_a_rank_of_a_script_has_torchruns_variables(job: AgentJob, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, "3")
    assert ranks._variables(job, 0)[name] == "3", "a user's own"
    monkeypatch.delenv(name)
    assert ranks._variables(job, 1) == dict(each.split("=") for each in TORCHRUN.split())


class Process(subprocess.Popen[bytes]):
    """A rank of a script that ends with a code when polled so many times; None: never by itself."""

    def __init__(self, code: int | None, after: int = 0) -> None:
        self.code, self.polls, self.was_killed = code, after, False

    def poll(self) -> int | None:
        self.polls -= 1
        return None if self.polls >= 0 else self.code

    def kill(self) -> None:
        self.was_killed = True


def wait(job: AgentJob, *started: Process) -> list[tuple[int | None, str]]:
    told: list[int] = []
    job = replace(job, tell=lambda so_far: told.append(len(so_far)))
    failures = ranks._wait(job, dict(enumerate(started)))
    assert told == list(range(1, len(failures) + 1)), "each at once: this agent may be ended before its ranks"
    assert {failure.kind for failure in failures} <= {"crash"}
    return [(failure.rank, failure.message) for failure in failures]


BOTH = (REPORT, REPORT.replace(rank=1))
FAILED = REPORT.replace(failure=Failure(kind="mismatch", message="m"))


@pytest.mark.parametrize(
    ("reports", "first", "second", "told", "seconds"),
    [
        (BOTH, (0,), (0, 400), [], 400 * POLL_S),
        (BOTH, (0,), (-11,), [(1, "exit code -11 (SIGSEGV)")], POLL_S),
        ((), (3,), (None,), [(0, f"the script ended with exit code 3, {UNSEEN}")], ranks.GRACE_S),
        ((FAILED,), (0,), (None,), [], ranks.GRACE_S),  # its report says why
        # It ignores the signal by which the kernel would end it.
        pytest.param(
            *(BOTH, (0,), (None,), [(1, f"it {ranks.STAYED}")], ranks.STAY_S),
            marks=pytest.mark.fault("rank does not end"),
        ),
    ],
    ids=["slow", "crashes at its end", "other fails", "other reports a failure", "stays"],
)
def test_a_rank_is_waited_for_as_long_as_it_may_take_and_then_killed(
    job: AgentJob, passing: Passing, reports: Any, first: Any, second: Any, told: Any, seconds: float
) -> None:
    """Where one has failed the others have some seconds to say why."""
    job.run_dir.progress.touch()  # as the driver makes it
    for report in reports:
        documents.write(job.run_dir.rank(report.rank), report)
    other = Process(*second)
    assert wait(job, Process(*first), other) == told
    assert other.was_killed == (None in second)
    assert passing.seconds == pytest.approx(seconds, abs=2 * POLL_S)


@pytest.mark.usefixtures("passing")
def test_who_ends_without_a_report_is_told_with_the_steps_that_were_seen(job: AgentJob) -> None:
    child = ", or in a process that it starts (give it as command=(...) then)"
    message = f"the script ended with exit code 0, {UNSEEN}{UNTRAINED}{child}"
    assert wait(job, Process(0), Process(0)) == [(0, message), (1, message)]
    job.run_dir.progress.write_text("10 256")
    seen = f"when rank 0 had finished at least 10 of {SCRIPT.total_steps} optimizer steps"
    for code, said, why in (
        (-9, "exit code -9 (SIGKILL)", ""),
        (3, "exit code 3", ""),
        (0, "exit code 0", ": not as Python ends, or perfsuite would have reported (os._exit?)"),
    ):
        assert wait(job, Process(code)) == [(0, f"the script ended with {said}, {seen}{why}")]


@pytest.mark.usefixtures("passing")
def test_a_command_that_stays_after_every_report_is_told(job: AgentJob) -> None:
    for report in BOTH:
        documents.write(job.run_dir.rank(report.rank), report)
    (failure,) = ranks._wait(job, {None: Process(None)})
    assert (failure.message, failure.rank) == (f"the command {ranks.STAYED}", None)


def test_a_rank_may_stay_as_long_as_it_takes_while_another_has_not_reported(
    job: AgentJob, passing: Passing
) -> None:
    documents.write(job.run_dir.rank(0), REPORT)
    late = Process(0, after=2000)
    assert wait(job, late) == []
    assert not late.was_killed
    assert passing.seconds > 2 * ranks.STAY_S


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


@pytest.mark.fault("server of the forks is killed")
@pytest.mark.parametrize("starts", [True, False])
def test_a_fork_server_that_was_killed_is_the_cause(
    job: AgentJob, monkeypatch: pytest.MonkeyPatch, passing: Passing, starts: bool
) -> None:
    monkeypatch.setattr(OfADeadServer, "starts", starts)
    kind: Any = OfADeadServer
    with subprocess.Popen(["sleep", "1000"]) as server:
        monkeypatch.setattr(forkserver, "_forkserver", SimpleNamespace(_forkserver_pid=server.pid))
        with contextlib.nullcontext() if starts else pytest.raises(EOFError):
            assert [each.message for each in ranks._fork(job, kind, {})] == 2 * ["exit code 255"]
        server.kill()
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        (failure,) = ranks._fork(job, kind, {})
    assert (failure.kind, failure.rank) == ("error", None)
    assert failure.message == (
        "the server from which ranks are forked (multiprocessing's) ended with exit code -9 (SIGKILL)"
    )


def test_how_a_rank_of_our_own_ended_is_told(job: AgentJob) -> None:
    """That it left no report the driver sees."""
    for _ in range(2):
        assert ranks._failure(job, 0, 13, is_script=False) == "exit code 13"
        assert ranks._failure(job, 0, 0, is_script=False) is None
        documents.write(job.run_dir.rank(0), REPORT)


def python(code: str, *words: str, starts_ranks: bool = True) -> Command:
    return Command(words=(sys.executable, "-S", "-c", code, *words), directory="/", starts_ranks=starts_ranks)


@pytest.mark.usefixtures("_untied")
def test_a_command_finds_the_launch_and_our_startup_and_this_python_first(
    job: AgentJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    names = ("PYTHONPATH", "PATH", RUN_DIR)
    job.run_dir.files.mkdir()
    code = f"import os, sys; open(sys.argv[1], 'w').write('\\n'.join(os.environ[n] for n in {names}))"
    ranks._run(python(code, "{launch_dir}/told"), job)
    python_path, path, directory = (job.run_dir.files / "told").read_text().split("\n")
    startup, theirs = python_path.split(os.pathsep)
    assert (Path(startup) / "sitecustomize.py").exists()
    assert theirs == "/theirs"
    assert path.split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert directory == str(job.run_dir.path)


@pytest.mark.usefixtures("_untied")
@pytest.mark.parametrize(
    ("code", "is_reported", "message"),
    [
        ("", True, None),
        ("", False, f"exit code 0, {UNSEEN}{UNTRAINED}"),
        ("raise SystemExit(3)", True, "exit code 3"),
        ("raise SystemExit(3)", False, f"exit code 3, {UNSEEN}"),
    ],
)
def test_how_a_command_ended_is_told(
    job: AgentJob, code: str, is_reported: bool, message: str | None
) -> None:
    if is_reported:
        documents.write(job.run_dir.rank(0), REPORT)
    said = [(failure.kind, failure.message) for failure in ranks._run(python(code), job)]
    assert said == ([] if message is None else [("crash", f"the command ended with {message}")])


@pytest.mark.usefixtures("_untied")
def test_each_rank_of_a_script_is_started_with_its_number_log_and_a_free_port(job: AgentJob) -> None:
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')))"
    failures = ranks._run(python(code, starts_ranks=False), job)
    assert [failure.rank for failure in failures] in ([0, 1], [1, 0]), "none of them trains"
    said = [job.run_dir.rank_log(rank).read_text().split() for rank in (0, 1)]
    assert [each[:2] for each in said] == [["0", "2"], ["1", "2"]]
    assert said[0][2] == said[1][2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(said[0][2])))


ORPHANS = """
import subprocess, time, psutil
from perfsuite.node import ranks
from perfsuite.worker import leash
leash.adopt_orphans()
own = subprocess.Popen(["sh", "-c", "read word; exit 3"], stdin=subprocess.PIPE)
ours = ranks._children()
for _ in range(3):
    subprocess.run(["sh", "-c", "sleep 0.1 & exit 0"])
us = psutil.Process()
adopted = len(us.children()) - 1
while len(us.children()) > 1:
    ranks._bury(ours)
    time.sleep(0.01)
own.stdin.close()
while us.children()[0].status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
ranks._bury(ours)
print(adopted > 0, own.wait())
"""


def test_orphans_that_have_ended_are_let_go_and_the_ranks_end_stays_known() -> None:
    words = [sys.executable, "-c", ORPHANS]
    assert subprocess.run(words, capture_output=True, timeout=60, check=True).stdout == b"True 3\n"


def test_ranks_are_bound_to_the_cores_near_their_gpus(job: AgentJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that perfsuite forks and those that it starts as a user's command; not what starts its own."""
    pids = iter((71, 72, 81, 82))
    bound: list[tuple[int, frozenset[int]]] = []
    monkeypatch.setattr(cpu, "bind", lambda pid, cores: bound.append((pid, cores)))
    monkeypatch.setattr(ranks, "_wait", lambda *_: [])
    monkeypatch.setattr(rendezvous, "meeting", lambda *_: contextlib.nullcontext({}))

    def process(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(pid=next(pids), start=lambda: None)

    monkeypatch.setattr(ranks, "_start", process)
    near = (frozenset({0, 1}), frozenset({2, 3}))
    job = replace(job, near_cores=near)
    kind: Any = process
    ranks._fork(job, kind, {})
    ranks._run(Command(words=("train",), directory=".", starts_ranks=False), job)
    assert bound == [(71, near[0]), (72, near[1]), (81, near[0]), (82, near[1])]


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
    assert [ranks.moved(word) for word in words] == list(words), "without an arm of another commit"
    monkeypatch.setenv("PERFSUITE_MOVED", "/repo:/repo/.perfsuite/arms/abc")
    monkeypatch.setattr(sys, "prefix", "/repo/.venv")
    moved = [ranks.moved(word) for word in words]
    assert moved == ["/repo/.perfsuite/arms/abc/train.py", *words[1:]]
    assert ranks.moved("/repo") == "/repo/.perfsuite/arms/abc", "the directory that a script starts in"


def test_a_repository_below_the_interpreters_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setenv("PERFSUITE_MOVED", "/usr/src/app:/tmp/arms/abc")
    assert ranks.moved("/usr/src/app/train.py") == "/tmp/arms/abc/train.py"
    assert ranks.moved("/usr/bin/python") == "/usr/bin/python"
