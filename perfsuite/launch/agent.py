"""The agent: a process that starts every rank of one job on this machine.

Run as `python -m perfsuite.launch.agent RUNDIR`.

It is a process of its own because torch's elastic launcher owns signals and imports torch. Ranks of ours are
started through a fork server that has imported torch once (`perfsuite.launch.preload`), inside this
process's group: one `killpg` ends them all, which torchrun's own subprocesses, each a session of its own,
would survive. A script's ranks are plain processes in which nothing of ours comes before its first line, and
a case may be a command that starts ranks of its own: either's Python processes measure themselves
(`perfsuite.worker.startup`). Whoever started what, this sweeps up the whole job before it dies of a signal
or an error. Never imports pytest.
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
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

import perfsuite
from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import FileError
from perfsuite.frameworks.base import Command, framework_of
from perfsuite.launch.processes import JOB_MARK, sweep
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import ANCESTOR_PID, FILES, LAUNCH_DIR, RUN_DIR, RunDir
from perfsuite.worker import leash
from perfsuite.worker import main as worker

DRIVER_DIED = signal.SIGUSR2
"""Not SIGTERM, which torch elastic takes for itself."""
POLL_S = 0.1
GRACE_S = 5
"""For the other ranks of a script to end by themselves, and say why, when one has failed."""


def main(path: str) -> int:
    """Run the job to its end and write `launch.json`. Exit status 0 if every rank ended well."""
    for number in (signal.SIGTERM, DRIVER_DIED):
        signal.signal(number, _end_the_job)
    leash.die_with_parent(DRIVER_DIED)
    os.environ[ANCESTOR_PID] = str(os.getpid())
    try:
        failures = _launch(RunDir(Path(path)))
    except BaseException:
        _sweep()
        raise
    return 1 if failures else 0


def _launch(run_dir: RunDir) -> list[Failure]:
    asked = documents.read(run_dir.case, CaseFile)
    run_dir.files.mkdir()
    os.environ[FILES] = str(run_dir.files)
    plan = framework_of(asked.case).plan(asked.case)
    for name in plan.environment:
        os.environ[name] = os.environ[name].replace(LAUNCH_DIR, str(run_dir.files))
    if plan.command is not None:
        failures = _run(plan.command, run_dir, asked)
    elif plan.needs_torch:
        failures = _elastic(run_dir, asked)
    else:
        failures = _fork(run_dir, asked)
    documents.write(run_dir.launch, LaunchFile(failures=tuple(failures)))
    return failures


def _sweep() -> None:
    """Kill what this has started, in whatever session it is."""
    if JOB_MARK in os.environ:
        sweep(os.environ[JOB_MARK])


def _end_the_job(number: int, frame: Any) -> NoReturn:
    _sweep()
    os._exit(1)


def _elastic(run_dir: RunDir, asked: CaseFile) -> list[Failure]:
    multiprocessing.set_forkserver_preload(["perfsuite.launch.preload"])
    forkserver.ensure_running()  # it imports torch while this process does
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=asked.case.topology.processes_per_node,
        run_id=run_dir.path.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
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
    return []


def _failure(rank: int, told: Any) -> Failure:
    """Out of torch elastic's `ProcessFailure`, whose message is a text or the content of an error file."""
    traceback = told.message
    if isinstance(traceback, dict):
        traceback = traceback.get("extraInfo", {}).get("py_callstack") or traceback.get("message")
    signal = f" ({told.signal_name()})" if told.exitcode < 0 else ""
    return Failure(
        kind="crash",
        message=f"exit code {told.exitcode}{signal}",
        rank=rank,
        traceback=str(traceback),
        at=told.timestamp,
    )


def _run(command: Command, run_dir: RunDir, asked: CaseFile) -> list[Failure]:
    """Run what finds `perfsuite.worker.startup` when its Python processes start."""
    startup = str(Path(perfsuite.__file__).parent / "worker" / "startup")
    first = {"PYTHONPATH": startup, "PATH": str(Path(sys.executable).parent)}
    paths = {
        name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in first.items()
    }
    environment = {**os.environ, **paths, RUN_DIR: str(run_dir.path)}
    if command.starts_ranks:
        return _run_once(command, run_dir, environment)
    with socket.socket() as held:  # bound, so that nobody else is given the port before rank 0 listens to it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        world, port = asked.case.topology.world_size, held.getsockname()[1]
        ranks = {
            rank: _start(
                command, run_dir, {**environment, **_rank(rank, world, port)}, run_dir.rank_log(rank)
            )
            for rank in range(world)
        }
        return _wait(ranks, run_dir, asked)


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
    """With its output in `log`, or where this process's own goes."""
    with contextlib.ExitStack() as files:
        return subprocess.Popen(
            [word.replace(LAUNCH_DIR, str(run_dir.files)) for word in command.words],
            cwd=command.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if log is None else files.enter_context(log.open("ab")),
            stderr=None if log is None else subprocess.STDOUT,
            preexec_fn=leash.die_with_parent,
        )


def _rank(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment variables of torchrun (torch's docs, "torchrun", "Environment Variables")."""
    return {
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(world),
        "WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "perfsuite",
    }


def _wait(running: dict[int, subprocess.Popen[bytes]], run_dir: RunDir, asked: CaseFile) -> list[Failure]:
    """Until every rank has ended; once one has failed, no longer than `GRACE_S`."""
    failures = []
    until = float("inf")
    while running and time.monotonic() < until:
        time.sleep(POLL_S)
        ended = {rank: code for rank, each in running.items() if (code := each.poll()) is not None}
        for rank, code in ended.items():
            del running[rank]
            is_measured = _is_measured(run_dir, rank)
            if code or not run_dir.rank(rank).exists():
                failures.append(_ended(rank, code, asked, is_reported=run_dir.rank(rank).exists()))
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


def _ended(rank: int, code: int, asked: CaseFile, *, is_reported: bool) -> Failure:
    message = _exit_code(code)
    if not is_reported:
        message = f"the script ended after 0 of {asked.case.total_steps} optimizer steps, with {message}"
        if not code:
            message += ": it does not train, or not with an optimizer of torch"
    return Failure(kind="crash", message=message, rank=rank, at=time.time())


def _exit_code(code: int) -> str:
    return f"exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")


def _fork(run_dir: RunDir, asked: CaseFile) -> list[Failure]:
    """For a framework without torch: plain forks, milliseconds each."""
    context = multiprocessing.get_context("fork")
    world = asked.case.topology.world_size
    processes = [context.Process(target=_forked, args=(run_dir, rank, world)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [
        Failure(kind="crash", message=f"exit code {process.exitcode}", rank=rank)
        for rank, process in enumerate(processes)
        if process.exitcode
    ]


def _forked(run_dir: RunDir, rank: int, world: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    with contextlib.suppress(KeyboardInterrupt):
        worker.logged(str(run_dir.path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
