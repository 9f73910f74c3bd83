"""The launcher process: starts every rank of one job on this machine. `python -m perfsuite.launcher RUNDIR`.

It is a process of its own because torch's elastic launcher owns signals and imports torch. Ranks are started
through a fork server that has imported torch once (`perfsuite.preload`), inside this process's group: one
`killpg` ends them all, which torchrun's own subprocesses, each a session of its own, would survive. Where the
case is a command that starts ranks of its own, this runs it, and its Python processes measure themselves
(`perfsuite.startup`). Never imports pytest.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

import perfsuite
from perfsuite import data, worker
from perfsuite.case import CaseFile
from perfsuite.framework import Command
from perfsuite.launch import JOB_MARK, sweep
from perfsuite.result import Failure, LaunchFile
from perfsuite.rundir import RunDir


def main(path: str) -> int:
    """Run the job to its end and write `launch.json`. Exit status 0 if every rank ended well."""
    worker.die_with_parent()
    os.environ[worker.ANCESTOR_PID] = str(os.getpid())
    run_dir = RunDir(Path(path))
    asked = data.read(run_dir.case, CaseFile)
    command = asked.case.framework.launched_by()
    if command is not None:
        failures = _run(command, run_dir)
    elif asked.case.framework.needs_torch:
        failures = _elastic(run_dir, asked)
    else:
        failures = _fork(run_dir, asked)
    data.write(run_dir.launch, LaunchFile(failures=tuple(failures)))
    return 1 if failures else 0


def _elastic(run_dir: RunDir, asked: CaseFile) -> list[Failure]:
    multiprocessing.set_forkserver_preload(["perfsuite.preload"])
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


def _run(command: Command, run_dir: RunDir) -> list[Failure]:
    """Run a command whose Python processes find `perfsuite.startup` when they start."""
    signal.signal(signal.SIGTERM, _end_the_job)
    worker.die_with_parent(signal.SIGTERM)
    startup = str(Path(perfsuite.__file__).parent / "startup")
    first = {"PYTHONPATH": startup, "PATH": str(Path(sys.executable).parent)}
    paths = {
        name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in first.items()
    }
    code = subprocess.call(
        command.words,
        cwd=command.directory,
        env={**os.environ, **paths, worker.RUN_DIR: str(run_dir.path)},
    )
    ended = f"the command ended with exit code {code}"
    if not code and any(run_dir.path.glob("rank-*.json")):
        return []
    if not code:
        ended += ", and no process that it started made an optimizer step that could be seen"
    return [Failure(kind="crash", message=ended, at=time.time())]


def _end_the_job(number: int, frame: Any) -> NoReturn:
    """The driver has been killed: what the command started may be in any session."""
    sweep(os.environ[JOB_MARK])
    os._exit(1)


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
