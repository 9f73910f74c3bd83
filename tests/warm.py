"""Forks the processes of launches and dry runs from a process that has imported torch.

This saves 4 to 6 CPU-seconds for each process. A test process has four servers (`python -m tests.warm`): for
CPUs, for pretended GPUs, for scripts and for DeepSpeed. If a test starts an agent or a rank of a dry run, a
server forks the process. This process becomes a child of the test process, as if the test process had started
it. The agent of a script forks its ranks. Usually hooks are attached when torch is imported. Here they are
attached before the script begins. Four kinds of processes are not forked: scripts that a command starts,
cases without torch, other Pythons, and processes in which variables that are read on import have other
values.
"""

import atexit
import builtins
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
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, NoReturn
from unittest import mock

from perfsuite.dry import driver as dry
from perfsuite.launch import driving
from perfsuite.node.processes import JOB_MARK
from perfsuite.worker.leash import ENDING, PR_SET_CHILD_SUBREAPER

PACKAGES = "TEST_PACKAGES"
"""Variable with the directory of a test's packages, which is in PYTHONPATH, too."""
ROOT = Path(__file__).parent.parent
AGENT = "perfsuite.node.agent"
DRY = "perfsuite.dry"
Kind = Literal["cpu", "gpu", "script", "deepspeed"]
OF_FRAMEWORKS = (
    "torch",
    "perfsuite.dry.rank",
    "perfsuite.worker.main",
    "lightning.pytorch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
MODULES: dict[Kind, Sequence[str]] = {
    "cpu": OF_FRAMEWORKS,
    "gpu": OF_FRAMEWORKS,
    # torch's optimizers import `torch._dynamo` themselves.
    "script": ("torch", "torch._dynamo", "perfsuite.worker.script.attach", "perfsuite.node.health_sampler"),
    "deepspeed": (*OF_FRAMEWORKS, "perfsuite.worker.script.attach", "deepspeed.runtime.engine"),
}
"""The modules that each kind of server imports."""
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    JOB_MARK: "0" * 32,  # as long as the real mark, which overwrites it
}
"""The variables that are read on import, and the mark of a job."""
OF_DEEPSPEED = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(sys.prefix) / "deepspeed")}
"""Further variables of DeepSpeed's server. `make` installs DeepSpeed there, apart from other packages."""
READ_ON_IMPORT = ("ACCELERATE_", "CUDA_", "HF_", "LD_", "PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_")
READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Prefixes of variables that torch reads at each use.

They belong to torchrun, or perfsuite sets them for each launch, or torch sets them itself.
"""
LOCK = threading.Lock()
FIRST = dict(os.environ)
"""The environment before any test has changed it."""


@contextlib.contextmanager
def forked_launches() -> Iterator[None]:
    """Fork agents and ranks of dry runs inside this context."""
    instead = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
    with mock.patch.object(dry, "subprocess", instead), mock.patch.object(driving, "subprocess", instead):
        yield


class _Forked:
    """The part of `Popen` that perfsuite uses."""

    def __init__(self, pid: int, stdin: Any) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _popen(command: list[str], **options: Any) -> Any:
    kind = kind_of(command, options["env"])
    if kind is None:
        return subprocess.Popen(command, **options)
    job = {
        "module": command[2],
        "arguments": command[3:],
        "environment": dict(options["env"]),
        "directory": str(options["cwd"] or Path.cwd()),
    }
    theirs, ours = os.pipe()
    files = [theirs, options["stdout"].fileno()]
    with LOCK:  # two arms can have dry runs at the same time
        pid = _fork(_server(kind), job, files)
    os.close(theirs)
    if options["stdin"] == subprocess.PIPE:
        return _Forked(pid, os.fdopen(ours, "wb"))
    os.close(ours)
    return _Forked(pid, None)


def kind_of(command: Sequence[str], environment: Mapping[str, str]) -> Kind | None:
    """Return which server can fork the process of `command`; None if a new process must be started."""
    if command[:2] != [sys.executable, "-m"] or command[2] not in (AGENT, DRY):
        return None
    if command[2] == DRY:
        kind: Kind = "gpu" if "--gpu" in command else "cpu"
        return kind if _reads_the_same(environment, kind) else None
    request = json.loads((Path(command[3]) / "case.json").read_text(encoding="utf-8"))
    framework = request["case"]["framework"]
    if framework["name"] == "fake" or request["device"] != "cpu" or request.get("preflight"):
        return None
    if framework["name"] == "script" and framework.get("path") is None:
        return None
    kinds: tuple[Kind, Kind] = ("script" if framework["name"] == "script" else "cpu", "deepspeed")
    return next((kind for kind in kinds if _reads_the_same(environment, kind)), None)


def _reads_the_same(environment: Mapping[str, str], kind: Kind) -> bool:
    """Whether the server has the same values of all variables that are read on import.

    A forked process gets the packages of a test later.
    """
    server = _environment(kind)
    if PACKAGES in environment:
        paths = environment["PYTHONPATH"].split(os.pathsep)
        paths.remove(environment[PACKAGES])
        environment = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
        server.setdefault("PYTHONPATH", "")
    names = {name for name in {*environment, *server} if name.startswith(READ_ON_IMPORT)}
    return all(environment.get(name) == server.get(name) for name in names if not name.startswith(READ_LATER))


def _environment(kind: Kind) -> dict[str, str]:
    """Return the variables of a server."""
    variables = {**FIRST, **VARIABLES}
    if kind != "deepspeed":
        return variables
    paths = [OF_DEEPSPEED["PYTHONPATH"], FIRST.get("PYTHONPATH")]
    return {**variables, **OF_DEEPSPEED, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _fork(server: socket.socket, job: Mapping[str, Any], files: Sequence[int]) -> int:
    """Have the server fork a process that becomes a child of this one. Returns its process id."""
    adopt = ctypes.CDLL(None).prctl
    adopt(PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(server, [json.dumps(job).encode()], list(files))
        return int(server.recv(64))
    finally:
        adopt(PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def _server(kind: Kind) -> socket.socket:
    """Return a connection to a server, which ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(its.fileno()), kind],
            cwd=ROOT,
            env=_environment(kind),
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    server.returncode = 0  # nobody waits for the server, so Python need not warn that it is still running
    atexit.register(ours.close)
    return ours


