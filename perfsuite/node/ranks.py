"""Start the ranks of a job on this node, and wait for them.

- Ranks of perfsuite's own worker are forked from a server that has imported torch once (`node.preload`). They
  belong to this process's group, so that one `killpg` ends them all.
- Ranks of a script are plain processes. This process starts these ranks, or runs a command that starts them.
  The ranks measure themselves (`worker.startup`).
- Ranks that train nothing are forked from this process.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import CaseFile, Topology
from perfsuite.frameworks.base import Command, framework_of
from perfsuite.node import cpu, rendezvous
from perfsuite.node.processes import POLL_S
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run_dir import (
    FILES,
    JOB_VARIABLES,
    LAUNCH_DIR,
    MODEL_CODE,
    MOVED,
    RANK,
    RUN_DIR,
    RunDir,
)
from perfsuite.worker import leash
from perfsuite.worker import main as worker
from perfsuite.worker.clock.startup_clock import COUNTS_CALLS
from perfsuite.worker.rank import LEAVE_S

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that determines what NCCL's watchdog does after an error. Like torchrun, perfsuite
sets it to 1 unless the user has set it, so that a script behaves as it does under torchrun.

With 1, the watchdog aborts the communicators before it ends the process. With 3, it only ends the process. In
older versions of torch, an abort could prevent the flight recorder from writing its file (pytorch issue
121055). Now the watchdog lets all ranks write their files, and waits, before it aborts (`Watchdog::runLoop`
in ProcessGroupNCCL.cpp). The abort does not affect perfsuite's own records, because ranks write these while
the watchdog still waits."""
OF_A_LAUNCHER = re.compile(
    f"{RANK}|(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    "|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|USE_AGENT_STORE|ERROR_FILE|SIGNALS_TO_HANDLE)"
    "|OMPI_COMM_WORLD_.*|PMI_(RANK|SIZE)|PMIX_RANK|MV2_COMM_WORLD_.*|MPI_LOCAL(RANKID|NRANKS)"
)
"""Environment variables with which torchrun, MPI and similar launchers assign a rank to a process. If pytest
was started with such variables, they describe a rank of another job. Our processes must not take over that
rank."""
# After one rank has failed: seconds within which the other ranks can end and report why they end.
GRACE_S = 5
SERVER_S = 1.0  # seconds to wait until the fork server has ended, after its connections were closed
# Seconds after the last report until ranks are killed. A rank's own alarm ends the rank earlier, unless the
# rank blocks the alarm.
STAY_S = LEAVE_S + GRACE_S
STAYED = f"was killed because it had not ended {STAY_S} s after every rank had reported"
# multiprocessing reports this exit code if the fork server is gone, but a rank can also end with it.
NO_EXIT_CODE = "exit code 255"
PROGRAMS = (".py", ".sh")  # suffixes of program files. Each arm runs its own version of such a file

Process = BaseProcess | subprocess.Popen[bytes]  # a rank of perfsuite's worker, or of a script


@dataclass(frozen=True)
class AgentJob:
    """The part of a job that runs on this node."""

    run_dir: RunDir
    request: CaseFile
    node: int = 0  # the number of this node, from 0
    # For each rank of this node: the cores near its GPU. Empty if they are unknown.
    near_cores: tuple[frozenset[int], ...] = ()
    # A function to call with the failures so far, while other ranks still run.
    tell: Callable[[Sequence[Failure]], object] = lambda failures: None

    @property
    def topology(self) -> Topology:
        """The nodes and ranks of the whole job."""
        return self.request.case.topology

    @property
    def ranks(self) -> range:
        """The ranks of this node, which are consecutive."""
        per_node = self.topology.processes_per_node
        return range(self.node * per_node, (self.node + 1) * per_node)


