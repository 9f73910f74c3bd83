import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile, LoRA, Topology
from perfsuite.case.model import Model
from perfsuite.frameworks.base import Command
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.script import Script
from perfsuite.node import ranks
from perfsuite.node.processes import POLL_S
from perfsuite.node.ranks import AgentJob
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run_dir import FILES, JOB_VARIABLES, MODEL_CODE, RANK, RUN_DIR, RunDir
from perfsuite.worker import leash
from tests.node.conftest import Passing, exit_code_of
from tests.samples import make_case

SCRIPT = make_case(framework=Script(path="train.py"), topology=Topology(processes_per_node=2))
TORCHRUN = """
LOCAL_RANK=1 RANK=1 GROUP_RANK=0 ROLE_RANK=1 ROLE_NAME=default
LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 GROUP_WORLD_SIZE=1 ROLE_WORLD_SIZE=2
TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RUN_ID=perfsuite
TORCHELASTIC_USE_AGENT_STORE=False TORCH_NCCL_ASYNC_ERROR_HANDLING=1
TORCHELASTIC_ERROR_FILE=/dev/null TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT
"""
"""The variables of rank 1 of `torchrun --nproc-per-node 2`.

Source: torch's docs, "torchrun", "Environment Variables".
"""
REPORT = RankReport(rank=0, world_size=2, host="here", clock="perf_counter")
UNSEEN = "before an optimizer step was seen"
UNTRAINED = ": it does not train, or it uses no optimizer of torch"
IN_A_CHILD = (
    f"the script ended with exit code 0, {UNSEEN}{UNTRAINED}, or it trains in a child process "
    "(then give it as command=(...))"
)


@pytest.fixture
def job(tmp_path: Path) -> AgentJob:
    return AgentJob(RunDir(tmp_path), CaseFile(case=SCRIPT, device="cpu"))


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
def test_cpu_fork_server_loads_the_models_code(
    request_changes: dict[str, Any], case_changes: dict[str, Any], modules: str | None
) -> None:
    case = make_case(framework=DDP(), **case_changes)
    request = CaseFile(case=case, device="cpu").replace(**request_changes)
    assert ranks._model_code(request) == ({} if modules is None else {MODEL_CODE: modules})


def test_script_rank_has_torchruns_variables(job: AgentJob, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, "3")
    assert ranks.rank_variables(job.topology, 0)[name] == "3", "a value that the user has set wins"
    monkeypatch.delenv(name)
    assert ranks.rank_variables(job.topology, 1) == dict(
        assignment.split("=") for assignment in TORCHRUN.split()
    )


class Process(subprocess.Popen[bytes]):
    """A rank of a script that ends with `code` after this many polls.

    If `code` is None, it never ends.
    """

    def __init__(self, code: int | None, after: int = 0) -> None:
        self.code = code
        self.polls = after
        self.was_killed = False

    def poll(self) -> int | None:
        self.polls -= 1
        return None if self.polls >= 0 else self.code

    def kill(self) -> None:
        self.was_killed = True


def wait(job: AgentJob, *started: Process) -> list[tuple[int | None, str]]:
    reported: list[int] = []
    job = replace(job, tell=lambda so_far: reported.append(len(so_far)))
    failures = ranks._wait(job, dict(enumerate(started)))
    assert reported == list(range(1, len(failures) + 1)), (
        "each failure is reported at once, because the agent might end before its ranks"
    )
    assert {failure.kind for failure in failures} <= {"crash"}
    return [(failure.rank, failure.message) for failure in failures]


BOTH = (REPORT, REPORT.replace(rank=1))
FAILED = REPORT.replace(failure=Failure(kind="mismatch", message="m"))