def _serve(connection: socket.socket, kind: Kind) -> None:
    from perfsuite.dry import guard

    if kind == "gpu":
        guard.load()
        guard.load = lambda: None  # the hooks are already loaded, and so is torch
    for name in MODULES[kind]:
        importlib.import_module(name)
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(connection, 2**20, 2)
        if not message:
            return
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            if os.fork() == 0:
                _run(json.loads(message), connection, parent, *files)
            os._exit(0)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def _run(job: Mapping[str, Any], connection: socket.socket, between: int, stdin: int, log: int) -> NoReturn:
    """Become an agent, or a rank of a dry run, once the test process has adopted this process."""
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
    if PACKAGES in environment:
        sys.path.insert(1, environment[PACKAGES])
        importlib.import_module("tests.packages").forget()
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
    ranks: Any = importlib.import_module("perfsuite.node.ranks")
    ranks.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _ForkedScript})
    agent = sys.modules["__main__"] = importlib.import_module(AGENT)
    return functools.partial(agent.main, sys.argv[1])


class _ForkedScript:
    """The part of a script's `Popen` that an agent uses. The script is forked from the agent."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _run_script(command, **options)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _run_script(
    command: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    stdin: int,
    stdout: Any,
    stderr: int,
    preexec_fn: Callable[[], None],
) -> NoReturn:
    """Become the process of `python -u FILE ...` in a measured command, with torch already imported."""
    assert command[:2] == [sys.executable, "-u"]
    assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
    for ending in ENDING:
        signal.signal(ending, signal.SIG_DFL)
    preexec_fn()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for opened, number in ((nothing, 0), (stdout.fileno(), 1), (stdout.fileno(), 2)):
        os.dup2(opened, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = list(command[2:])
    startup = env["PYTHONPATH"].partition(os.pathsep)[0]
    sys.path[:1] = [str(Path(sys.argv[0]).resolve().parent), startup]
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    status = 1
    main = sys.modules["__main__"] = ModuleType("__main__")
    file = Path(sys.argv[0])
    vars(main).update(__file__=str(file), __builtins__=builtins)
    try:
        _attach()
        exec(compile(file.read_bytes(), str(file), "exec"), vars(main))
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
    _finalize()
    os._exit(status & 0xFF)


def _attach() -> None:
    """Do what `perfsuite.worker.startup` does when a script has imported torch."""
    from perfsuite.worker.clock import startup_clock
    from perfsuite.worker.script.attach import attach

    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch reads it on import
    startup_clock.begin(startup_clock.IMPORTS)
    startup_clock.pause()
    attach()
    startup_clock.go_on()


def _finalize() -> None:
    """End this process as Python does, but without running destructors."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit:
        pass
    sys.stdout.flush()


def _mark(mark: str) -> None:
    """Make /proc/PID/environ show the job's mark. It shows the memory of a process's first environment."""
    *_, start, end = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[:49]
    place = int(start) + ctypes.string_at(int(start), int(end) - int(start)).index(
        VARIABLES[JOB_MARK].encode()
    )
    ctypes.memmove(place, mark.encode(), len(mark))


def _spawn(spawn: Callable[..., int], path: Any, arguments: Sequence[str], files: Sequence[int]) -> int:
    """Like `spawnv_passfds`, but forks the server of an agent's ranks, so it need not import torch again."""
    if "multiprocessing.forkserver" not in arguments[-1]:
        return spawn(path, arguments, files)
    pid = os.fork()
    if pid == 0:
        for number in set(range(3, 1024)) - set(files):
            with contextlib.suppress(OSError):
                os.close(number)
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch reads it on import
        exec(arguments[-1])
        os._exit(0)
    return pid


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])  # type: ignore[arg-type]
