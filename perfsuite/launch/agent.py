"""The agent: starts every rank of one job on this node, and waits for them.

Run as `python -m perfsuite.launch.agent RUNDIR`. Imports torch only inside functions, and no pytest.

It is a process of its own because torch's elastic launcher takes over signals and imports torch. There are
three ways to start ranks:

- Ranks of perfsuite's own worker are forked by a server that has imported torch once, and on a CPU the
  model's code, too (`perfsuite.launch.preload`). They stay in this process's group, so that one `killpg` ends
  them all; the subprocesses of torchrun, each in a session of its own, would survive that.
- The ranks of a script are plain processes, or a command starts them by itself. The Python processes among
  them measure themselves (`perfsuite.worker.startup`).
- Ranks that train nothing are forked from this process.

Before this process ends by a signal or an error, it kills every process of the job, whoever started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import FileError
from perfsuite.frameworks.base import Command, framework_of
from perfsuite.launch import rendezvous, stacks
from perfsuite.launch.lease import Lease
from perfsuite.launch.processes import JOB_MARK, marked, sweep
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

NODE_VARIABLE = "PERFSUITE_NODE_VARIABLE"
"""Environment variable: the name of the scheduler's variable that holds the number of this node, from 0 on.
Without it this is node 0."""
DRIVER_DIED = signal.SIGUSR2
"""The signal that the kernel sends when the driver dies. Not SIGTERM, which torch elastic handles itself."""
POLL_S = 0.1
"""Seconds between two looks at the ranks of a script."""
GRACE_S = 5
"""Seconds in which the other ranks of a script may end by themselves, and say why, when one has failed."""


@dataclass(frozen=True)
class Place:
    """The part of a job that runs on this node."""

    run_dir: RunDir
    request: CaseFile
    node: int = 0
    """The number of this node, from 0 on."""

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
    for number in (signal.SIGTERM, DRIVER_DIED):
        signal.signal(number, _end_the_job)
    leash.die_with_parent(DRIVER_DIED)
    os.environ[ANCESTOR_PID] = str(os.getpid())
    os.environ[NODE] = os.environ.get(os.environ.get(NODE_VARIABLE, ""), "0")
    run_dir = RunDir(Path(path))
    try:
        place = Place(run_dir, documents.read(run_dir.case, CaseFile), int(os.environ[NODE]))
        failures = _watched(place)
    except BaseException:
        _sweep()
        raise
    return 1 if failures else 0


def _watched(place: Place) -> list[Failure]:
    """Run the job beside a sampler of the node's health, as long as the driver lives and wants it."""
    from perfsuite.launch.health import Watch, sampler  # needs psutil: ranks load this module and must not

    per_node, device = place.per_node, place.request.device
    watch = Watch(sampler(device, per_node), place.run_dir.progress)

    def write(failures: Sequence[Failure] = ()) -> None:
        told = LaunchFile(host=socket.gethostname(), failures=tuple(failures), health=watch.finish())
        documents.write(place.run_dir.launch(place.node), told)

    def end() -> None:
        stacks.ask(place.run_dir, marked(os.environ.get(JOB_MARK, "")), place.node)
        write()
        _end("the driver ends the job")

    Lease(place.run_dir.lease, end, _end).hold()
    watch.begin()
    failures = _launch(place)
    write(failures)
    return failures


def _launch(place: Place) -> list[Failure]:
    case = place.request.case
    place.run_dir.files.mkdir(exist_ok=True)  # another node may have made it
    os.environ[FILES] = str(place.run_dir.files)
    plan = framework_of(case).plan(case)
    given = os.environ.get(JOB_VARIABLES, "").split()
    ours = {**_of_this_node(place), **plan.environment}  # by the perfsuite that this process has
    for name, value in ours.items():
        if name not in given:
            os.environ[name] = value.replace(LAUNCH_DIR, str(place.run_dir.files))
    if plan.command is not None:
        return _run(plan.command, place)
    return _elastic(place) if plan.needs_torch else _fork(place)


def _of_this_node(place: Place) -> dict[str, str]:
    """Return the variables that depend on the node: each rank's share of its cores, and the interface.

    On a GPU, what a user has set wins. On a CPU it does not: the number of threads is part of what is
    measured there.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // place.per_node))}
    if place.request.device == "cuda":
        return {name: value for name, value in threads.items() if name not in os.environ}
    return threads if place.nodes > 1 else {**threads, "GLOO_SOCKET_IFNAME": "lo"}


def _sweep() -> None:
    """Kill every process of the job, whatever session it is in."""
    if JOB_MARK in os.environ:
        sweep(os.environ[JOB_MARK])


def _end_the_job(number: int, frame: Any) -> NoReturn:
    _sweep()
    os._exit(1)


def _end(why: str) -> NoReturn:
    """End the job on this node from any thread, and tell why in the log."""
    print(f"perfsuite: {why}", flush=True)
    _sweep()
    os._exit(1)


def _elastic(place: Place) -> list[Failure]:
    """Start ranks of perfsuite's worker with torch's elastic launcher."""
    run_dir = place.run_dir
    os.environ.update(_model_code(place.request))
    multiprocessing.set_forkserver_preload(["perfsuite.launch.preload"])
    forkserver.ensure_running()  # it imports torch while this process does
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    endpoint, store = rendezvous.open_store(run_dir, place.node, place.nodes)
    config = LaunchConfig(
        min_nodes=place.nodes,
        max_nodes=place.nodes,
        nproc_per_node=place.per_node,
        run_id=run_dir.path.name,
        rdzv_backend="static",
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": place.node, "timeout": rendezvous.MEET_S},
        local_addr="127.0.0.1" if place.nodes == 1 else None,
        max_restarts=0,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir.path / "elastic")),
    )
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:  # torch 2.12 and newer
        config.shutdown_timeout = 5
    try:
        elastic_launch(config, worker.recorded)(str(run_dir.path))
    except ChildFailedError as error:
        return [_failure(rank, failure) for rank, failure in error.failures.items()]
    finally:
        del store  # ranks met there until now
    return []


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


def _failure(rank: int, failure: Any) -> Failure:
    """Convert torch elastic's `ProcessFailure`, whose message is a text or the content of an error file."""
    traceback = failure.message
    if isinstance(traceback, dict):
        traceback = traceback.get("extraInfo", {}).get("py_callstack") or traceback.get("message")
    signal = f" ({failure.signal_name()})" if failure.exitcode < 0 else ""
    return Failure(
        kind="crash",
        message=f"exit code {failure.exitcode}{signal}",
        rank=rank,
        traceback=str(traceback),
        at=failure.timestamp,
    )


