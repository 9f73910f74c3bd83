"""The agent: starts every rank of one job on this node, and waits for them.

Run as `python -m perfsuite.node.agent RUNDIR`. Imports neither torch nor pytest.

There are three ways to start ranks:

- Ranks of perfsuite's own worker are forked by a server that has imported torch once, and on a CPU the
  model's code, too (`perfsuite.node.preload`). They stay in this process's group, so that one `killpg` ends
  them all; the subprocesses of torchrun, each in a session of its own, would survive that.
- The ranks of a script are plain processes, or a command starts them by itself. The Python processes among
  them measure themselves (`perfsuite.worker.startup`).
- Ranks that train nothing are forked from this process.

The environment of a rank is that of torchrun, and rank 0 is where all of them meet.

Processes of the job whose parent has ended become children of this one, which kills every process of the job
before it ends, whoever started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import FileError, message_of
from perfsuite.frameworks.base import Command, framework_of
from perfsuite.node import cpu, rendezvous, stack_asker
from perfsuite.node.lease import Lease
from perfsuite.node.oom import oom_kills, oom_kills_since
from perfsuite.node.processes import JOB_MARK, marked, sweep, wait_for
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import (
    ANCESTOR_PID,
    FILES,
    JOB_VARIABLES,
    LAUNCH_DIR,
    MODEL_CODE,
    MOVED,
    NODE,
    RUN_DIR,
    RunDir,
)
from perfsuite.worker import leash
from perfsuite.worker import main as worker
from perfsuite.worker.rank import LEAVE_S

NODE_VARIABLE = "PERFSUITE_NODE_VARIABLE"
"""Environment variable: the name of the scheduler's variable that holds the number of this node, from 0 on.
Without it this is node 0."""
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""torch's environment variable that torchrun sets to 1, unless the user has set it."""
POLL_S = 0.05
"""Seconds between two looks at the ranks."""
GRACE_S = 5
"""Seconds in which the other ranks may end by themselves, and say why, when one has failed."""
PEERS_S = 5
"""Seconds that a node which ends the job waits for the nodes that have not written their stacks yet."""

SERVER_S = 1.0
"""Seconds in which the end of the fork server is known after its connections are closed."""
STAY_S = LEAVE_S + GRACE_S
"""Seconds in which ranks have ended when all of them have reported: the kernel ends them sooner, unless they
ignore its signal."""
STAYED = f"was killed: it had not ended {STAY_S} s after every rank had reported"
NO_EXIT_CODE = "exit code 255"
"""What multiprocessing tells of a rank whose fork server is gone; a rank may also end so by itself."""

P = TypeVar("P", BaseProcess, subprocess.Popen[bytes])
Tell = Callable[[Sequence[Failure]], None]


@dataclass(frozen=True)
class AgentJob:
    """The part of a job that runs on this node."""

    run_dir: RunDir
    request: CaseFile
    node: int = 0
    """The number of this node, from 0 on."""
    near_cores: tuple[frozenset[int], ...] = ()
    """The cores near the GPU of each rank of this node, where they are known."""

    @property
    def nodes(self) -> int:
        """The number of nodes of the job."""
        return self.request.case.topology.nodes

    @property
    def per_node(self) -> int:
        """The number of ranks on each node."""
        return self.request.case.topology.processes_per_node

    @property
    def ranks(self) -> range:
        """The ranks of this node: those of a node follow each other."""
        return range(self.node * self.per_node, (self.node + 1) * self.per_node)


def main(path: str) -> int:
    """Run this node's part of the job to its end. Return the exit status: 0 if every rank ended well."""
    for number in leash.ENDING:
        signal.signal(number, _end_the_job)
    leash.die_with_parent(signal.SIGTERM)
    leash.adopt_orphans()
    os.environ[ANCESTOR_PID] = str(os.getpid())
    os.environ[NODE] = os.environ.get(os.environ.get(NODE_VARIABLE, ""), "0")
    run_dir = RunDir(Path(path))
    try:
        place = AgentJob(run_dir, documents.read(run_dir.case, CaseFile), int(os.environ[NODE]))
        failures = _watched(place)
    finally:
        _sweep()
    return 1 if failures else 0


class Once:
    """Lets one thread end the job. Any other that wants to, waits until this process is gone.

    There are three ways to the end, and each writes the file of this node's launch once:

        thread of the agent   all ranks have ended ---> begin --> write --> return --+
        thread of the agent   they cannot be started -> begin --> write --> raise ---+-> sweep, exit status
        thread of the lease   the driver ends the job > begin --> stacks, write --> sweep, os._exit(0)

    A driver that is gone for good is a fourth, which writes nothing: `_end`, by the lease or a signal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin to end the job. It never returns in a second thread: the lock is not given back."""
        self._lock.acquire()

    def not_yet(self) -> threading.Lock:
        """Return what keeps the end from beginning while it is held."""
        return self._lock


