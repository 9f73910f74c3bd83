"""The launcher process: starts every rank of one job on this machine, and waits for them.

Run as `python -m perfsuite.launch.agent RUNDIR`. Imports torch only inside functions, and no pytest.

It is a process of its own because torch's elastic launcher takes over signals and imports torch. There are
three ways to start ranks:

- Ranks of perfsuite's own worker are forked by a server that has imported torch once
  (`perfsuite.launch.preload`). They stay in this process's group, so that one `killpg` ends them all; the
  subprocesses of torchrun, each in a session of its own, would survive that.
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
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

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
"""The signal that the kernel sends when the driver dies. Not SIGTERM, which torch elastic handles itself."""
POLL_S = 0.1
"""Seconds between two looks at the ranks of a script."""
GRACE_S = 5
"""Seconds in which the other ranks of a script may end by themselves, and say why, when one has failed."""


def main(path: str) -> int:
    """Run the job to its end and write `launch.json`. Return the exit status: 0 if every rank ended well."""
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
    request = documents.read(run_dir.case, CaseFile)
    run_dir.files.mkdir()
    os.environ[FILES] = str(run_dir.files)
    plan = framework_of(request.case).plan(request.case)
    for name in plan.environment:
        os.environ[name] = os.environ[name].replace(LAUNCH_DIR, str(run_dir.files))
    if plan.command is not None:
        failures = _run(plan.command, run_dir, request)
    elif plan.needs_torch:
        failures = _elastic(run_dir, request)
    else:
        failures = _fork(run_dir, request)
    documents.write(run_dir.launch, LaunchFile(failures=tuple(failures)))
    return failures


def _sweep() -> None:
    """Kill every process of the job, whatever session it is in."""
    if JOB_MARK in os.environ:
        sweep(os.environ[JOB_MARK])


def _end_the_job(number: int, frame: Any) -> NoReturn:
    _sweep()
    os._exit(1)


def _elastic(run_dir: RunDir, request: CaseFile) -> list[Failure]:
    """Start ranks of perfsuite's worker with torch's elastic launcher."""
    multiprocessing.set_forkserver_preload(["perfsuite.launch.preload"])
    forkserver.ensure_running()  # it imports torch while this process does
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=request.case.topology.processes_per_node,
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


def _run(command: Command, run_dir: RunDir, request: CaseFile) -> list[Failure]:
    """Run a command whose Python processes find `perfsuite.worker.startup`, once or once per rank."""
    startup = str(Path(worker.__file__).parent / "startup")
    first = {"PYTHONPATH": startup, "PATH": str(Path(sys.executable).parent)}
    paths = {
        name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in first.items()
    }
    environment = {**os.environ, **paths, RUN_DIR: str(run_dir.path)}
    if command.starts_ranks:
        return _run_once(command, run_dir, environment)
    with socket.socket() as reserved:  # bound: nobody else is given the port before rank 0 listens to it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        world, port = request.case.topology.world_size, reserved.getsockname()[1]
        ranks = {
            rank: _start(
                command, run_dir, {**environment, **_rank(rank, world, port)}, run_dir.rank_log(rank)
            )
            for rank in range(world)
        }
        return _wait(ranks, run_dir, request)


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
            [word.replace(LAUNCH_DIR, str(run_dir.files)) for word in command.words],
            cwd=command.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if log is None else files.enter_context(log.open("ab")),
            stderr=None if log is None else subprocess.STDOUT,
            preexec_fn=leash.die_with_parent,
        )


def _rank(rank: int, world: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables (torch's docs, "torchrun", "Environment Variables")."""
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


def _fork(run_dir: RunDir, request: CaseFile) -> list[Failure]:
    """Fork ranks that need no torch, which takes milliseconds."""
    context = multiprocessing.get_context("fork")
    world = request.case.topology.world_size
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
