"""Dry runs on CPUs whose processes are forked from one that has imported torch: 2 CPU-seconds each, not 6."""

import atexit
import contextlib
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from perfsuite.dry import __main__ as dry_rank
from perfsuite.dry import driver as dry

ROOT = Path(__file__).parent.parent
MODULES = (
    "perfsuite.dry.rank",
    "torch",
    "accelerate",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Those that are read when something is imported."""
FIRST = dict(os.environ)
"""The environment before any test has changed it."""


@contextlib.contextmanager
def forked_dry_runs() -> Iterator[None]:
    """Inside of it the ranks of dry runs are forked from a server (`python -m tests.warm`)."""
    instead = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
    with mock.patch.object(dry, "subprocess", instead):
        yield


def _popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    if "--gpu" in command:  # torch must not be there before the GPU is pretended
        return subprocess.Popen(command, **options)
    job = {"arguments": command[2:], "environment": options["env"], "directory": str(Path.cwd())}
    status_out, status_in = os.pipe()
    files = [options["stdout"].fileno(), status_in]
    socket.send_fds(_server(), [json.dumps(job).encode()], files)
    stand_in = subprocess.Popen(  # a child of this process, which ends as the rank does
        ["sh", "-c", 'read status; exit "${status:-1}"'], stdin=status_out, start_new_session=True
    )
    for file in (status_out, status_in):
        os.close(file)
    return stand_in


@functools.cache
def _server() -> socket.socket:
    """A connection to a server, which ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(its.fileno())],
            cwd=ROOT,
            env={**FIRST, **VARIABLES},
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    server.returncode = 0  # nobody waits for it, and nobody need be warned of that
    atexit.register(ours.close)
    return ours


def _serve(connection: socket.socket) -> None:
    for name in MODULES:
        importlib.import_module(name)
    while True:
        message, files, _, _ = socket.recv_fds(connection, 2**20, 2)
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            _run(json.loads(message), *files)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _run(job: dict[str, Any], log: int, told: int) -> NoReturn:
    """Run a rank in a process of its own, and tell the exit status."""
    if (child := os.fork()) != 0:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(told, b"%d\n" % (status if status >= 0 else 128 - status))
        os._exit(0)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(told)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["directory"])
    sys.argv = job["arguments"]
    try:
        dry_rank.main()  # it ends this process
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