@pytest.mark.parametrize(
    ("reports", "processes", "expected", "seconds"),
    [
        (BOTH, [(0,), (0, 400)], [], 400 * POLL_S),
        (BOTH, [(0,), (-11,)], [(1, "exit code -11 (SIGSEGV)")], POLL_S),
        # When one rank has failed, the others have some seconds to report why, unless the failed rank's
        # report explains it.
        ((), [(3,), (None,)], [(0, f"the script ended with exit code 3, {UNSEEN}")], ranks.GRACE_S),
        ((FAILED,), [(0,), (None,)], [], ranks.GRACE_S),
        # The rank ignores the signal with which the kernel would end it.
        pytest.param(
            *(BOTH, [(0,), (None,)], [(1, f"it {ranks.STAYED}")], ranks.STAY_S),
            marks=pytest.mark.fault("rank does not end"),
        ),
        ((REPORT,), [(0, 2000)], [], 2000 * POLL_S),
        ((), [(0,), (0,)], [(rank, IN_A_CHILD) for rank in (0, 1)], 0),
    ],
    ids=["slow", "crashes at its end", "fails", "reports a failure", "stays", "is late", "trains not"],
)
def test_kills_a_rank_that_takes_too_long(
    job: AgentJob, passing: Passing, reports: Any, processes: Any, expected: Any, seconds: float
) -> None:
    job.run_dir.progress.touch()  # the driver makes this file
    for report in reports:
        documents.write(job.run_dir.rank(report.rank), report)
    started = [Process(*fields) for fields in processes]
    assert wait(job, *started) == expected
    assert [process.was_killed for process in started] == [None in fields for fields in processes]
    assert passing.seconds == pytest.approx(seconds, abs=2 * POLL_S)


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize(
    ("code", "said", "why"),
    [
        (-9, "exit code -9 (SIGKILL)", ""),
        (3, "exit code 3", ""),
        (
            0,
            "exit code 0",
            ": Python cannot have exited normally (os._exit?), because perfsuite wrote no report",
        ),
    ],
)
def test_missing_report_names_the_steps_seen(job: AgentJob, code: int, said: str, why: str) -> None:
    job.run_dir.progress.write_text("10 256")
    seen = f"when rank 0 had finished at least 10 of {SCRIPT.total_steps} optimizer steps"
    assert wait(job, Process(code)) == [(0, f"the script ended with {said}, {seen}{why}")]


@pytest.mark.usefixtures("passing")
def test_reports_a_command_that_outlives_its_reports(job: AgentJob) -> None:
    for report in BOTH:
        documents.write(job.run_dir.rank(report.rank), report)
    (failure,) = ranks._wait(job, {None: Process(None)})
    assert (failure.message, failure.rank) == (f"the command {ranks.STAYED}", None)


def fail() -> None:
    raise EOFError("unexpected EOF")


class OfADeadServer:
    """A rank that was forked from a server that has died, so nobody knows how the rank ended."""

    exitcode = 255
    pid = 1
    start = staticmethod(lambda: None)

    def __init__(self, target: Any, args: Any) -> None:
        pass


class Unstarted(OfADeadServer):
    """A rank that does not start, because its server has died."""

    start = staticmethod(fail)


@pytest.mark.usefixtures("passing")
@pytest.mark.fault("fork server is killed")
@pytest.mark.parametrize("kind", [OfADeadServer, Unstarted])
def test_killed_fork_server_is_the_cause(job: AgentJob, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    is_started = kind is not Unstarted
    with subprocess.Popen(["sleep", "1000"]) as server:
        monkeypatch.setattr(forkserver, "_forkserver", SimpleNamespace(_forkserver_pid=server.pid))
        with contextlib.nullcontext() if is_started else pytest.raises(EOFError):
            failures = ranks._fork(job, kind, {}, server_s=0.05)
            assert [failure.message for failure in failures] == 2 * ["exit code 255"]
        server.kill()
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        (failure,) = ranks._fork(job, kind, {}, server_s=0.05)
    assert (failure.kind, failure.rank) == ("error", None)
    assert failure.message == (
        "multiprocessing's fork server, the parent of the ranks, ended with exit code -9 (SIGKILL)"
    )


def python(code: str, *words: str, starts_ranks: bool = True) -> Command:
    return Command(words=(sys.executable, "-S", "-c", code, *words), directory="/", starts_ranks=starts_ranks)


def test_command_finds_launch_startup_and_python(job: AgentJob, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("code", "unreported"), [(0, f", {UNSEEN}{UNTRAINED}"), (3, f", {UNSEEN}")])
def test_reports_how_a_command_or_rank_ended(job: AgentJob, code: int, unreported: str) -> None:
    """Failures are reported. If a rank of perfsuite left no report, the driver notices that instead."""
    command = python(f"raise SystemExit({code})")
    ended = f"exit code {code}"
    (failure,) = ranks._run(command, job)
    assert (failure.kind, failure.message) == ("crash", f"the command ended with {ended}{unreported}")
    for _ in range(2):
        assert ranks._failure(job, 0, code, is_script=False) == (ended if code else None)
        documents.write(job.run_dir.rank(0), REPORT)
    said = [reported.message for reported in ranks._run(command, job)]
    assert said == ([f"the command ended with {ended}"] if code else [])


def test_script_ranks_have_logs_and_a_port(job: AgentJob) -> None:
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')))"
    failures = ranks._run(python(code, starts_ranks=False), job)
    assert [failure.rank for failure in failures] in ([0, 1], [1, 0]), "none of these ranks trains"
    said = [job.run_dir.rank_log(rank).read_text().split() for rank in (0, 1)]
    assert [words[:2] for words in said] == [["0", "2"], ["1", "2"]]
    assert said[0][2] == said[1][2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(said[0][2])))