def run(job: AgentJob) -> list[Failure]:
    """Run this node's ranks until they have ended. Return their failures."""
    case = job.request.case
    files = job.run_dir.files
    files.mkdir(exist_ok=True)  # another node might have created it
    os.environ[FILES] = str(files)
    os.environ.pop(COUNTS_CALLS, None)
    if job.request.times_nothing:
        os.environ[COUNTS_CALLS] = "1"
    plan = framework_of(case).plan(case)
    given = os.environ.get(JOB_VARIABLES, "").split()
    for name in os.environ.keys() - without_rank(os.environ).keys() - set(given):
        del os.environ[name]
    # The perfsuite that runs in this process determines the variables. Its version can differ from that of
    # the perfsuite that started the launch.
    ours = {**cpu.node_variables(case, job.request.device), **moved_variables(plan.environment, os.environ)}
    os.environ |= {n: value.replace(LAUNCH_DIR, str(files)) for n, value in ours.items() if n not in given}
    if plan.command is not None:
        return _run(plan.command, job)
    if not plan.needs_torch:
        return _fork(job, multiprocessing.get_context("fork").Process, {})
    os.environ |= _model_code(job.request)
    multiprocessing.set_forkserver_preload(["perfsuite.node.preload"])
    # The server needs seconds to import torch. Start the server here, so that it imports torch while this
    # node waits for the port of node 0.
    forkserver.ensure_running()
    with rendezvous.meeting(job.run_dir, job.node, job.topology.nodes) as meeting:
        return _fork(job, multiprocessing.get_context("forkserver").Process, meeting)


def _model_code(request: CaseFile) -> dict[str, str]:
    """Return the variable `MODEL_CODE`, which names modules to import before ranks are forked.

    Without it, each rank would import transformers itself. The result is empty if ranks do not need
    transformers. It is also empty on a GPU, because the import might use the GPU.
    """
    model_type = request.case.model.config.get("model_type")
    if request.device == "cuda" or request.preflight or model_type is None:
        return {}
    name = str(model_type).replace("-", "_")
    adapters = "" if request.case.lora is None else " peft"
    return {MODEL_CODE: f"transformers.models.{name}.modeling_{name}{adapters}"}


def _fork(
    job: AgentJob, process: type[BaseProcess], meeting: Mapping[str, str], *, server_s: float = SERVER_S
) -> list[Failure]:
    """Fork ranks of perfsuite's worker from this process, or from the server that has imported torch."""
    path = str(job.run_dir.path)
    ranks: dict[int | None, BaseProcess] = {
        rank: process(target=worker.forked, args=(path, {**rank_variables(job.topology, rank), **meeting}))
        for rank in job.ranks
    }
    try:
        for forked in ranks.values():
            forked.start()
    except (EOFError, OSError):
        ended = _server_ended(server_s)
        if not ended:
            raise
        return ended
    _bind(job, ranks.values())
    failures = _wait(job, ranks)
    if any(failure.message == NO_EXIT_CODE for failure in failures):
        return _server_ended(server_s) or failures  # if the server has ended, its ranks have ended with it
    return failures


def _server_ended(server_s: float) -> list[Failure]:
    """Return the failure of the fork server. Empty if the server still runs or was never started."""
    import psutil

    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    with contextlib.suppress(psutil.Error):
        if pid is not None:
            end = _exit_code(psutil.Process(pid).wait(server_s))
            message = f"multiprocessing's fork server, the parent of the ranks, ended with {end}"
            return [Failure(kind="error", message=message, at=time.time())]
    return []


def _bind(job: AgentJob, ranks: Iterable[Process]) -> None:
    """Keep each rank on the cores near its GPU. On another socket's cores, host-bound steps are slower."""
    for process, cores in zip(ranks, job.near_cores, strict=False):
        if process.pid is not None:
            cpu.bind(process.pid, cores, job.near_cores.count(cores))