def _watched(place: AgentJob) -> list[Failure]:
    """Run the job beside a sampler of the node's health, as long as the driver lives and wants it."""
    from perfsuite.node.health_sampler import (  # needs psutil: ranks load this module and must not
        HealthWatch,
        sampler,
    )

    per_node, device = place.per_node, place.request.device
    watch = HealthWatch(sampler(device, per_node), place.run_dir.progress)
    killed_before = oom_kills()
    ending = Once()

    def write(failures: Sequence[Failure] = (), *, is_over: bool = True) -> None:
        health = watch.finish() if is_over else None
        content = LaunchFile(
            host=socket.gethostname(),
            is_over=is_over,
            failures=tuple(failures),
            health=health,
            oom_kills=oom_kills_since(killed_before),
        )
        documents.write(place.run_dir.launch(place.node), content)

    def tell(failures: Sequence[Failure]) -> None:
        with ending.not_yet(), contextlib.suppress(FileError):  # the last `write` raises it
            write(failures, is_over=False)

    def end() -> None:
        ending.begin()
        try:
            stack_asker.ask(place.run_dir, marked(os.environ.get(JOB_MARK, "")), place.node)
            write()
            _wait_for_peers(place)
        finally:
            _end("the driver ends the job", 0)  # by another status srun would end nodes that still write

    Lease(place.run_dir.lease, end, _end).hold()
    watch.begin()
    try:
        failures = _launch(replace(place, near_cores=watch.near_cores), tell)
    except Exception as error:
        where = f"{socket.gethostname()}: " if place.nodes > 1 else ""
        message = f"{where}{type(error).__name__}: {message_of(error)}"
        ending.begin()
        write([Failure(kind="error", message=message, at=time.time())])
        raise
    ending.begin()
    write(failures)
    return failures


def _wait_for_peers(place: AgentJob) -> None:
    """Wait until every node has written its stacks: ranks whose peers are killed end before they can."""
    until = time.monotonic() + PEERS_S
    while not all(_is_over(place, node) for node in range(place.nodes)) and time.monotonic() < until:
        time.sleep(POLL_S)


def _is_over(place: AgentJob, node: int) -> bool:
    try:
        return documents.read(place.run_dir.launch(node), LaunchFile).is_over
    except FileError:
        return False


def _launch(place: AgentJob, tell: Tell) -> list[Failure]:
    """Run this node's part of the job. `tell` is told what has failed while other ranks still run."""
    case = place.request.case
    place.run_dir.files.mkdir(exist_ok=True)  # another node may have made it
    os.environ[FILES] = str(place.run_dir.files)
    plan = framework_of(case).plan(case)
    given = os.environ.get(JOB_VARIABLES, "").split()
    # By the perfsuite that this process has.
    ours = {**cpu.node_variables(case, place.request.device), **plan.environment}
    for name, value in ours.items():
        if name not in given:
            os.environ[name] = value.replace(LAUNCH_DIR, str(place.run_dir.files))
    if plan.command is not None:
        return _run(plan.command, place, tell)
    if not plan.needs_torch:
        return _fork(place, multiprocessing.get_context("fork").Process, {}, tell)
    os.environ.update(_model_code(place.request))
    multiprocessing.set_forkserver_preload(["perfsuite.node.preload"])
    forkserver.ensure_running()  # it imports torch from now on
    with rendezvous.meeting(place.run_dir, place.node, place.nodes) as meeting:
        return _fork(place, multiprocessing.get_context("forkserver").Process, meeting, tell)


def _sweep() -> None:
    """Kill every process of the job, whatever its session and its environment."""
    tracker = getattr(resource_tracker, "_resource_tracker", None)  # it cleans up, and ends with this process
    sweep(os.environ.get(JOB_MARK), os.getpid(), spare={getattr(tracker, "_pid", None)})


def _children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children()}


