"""Launches and dry runs whose processes are forked from one that has imported torch: 4 to 6 CPU-seconds less.

A test process has a server (`python -m tests.warm`) for CPUs and one for pretended GPUs. When asked for an
agent or a rank of a dry run, it forks one, which becomes a child of the test process as if started by it.
Ranks of scripts, cases without torch, other Pythons, and variables that are read on import are not forked.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from perfsuite.dry import driver as dry
from perfsuite.launch import driving
from perfsuite.node.processes import JOB_MARK
from perfsuite.worker.leash import PR_SET_CHILD_SUBREAPER

ROOT = Path(__file__).parent.parent
AGENT, DRY = "perfsuite.node.agent", "perfsuite.dry"
MODULES = (
    "torch",
    "perfsuite.dry.rank",
    "perfsuite.worker.main",
    "lightning.pytorch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    JOB_MARK: "0" * 32,  # as long as a real one, which is written over it
}
"""Those that are read on import, and the mark of a job."""
READ_ON_IMPORT = ("ACCELERATE_", "CUDA_", "HF_", "LD_", "PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_")
READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")
"""How those begin that torch reads at each use: torchrun's, and what torch itself sets in some processes."""
LOCK = threading.Lock()
FIRST = dict(os.environ)
"""The environment before any test has changed it."""


@contextlib.contextmanager
def forked_launches() -> Iterator[None]:
    """Inside of it agents and ranks of dry runs are forked."""
    instead = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
    with mock.patch.object(dry, "subprocess", instead), mock.patch.object(driving, "subprocess", instead):
        yield


class _Forked:
    """What perfsuite uses of a `Popen`."""

    def __init__(self, pid: int, stdin: Any) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _popen(command: list[str], **options: Any) -> Any:
    if not can_be_forked(command, options["env"]):
        return subprocess.Popen(command, **options)
    job = {
        "module": command[2],
        "arguments": command[3:],
        "environment": dict(options["env"]),
        "directory": str(options["cwd"] or Path.cwd()),
    }
    theirs, ours = os.pipe()
    files = [theirs, options["stdout"].fileno()]
    with LOCK:  # two arms are run dry at the same time
        pid = _fork(_server("--gpu" in command), job, files)
    os.close(theirs)
    if options["stdin"] == subprocess.PIPE:
        return _Forked(pid, os.fdopen(ours, "wb"))
    os.close(ours)
    return _Forked(pid, None)


def can_be_forked(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a process that has imported torch already can become that of `command`."""
    if command[:2] != [sys.executable, "-m"] or command[2] not in (AGENT, DRY):
        return False
    server = {**FIRST, **VARIABLES}
    names = {name for name in {*environment, *server} if name.startswith(READ_ON_IMPORT)}
    if any(environment.get(name) != server.get(name) for name in names if not name.startswith(READ_LATER)):
        return False
    if command[2] == DRY:
        return True
    request = json.loads((Path(command[3]) / "case.json").read_text(encoding="utf-8"))
    has_torch = request["case"]["framework"]["name"] not in ("fake", "script")
    return has_torch and request["device"] == "cpu" and not request.get("preflight")


def _fork(server: socket.socket, job: Mapping[str, Any], files: Sequence[int]) -> int:
    """Have a process forked that is a child of this one. Returns its number."""
    adopt = ctypes.CDLL(None).prctl
    adopt(PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(server, [json.dumps(job).encode()], list(files))
        return int(server.recv(64))
    finally:
        adopt(PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def _server(gpu: bool) -> socket.socket:
    """A connection to a server, which ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(its.fileno()), *(["--gpu"] if gpu else [])],
            cwd=ROOT,
            env={**FIRST, **VARIABLES},
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    server.returncode = 0  # nobody waits for it, and nobody need be warned of that
    atexit.register(ours.close)
    return ours


def _serve(connection: socket.socket, *, gpu: bool) -> None:
    from perfsuite.dry import guard

    if gpu:
        guard.load()
        guard.load = lambda: None  # it is loaded, and so is torch
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(connection, 2**20, 2)
        if not message:
            return
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if os.fork() == 0:
                _run(json.loads(message), connection, parent, *files)
            os._exit(0)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def _run(job: Mapping[str, Any], connection: socket.socket, between: int, stdin: int, log: int) -> NoReturn:
    """Become an agent, or a rank of a dry run, once the test process has adopted this one."""
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.001)
    connection.send(b"%d" % os.getpid())
    connection.close()
    for file, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    os.closerange(3, 1024)
    environment = job["environment"]
    os.environ.clear()
    os.environ.update(environment)
    _mark(environment.get(JOB_MARK, ""))
    os.chdir(job["directory"])
    sys.path[0] = job["directory"]
    sys.argv = [job["module"], *job["arguments"]]
    util.spawnv_passfds = functools.partial(_spawn, util.spawnv_passfds)
    status: Any = 1
    try:
        status = _main(job["module"])()
    except SystemExit as error:
        status = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    os._exit(int(status or 0))


def _main(name: str) -> Callable[[], Any]:
    if name == DRY:
        from perfsuite.dry import __main__ as dry_rank

        return dry_rank.main
    agent = sys.modules["__main__"] = importlib.import_module(AGENT)
    return functools.partial(agent.main, sys.argv[1])


def _mark(mark: str) -> None:
    """Show the mark of the job in /proc/PID/environ, which is the memory that a process began with."""
    *_, start, end = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[:49]
    place = int(start) + ctypes.string_at(int(start), int(end) - int(start)).index(
        VARIABLES[JOB_MARK].encode()
    )
    ctypes.memmove(place, mark.encode(), len(mark))


def _spawn(spawn: Callable[..., int], path: Any, arguments: Sequence[str], files: Sequence[int]) -> int:
    """As `spawnv_passfds`, but fork the server of an agent's ranks, which need not import torch again."""
    if "multiprocessing.forkserver" not in arguments[-1]:
        return spawn(path, arguments, files)
    if (pid := os.fork()) == 0:
        for number in set(range(3, 1024)) - set(files):
            with contextlib.suppress(OSError):
                os.close(number)
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # which it reads on import
        exec(arguments[-1])
        os._exit(0)
    return pid


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), gpu="--gpu" in sys.argv)