def _run(command: Command, job: AgentJob) -> list[Failure]:
    """Run a command once, or once per rank.

    Through PYTHONPATH, each Python process of the command loads perfsuite's `sitecustomize`, which attaches
    the measurement.
    """
    environment = {**os.environ, RUN_DIR: str(job.run_dir.path)}
    first = {"PYTHONPATH": Path(worker.__file__).parent / "startup", "PATH": Path(sys.executable).parent}
    for name, path in first.items():
        environment[name] = os.pathsep.join(filter(None, [str(path), os.environ.get(name)]))
    # Create these files now. On NFS, other nodes see a new file late, but a change to an existing file at
    # once.
    for rank in job.ranks:
        job.run_dir.training(rank).touch()
    if command.starts_ranks and job.topology.nodes == 1:
        return _wait(job, {None: _start(command, job, environment, None)})
    if job.topology.world_size == 1:  # start it as a user would, without a launcher or a rendezvous
        return _wait_for_ranks(command, job, {0: environment})
    with rendezvous.meeting(job.run_dir, job.node, job.topology.nodes) as meeting:
        environment |= meeting
        if command.starts_ranks:
            return _wait(job, {None: _start(command, job, environment, None)})
        of_ranks = {rank: environment | rank_variables(job.topology, rank) for rank in job.ranks}
        return _wait_for_ranks(command, job, of_ranks)


def _wait_for_ranks(
    command: Command, job: AgentJob, environments: Mapping[int, Mapping[str, str]]
) -> list[Failure]:
    """Start `command` once for each rank, with the rank's environment, and wait for all these processes."""
    ranks: dict[int | None, Process] = {
        rank: _start(command, job, {**environment, RANK: str(rank)}, job.run_dir.rank_log(rank))
        for rank, environment in environments.items()
    }
    _bind(job, ranks.values())
    return _wait(job, ranks)


def _start(
    command: Command, job: AgentJob, environment: Mapping[str, str], log: Path | None
) -> subprocess.Popen[bytes]:
    """Start `command`. Its output goes to `log` or, if that is None, to this process's own output."""
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        return subprocess.Popen(
            [word.replace(LAUNCH_DIR, str(job.run_dir.files)) for word in moved_command(command.words)],
            cwd=moved_directory(command.directory),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=leash.die_with_parent,
        )


def moved_command(words: Sequence[str]) -> list[str]:
    """Return a command in which paths in the repository are replaced with paths in the worktree of this arm.

    The first word and all Python and shell files are always replaced, because an arm must not run a program
    of the other arm. Other paths, such as `/repository/data` or the one in `--config=/repository/file`, are
    replaced only if the worktree has such a file. So data that git ignores, and directories of results, are
    shared by both arms. Files of this Python environment keep their paths. If there is no worktree, all words
    are kept.
    """
    program, *arguments = words
    return [_in_worktree(program, os.environ), *map(_moved, arguments)]


def _moved(word: str) -> str:
    name, equals, value = word.partition("=")
    for before, path in (("", word), (name + equals, value)):
        is_program = Path(path).suffix in PROGRAMS
        moved = (_in_worktree if is_program else _if_there)(path, os.environ)
        if moved != path:
            return before + moved
    return word


def moved_directory(directory: str) -> str:
    """Return the directory in which a command starts: `directory`, but in the worktree of this arm."""
    return _in_worktree(directory, os.environ)


def moved_variables(given: Mapping[str, str], arm: Mapping[str, str]) -> dict[str, str]:
    """Adapt the variables of a case (`given`) to one arm. `arm` is the environment of this arm.

    Values that are paths in the repository are replaced if the worktree has such a file.
    """
    return {name: _if_there(value, arm) for name, value in given.items()}


def _if_there(path: str, environment: Mapping[str, str]) -> str:
    """Return the path in the worktree if the file exists there, and otherwise the unchanged path."""
    in_worktree = _in_worktree(path, environment)
    return in_worktree if os.path.exists(in_worktree) else path