def _bury(ours: Collection[int]) -> None:
    """Let go of an orphan of the job that has ended: nobody else will. `ours` are not orphans."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid not in ours:
            os.waitpid(ended.si_pid, 0)


def _end_the_job(number: int, frame: Any) -> NoReturn:
    _sweep()
    os._exit(128 + number)  # as of a process that the signal ended


def _end(why: str, status: int = 1) -> NoReturn:
    """End the job on this node from any thread, and tell why in the log."""
    try:
        with contextlib.suppress(OSError):  # the disk of the log may be full
            print(f"perfsuite: {why}", flush=True)
        _sweep()
    finally:
        os._exit(status)


def _model_code(request: CaseFile) -> dict[str, str]:
    """Return `MODEL_CODE` where each rank would import transformers (seconds each), and a fork may have it.

    On a GPU it may not: what touches the GPU when it is imported would break it for all forks.
    """
    case = request.case
    model_type = case.model.config.get("model_type")
    if request.device == "cuda" or request.preflight or model_type is None:
        return {}
    name = str(model_type).replace("-", "_")
    adapters = [] if case.lora is None else ["peft"]
    return {MODEL_CODE: " ".join([f"transformers.models.{name}.modeling_{name}", *adapters])}


def _fork(
    place: AgentJob, process: type[BaseProcess], meeting: Mapping[str, str], tell: Tell
) -> list[Failure]:
    """Start ranks of perfsuite's worker by a fork: of this process, or of the server that has torch."""
    path = str(place.run_dir.path)
    ranks = {
        rank: process(target=worker.forked, args=(path, {**_rank(place, rank), **meeting}))
        for rank in place.ranks
    }
    try:
        for each in ranks.values():
            each.start()
    except (EOFError, OSError):
        if (why := _server_ended()) is None:
            raise
        return [Failure(kind="error", message=why, at=time.time())]
    _bind(place, ranks)
    failures = _wait(ranks, attrgetter("exitcode"), place, _rank_ended, tell)
    if any(failure.message == NO_EXIT_CODE for failure in failures) and (why := _server_ended()) is not None:
        return [Failure(kind="error", message=why, at=time.time())]  # its ranks died with it
    return failures


def _server_ended() -> str | None:
    """How the server ended from which ranks are forked; None if it has not, or if there is none."""
    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    until = time.monotonic() + SERVER_S
    with contextlib.suppress(ChildProcessError):
        while pid is not None and time.monotonic() < until:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                what = "the server from which ranks are forked (multiprocessing's)"
                return f"{what} ended with {_exit_code(code)}"
            time.sleep(POLL_S)
    return None


def _bind(place: AgentJob, ranks: Mapping[int, P]) -> None:
    """Keep each rank on the cores near its GPU: host-bound steps are slower on those of another socket."""
    for each, cores in zip(ranks.values(), place.near_cores, strict=False):
        if each.pid is not None:
            cpu.bind(each.pid, cores)


def _run(command: Command, place: AgentJob, tell: Tell) -> list[Failure]:
    """Run a command whose Python processes find `perfsuite.worker.startup`, once or once per rank."""
    startup = str(Path(worker.__file__).parent / "startup")
    first = {"PYTHONPATH": startup, "PATH": str(Path(sys.executable).parent)}
    paths = {
        name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in first.items()
    }
    environment = {**os.environ, **paths, RUN_DIR: str(place.run_dir.path)}
    for rank in place.ranks:  # on NFS others see a file that is there at once, a new one later
        place.run_dir.training(rank).touch()
    with contextlib.ExitStack() as until_the_end:
        if command.starts_ranks and place.nodes == 1:
            return _run_once(command, place, environment)
        meeting = rendezvous.meeting(place.run_dir, place.node, place.nodes)
        environment |= until_the_end.enter_context(meeting)
        if command.starts_ranks:
            return _run_once(command, place, environment)
        ranks = {
            rank: _start(
                command,
                place.run_dir,
                {**environment, **_rank(place, rank)},
                place.run_dir.rank_log(rank),
            )
            for rank in place.ranks
        }
        _bind(place, ranks)
        return _wait(ranks, subprocess.Popen.poll, place, partial(_script_ended, place), tell)


def _run_once(command: Command, place: AgentJob, environment: Mapping[str, str]) -> list[Failure]:
    process = _start(command, place.run_dir, environment, None)
    ours, stay = _children(), Stay(place)
    while not wait_for(process, POLL_S):
        _bury(ours)
        if stay.is_over():
            process.kill()  # what it has started is swept
            return [Failure(kind="crash", message=f"the command {STAYED}", at=time.time())]
    code = process.returncode
    if place.run_dir.all_ranks():
        ended = f"the command ended with {_exit_code(code)}"
        return [Failure(kind="crash", message=ended, at=time.time())] if code else []
    return [Failure(kind="crash", message=_ended(place, "the command", code), at=time.time())]


def _start(
    command: Command, run_dir: RunDir, environment: Mapping[str, str], log: Path | None
) -> subprocess.Popen[bytes]:
    """Start a process of `command`, with its output in `log`, or where this process's own output goes."""
    with contextlib.ExitStack() as files:
        return subprocess.Popen(
            [_moved(word).replace(LAUNCH_DIR, str(run_dir.files)) for word in command.words],
            cwd=_moved(command.directory),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if log is None else files.enter_context(log.open("ab")),
            stderr=None if log is None else subprocess.STDOUT,
            preexec_fn=leash.die_with_parent,
        )