def test_lone_process_has_no_rank_variables(job: AgentJob) -> None:
    case = SCRIPT.replace(topology=Topology(processes_per_node=1))
    alone = replace(job, request=job.request.replace(case=case))
    code = (
        "import os; print(*sorted(n for n in os.environ if 'RANK' in n or 'MASTER' in n or 'ELASTIC' in n))"
    )
    (failure,) = ranks._run(python(code, starts_ranks=False), alone)
    assert failure.rank == 0, "the rank does not train"
    assert job.run_dir.rank_log(0).read_text().split() == [RANK]


def test_foreign_rank_variables_reach_no_process(job: AgentJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that the case or the arm sets are kept."""
    command = ("sh", "-c", "env > {launch_dir}/variables")
    case = SCRIPT.replace(framework=Script(command=command, env={"MASTER_PORT": "5"}))
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMI_RANK", "OMPI_COMM_WORLD_SIZE")
    for name in (*names, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "7")
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", FILES):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(JOB_VARIABLES, "LOCAL_RANK")
    ranks.run(replace(job, request=job.request.replace(case=case)))
    lines = (job.run_dir.files / "variables").read_text().splitlines()
    variables = dict(line.partition("=")[::2] for line in lines)
    left = {name: variables[name] for name in (*names, "LOCAL_RANK") if name in variables}
    assert left == {"MASTER_PORT": "5", "LOCAL_RANK": "7"}
    assert variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == variables["SLURM_PROCID"] == "7"


def bury_orphans() -> None:
    """Exit with 0 if orphans are reaped and the exit status of a child that is no orphan is still known."""
    leash.adopt_orphans()
    own = subprocess.Popen(["sh", "-c", "read word; exit 3"], stdin=subprocess.PIPE)
    ours = ranks._children()
    us = psutil.Process()
    for _ in range(3):
        subprocess.run(["sh", "-c", "sleep 0.1 & exit 0"], check=True)
    adopted = len(us.children()) - 1
    while len(us.children()) > 1:
        ranks._bury(ours)
        time.sleep(0.01)
    assert own.stdin is not None
    own.stdin.close()
    while us.children()[0].status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    ranks._bury(ours)
    os._exit(0 if adopted > 0 and own.wait() == 3 else 1)


def test_reaps_orphans_and_keeps_the_ranks_end() -> None:
    assert exit_code_of(bury_orphans) == 0


class Forked:
    """A forked rank that has ended. Its process id is 70 plus its rank."""

    exitcode = 0
    start = staticmethod(lambda: None)

    def __init__(self, target: Any, args: tuple[str, dict[str, str]]) -> None:
        self.pid = 70 + int(args[1]["RANK"])


Bound = list[tuple[int, frozenset[int]]]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    """Return a list of the processes that are bound, and of their cores, on a machine with 8 cores."""
    bound: Bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append((pid, frozenset(cores))))
    return bound


SOCKETS = (frozenset({0, 1}), frozenset({2, 3}))


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize(
    ("near", "is_bound"),
    [
        (SOCKETS, True),
        ((SOCKETS[0], SOCKETS[0]), True),
        ((frozenset({0}), frozenset({0})), False),  # two ranks would share one core
    ],
)
def test_binds_forked_ranks_to_cores_near_their_gpus(
    job: AgentJob, bound: Bound, near: tuple[frozenset[int], ...], is_bound: bool
) -> None:
    kind: Any = Forked
    ranks._fork(replace(job, near_cores=near), kind, {})
    assert bound == ([(70, near[0]), (71, near[1])] if is_bound else [])


def test_binds_script_ranks_to_cores_near_their_gpus(job: AgentJob, bound: Bound) -> None:
    command = Command(words=("sh", "-c", "echo $$"), directory=".", starts_ranks=False)
    ranks._run(command, replace(job, near_cores=SOCKETS))
    pids = [int(job.run_dir.rank_log(rank).read_text()) for rank in (0, 1)]
    assert bound == list(zip(pids, SOCKETS, strict=True))


def test_does_not_bind_the_ranks_of_a_launcher(job: AgentJob, bound: Bound) -> None:
    command = Command(words=("true",), directory=".", starts_ranks=True)
    ranks._run(command, replace(job, near_cores=SOCKETS))
    assert bound == []


@pytest.fixture
def worktree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the worktree of an arm of the repository `tmp_path`. It has one file, `new.yaml`."""
    made = tmp_path / ".perfsuite" / "arms" / "abc"
    made.mkdir(parents=True)
    (made / "new.yaml").touch()
    monkeypatch.setenv("PERFSUITE_MOVED", f"{tmp_path}:{made}")
    return made


def moved_word(word: str) -> str:
    """Return an argument of a command in the worktree."""
    _, moved = ranks.moved_command(("python", word))
    return moved


def test_path_in_an_option_is_the_worktrees(tmp_path: Path, worktree: Path) -> None:
    assert moved_word(f"--config={tmp_path}/new.yaml") == f"--config={worktree}/new.yaml"


@pytest.mark.parametrize("word", ["--steps=3", "--config={}/new.yaml"])
def test_keeps_other_options(worktree: Path, word: str) -> None:
    """One option contains no path, and the other already contains a path of the worktree."""
    option = word.format(worktree)
    assert moved_word(option) == option


@pytest.mark.parametrize("program", ["train.py", "train.sh"])
def test_program_is_always_the_worktrees(tmp_path: Path, worktree: Path, program: str) -> None:
    """Otherwise the arm would run the program of the working tree."""
    assert moved_word(f"{tmp_path}/{program}") == f"{worktree}/{program}"


def test_path_through_a_link_is_the_worktrees(tmp_path: Path, worktree: Path) -> None:
    link = tmp_path.with_name("link")
    link.symlink_to(tmp_path)
    assert moved_word(f"--config={link}/new.yaml") == f"--config={worktree}/new.yaml"


def test_a_link_in_the_repository_is_kept(tmp_path: Path, worktree: Path) -> None:
    (tmp_path / "data").symlink_to("/")
    (worktree / "data").symlink_to("/")
    assert moved_word(f"{tmp_path}/data") == f"{worktree}/data"


def test_a_command_without_a_suffix_is_the_worktrees(tmp_path: Path, worktree: Path) -> None:
    assert ranks.moved_command((f"{tmp_path}/bin/train",)) == [f"{worktree}/bin/train"]


def test_python_file_in_an_option_is_the_worktrees(tmp_path: Path, worktree: Path) -> None:
    assert moved_word(f"--config={tmp_path}/large.py") == f"--config={worktree}/large.py"


@pytest.mark.parametrize("word", ["{}/lr=0.1", "--data={}/lr=0.1"])
def test_path_with_an_equals_sign_is_the_worktrees(tmp_path: Path, worktree: Path, word: str) -> None:
    (worktree / "lr=0.1").mkdir()
    assert moved_word(word.format(tmp_path)) == word.format(worktree)


@pytest.mark.parametrize("option", ["", "--data="])
def test_data_that_the_commit_lacks_stay(tmp_path: Path, worktree: Path, option: str) -> None:
    assert moved_word(f"{option}{tmp_path}/data") == f"{option}{tmp_path}/data"


def test_path_in_an_argument_is_the_worktrees(tmp_path: Path, worktree: Path) -> None:
    assert moved_word(f"{tmp_path}/new.yaml") == f"{worktree}/new.yaml"


def test_a_command_starts_in_the_worktree(tmp_path: Path, worktree: Path) -> None:
    assert ranks.moved_directory(f"{tmp_path}/new") == f"{worktree}/new"


def test_path_in_a_variable_is_the_worktrees(tmp_path: Path, worktree: Path) -> None:
    given = {"CONFIG": f"{tmp_path}/new.yaml", "DATA": f"{tmp_path}/data", "N": "1"}
    assert ranks.moved_variables(given, {}) == given
    moved = ranks.moved_variables(given, os.environ)
    assert moved == {**given, "CONFIG": f"{worktree}/new.yaml"}


REPO = ("/repo", "/repo/.perfsuite/arms/abc", "/repo/.venv")
USR = ("/usr/src/app", "/tmp/arms/abc", "/usr")
"""The top of a repository, the worktree that replaces it, and the prefix of the interpreter."""


@pytest.mark.parametrize(
    ("place", "word", "moved"),
    [
        (REPO, "/repo/train.py", "/repo/.perfsuite/arms/abc/train.py"),
        *((REPO, word, word) for word in ("/repository/train.py", "--out=/repo/x", "train.py")),
        (REPO, "/repo/.venv/bin/python", "/repo/.venv/bin/python"),
        (REPO, f"{REPO[1]}/train.py", f"{REPO[1]}/train.py"),
        (USR, "/usr/src/app/train.py", "/tmp/arms/abc/train.py"),
        (USR, "/usr/bin/python", "/usr/bin/python"),
    ],
)
def test_repository_file_is_the_worktrees(
    monkeypatch: pytest.MonkeyPatch, place: tuple[str, str, str], word: str, moved: str
) -> None:
    assert moved_word(word) == word, "without an arm of another commit, no directory changes"
    monkeypatch.setenv("PERFSUITE_MOVED", ":".join(place[:2]))
    monkeypatch.setattr(sys, "prefix", place[2])
    assert moved_word(word) == moved