def _in_worktree(path: str, environment: Mapping[str, str]) -> str:
    """Return the path that a file of the repository has in the worktree. `environment` names the worktree.

    `path` can lead to the repository through a symbolic link.
    """
    top, _, worktree = environment.get(MOVED, "").partition(os.pathsep)
    if not worktree or not os.path.isabs(path):
        return path
    inside = top + os.sep
    prefixes = (sys.prefix, os.path.realpath(sys.prefix), worktree)
    stay = tuple(prefix + os.sep for prefix in prefixes if (prefix + os.sep).startswith(inside))
    # The last component of the path can be a link in the repository, for example to data. This link is not
    # resolved.
    without_links = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    for spelling in (path, without_links):
        with_slash = spelling + os.sep
        if with_slash.startswith(inside) and not with_slash.startswith(stay):
            return worktree + spelling.removeprefix(top)
    return path


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables with which a launcher assigns a rank to a process."""
    return {name: value for name, value in environment.items() if not OF_A_LAUNCHER.fullmatch(name)}


def rank_variables(topology: Topology, rank: int) -> dict[str, str]:
    """Return torchrun's environment variables, without the rendezvous (see `rendezvous.meeting`)."""
    world = str(topology.world_size)
    node, local_rank = divmod(rank, topology.processes_per_node)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        "GROUP_RANK": str(node),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(topology.processes_per_node),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(topology.nodes),
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "perfsuite",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": os.devnull,  # the traceback is in the log of the rank
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        ASYNC_ERRORS: os.environ.get(ASYNC_ERRORS, "1"),
    }


def _wait(job: AgentJob, processes: Mapping[int | None, Process]) -> list[Failure]:
    """Wait until the ranks, or the command that starts them (key None), have ended. Return the failures.

    Failures are also passed to `job.tell` at once. Processes that have not ended are killed `GRACE_S` after a
    failure, or `STAY_S` after all ranks of the job have reported.
    """
    running = dict(processes)
    ours = _children()
    missing = [job.run_dir.rank(rank) for rank in range(job.topology.world_size)]
    failures: list[Failure] = []
    until = stay_until = float("inf")

    def failed(message: str, rank: int | None) -> None:
        failures.append(Failure(kind="crash", message=message, rank=rank, at=time.time()))
        job.tell(failures)

    while running and time.monotonic() < min(until, stay_until):
        time.sleep(POLL_S)
        _bury(ours)
        while missing and missing[-1].exists():
            missing.pop()
            if not missing:
                stay_until = time.monotonic() + STAY_S
        for rank, process in list(running.items()):
            code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
            if code is None:
                continue
            del running[rank]
            report = None if rank is None else documents.read_or_none(job.run_dir.rank(rank), RankReport)
            message = _failure(job, rank, code, isinstance(process, subprocess.Popen))
            if message is not None:
                failed(message, rank)
            if rank is not None and (report is None or report.failure is not None):
                until = min(until, time.monotonic() + GRACE_S)
    for rank, process in running.items():
        process.kill()  # `sweep` kills the children of the killed process later
        if time.monotonic() >= stay_until:
            failed(f"{'the command' if rank is None else 'it'} {STAYED}", rank)
    return failures


def _children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children()}


def _bury(ours: Collection[int]) -> None:
    """Reap an ended orphan of the job, because no other process will. Skip `ours`, which are not orphans."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid not in ours:
            os.waitpid(ended.si_pid, 0)


def _failure(job: AgentJob, rank: int | None, code: int, is_script: bool) -> str | None:
    """Return how a rank failed or, if `rank` is None, how the command that starts all ranks failed.

    Returns None if there was no failure. If perfsuite's worker has left no report, this is not treated as a
    failure here, because the process that started the launch notices it.
    """
    is_reported = bool(job.run_dir.all_ranks()) if rank is None else job.run_dir.rank(rank).exists()
    if is_script and not is_reported:
        return _ended(job, "the command" if rank is None else "the script", code)
    return f"{'the command ended with ' * (rank is None)}{_exit_code(code)}" if code else None


def _ended(job: AgentJob, what: str, code: int) -> str:
    steps = job.run_dir.steps_seen()
    total = job.request.case.total_steps
    if steps is None:
        when = "before an optimizer step was seen"
        child = ", or it trains in a child process (then give it as command=(...))" * (what == "the script")
        why = f": it does not train, or it uses no optimizer of torch{child}"
    else:
        when = f"when rank 0 had finished at least {steps} of {total} optimizer steps"
        why = ": Python cannot have exited normally (os._exit?), because perfsuite wrote no report"
    return f"{what} ended with {_exit_code(code)}, {when}{'' if code else why}"


def _exit_code(code: int) -> str:
    return f"exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