def _moved(word: str) -> str:
    """Return where a file of the repository is in the worktree that stands for it, if one does.

    The environment of this process and the worktree itself may lie in the repository, too.
    """
    top, _, worktree = os.environ.get(MOVED, "").partition(os.pathsep)
    inside, path = top + os.sep, word + os.sep
    stay = tuple(each + os.sep for each in (sys.prefix, worktree) if (each + os.sep).startswith(inside))
    is_moved = worktree and path.startswith(inside) and not path.startswith(stay)
    return worktree + word.removeprefix(top) if is_moved else word


def _rank(place: AgentJob, rank: int) -> dict[str, str]:
    """Return torchrun's environment variables (torch's docs, "torchrun", "Environment Variables").

    Those that say where ranks meet are `rendezvous.meeting`'s; there rank 0 listens, and no agent.
    """
    world = place.request.case.topology.world_size
    return {
        "LOCAL_RANK": str(rank - place.ranks.start),
        "RANK": str(rank),
        "GROUP_RANK": str(place.node),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(place.per_node),
        "WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_WORLD_SIZE": str(world),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "perfsuite",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        ASYNC_ERRORS: os.environ.get(ASYNC_ERRORS, "1"),
    }


class Stay:
    """How long ranks may stay: `STAY_S` after every rank of the job has reported."""

    def __init__(self, place: AgentJob) -> None:
        world = range(place.request.case.topology.world_size)
        self._missing = [place.run_dir.rank(rank) for rank in world]
        self._until = float("inf")

    def is_over(self) -> bool:
        """Whether they have stayed too long."""
        while self._missing and self._missing[-1].exists():
            self._missing.pop()
            if not self._missing:
                self._until = time.monotonic() + STAY_S
        return time.monotonic() > self._until


def _wait(
    ranks: Mapping[int, P],
    code_of: Callable[[P], int | None],
    place: AgentJob,
    say: Callable[[int, bool], str | None],
    tell: Tell,
) -> list[Failure]:
    """Wait until every rank has ended; once one has failed, no longer than `GRACE_S`; and see `Stay`.

    `code_of` gives a process's exit code once it has one. `say` tells how a rank failed, if it did, by that
    code and by whether it left a report. A failure is told at once: if the ranks of another node fail by it,
    and that node's agent ends first, `srun` ends this one.
    """
    run_dir, running, ours, stay = place.run_dir, dict(ranks), _children(), Stay(place)
    failures: list[Failure] = []
    until = float("inf")
    while running and time.monotonic() < until and not stay.is_over():
        time.sleep(POLL_S)
        _bury(ours)
        ended = {rank: code for rank, each in running.items() if (code := code_of(each)) is not None}
        for rank, code in ended.items():
            del running[rank]
            is_measured = _is_measured(run_dir, rank)
            if (message := say(code, run_dir.rank(rank).exists())) is not None:
                failures.append(Failure(kind="crash", message=message, rank=rank, at=time.time()))
                tell(failures)
            if not is_measured:
                until = min(until, time.monotonic() + GRACE_S)
    for rank, process in running.items():
        process.kill()
        if stay.is_over():
            failures.append(Failure(kind="crash", message=f"it {STAYED}", rank=rank, at=time.time()))
            tell(failures)
    return failures


def _is_measured(run_dir: RunDir, rank: int) -> bool:
    try:
        return documents.read(run_dir.rank(rank), RankReport).failure is None
    except FileError:
        return False


def _rank_ended(code: int, is_reported: bool) -> str | None:
    return _exit_code(code) if code else None  # that a report is missing the driver sees


def _script_ended(place: AgentJob, code: int, is_reported: bool) -> str | None:
    if is_reported:
        return _exit_code(code) if code else None
    return _ended(place, "the script", code)


def _ended(place: AgentJob, what: str, code: int) -> str:
    """How a script or command ended without a report, and how far rank 0 is known to have come."""
    ended, total = f"{what} ended with {_exit_code(code)}", place.request.case.total_steps
    steps = place.run_dir.steps_seen()
    if steps is None:
        child = ", or in a process that it starts (give it as command=(...) then)" * (what == "the script")
        why = "" if code else f": it does not train, or not with an optimizer of torch{child}"
        return f"{ended}, before an optimizer step could be seen{why}"
    why = "" if code else ": not as Python ends, or perfsuite would have reported (os._exit?)"
    return f"{ended}, when rank 0 had finished at least {steps} of {total} optimizer steps{why}"


def _exit_code(code: int) -> str:
    return f"exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