def _run(command: Command, place: Place) -> list[Failure]:
    """Run a command whose Python processes find `perfsuite.worker.startup`, once or once per rank."""
    startup = str(Path(worker.__file__).parent / "startup")
    first = {"PYTHONPATH": startup, "PATH": str(Path(sys.executable).parent)}
    paths = {
        name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in first.items()
    }
    environment = {**os.environ, **paths, RUN_DIR: str(place.run_dir.path)}
    with contextlib.ExitStack() as until_the_end:
        if command.starts_ranks and place.nodes == 1:
            return _run_once(command, place.run_dir, environment)
        endpoint = until_the_end.enter_context(_reserved(place))
        if command.starts_ranks:
            return _run_once(command, place.run_dir, {**environment, **_meeting(endpoint)})
        ranks = {
            rank: _start(
                command,
                place.run_dir,
                {**environment, **_rank(place, rank, endpoint)},
                place.run_dir.rank_log(rank),
            )
            for rank in place.ranks
        }
        return _wait(ranks, place.run_dir, place.request)


@contextlib.contextmanager
def _reserved(place: Place) -> Iterator[str]:
    """Yield where the ranks meet, as `HOST:PORT`. Node 0 chooses a port that is free."""
    if place.node > 0:
        yield rendezvous.read_endpoint(place.run_dir)
        return
    host = rendezvous.host_name(place.nodes)
    with socket.socket() as reserved:  # bound: nobody else is given the port before rank 0 listens to it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
        endpoint = f"{host}:{reserved.getsockname()[1]}"
        rendezvous.tell_endpoint(place.run_dir, endpoint)
        yield endpoint


def _meeting(endpoint: str) -> dict[str, str]:
    host, _, port = endpoint.rpartition(":")
    return {"MASTER_ADDR": host, "MASTER_PORT": port}


def _run_once(command: Command, run_dir: RunDir, environment: Mapping[str, str]) -> list[Failure]:
    code = _start(command, run_dir, environment, None).wait()
    ended = f"the command ended with {_exit_code(code)}"
    if not code and run_dir.all_ranks():
        return []
    if not code:
        ended += ", and no process that it started made an optimizer step that could be seen"
    return [Failure(kind="crash", message=ended, at=time.time())]


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
    stay = tuple(each + os.sep for each in (sys.prefix, worktree))
    is_moved = worktree and word.startswith(top + os.sep) and not f"{word}{os.sep}".startswith(stay)
    return worktree + word.removeprefix(top) if is_moved else word


def _rank(place: Place, rank: int, endpoint: str) -> dict[str, str]:
    """Return torchrun's environment variables (torch's docs, "torchrun", "Environment Variables")."""
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
        **_meeting(endpoint),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "perfsuite",
    }


def _wait(running: dict[int, subprocess.Popen[bytes]], run_dir: RunDir, request: CaseFile) -> list[Failure]:
    """Wait until every rank has ended; once one has failed, no longer than `GRACE_S`."""
    failures = []
    until = float("inf")
    while running and time.monotonic() < until:
        time.sleep(POLL_S)
        ended = {rank: code for rank, each in running.items() if (code := each.poll()) is not None}
        for rank, code in ended.items():
            del running[rank]
            is_measured = _is_measured(run_dir, rank)
            if code or not run_dir.rank(rank).exists():
                failures.append(_ended(rank, code, request, is_reported=run_dir.rank(rank).exists()))
            if not is_measured:
                until = min(until, time.monotonic() + GRACE_S)
    for process in running.values():
        process.kill()
    return failures


def _is_measured(run_dir: RunDir, rank: int) -> bool:
    try:
        return documents.read(run_dir.rank(rank), RankReport).failure is None
    except FileError:
        return False


def _ended(rank: int, code: int, request: CaseFile, *, is_reported: bool) -> Failure:
    message = _exit_code(code)
    if not is_reported:
        message = f"the script ended after 0 of {request.case.total_steps} optimizer steps, with {message}"
        if not code:
            message += ": it does not train, or not with an optimizer of torch"
    return Failure(kind="crash", message=message, rank=rank, at=time.time())


def _exit_code(code: int) -> str:
    return f"exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")


def _fork(place: Place) -> list[Failure]:
    """Fork ranks that need no torch, which takes milliseconds."""
    context = multiprocessing.get_context("fork")
    processes = {rank: context.Process(target=_forked, args=(place, rank)) for rank in place.ranks}
    for process in processes.values():
        process.start()
    for process in processes.values():
        process.join()
    return [
        Failure(kind="crash", message=_exit_code(process.exitcode), rank=rank)
        for rank, process in processes.items()
        if process.exitcode
    ]


def _forked(place: Place, rank: int) -> None:
    world = place.request.case.topology.world_size
    local_rank = rank - place.ranks.start
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(world))
    with contextlib.suppress(KeyboardInterrupt):
        worker.logged(str(place.run_dir.path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
