"""Run the Python program of a script's command in this process, as one rank. Worker side; imports torch.

A launcher, such as torchrun, runs but starts no processes: its target is called once, in this process.
"""

import linecache
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch

from perfsuite.case.case import Topology
from perfsuite.dry import imports
from perfsuite.dry.machine import OF_ONE_DEVICE, RANKS_MEET
from perfsuite.errors import DryRunError, MismatchError, ScriptError
from perfsuite.frameworks.common.patches import attribute, module, replace
from perfsuite.node.ranks import rank_variables

PYTHON = re.compile(r"python[\d.]*")
ONE_WORD = re.compile(r"-[bBdEiIOPqsSuvx]+")  # interpreter options without an argument
TWO_WORDS = ("-W", "-X", "--check-hash-based-pycs")


def run(words: Sequence[str], *, rank: int, world_size: int) -> None:
    """Run a command in this process. Raises `DryRunError` if it is not a Python program."""
    _replace_launchers(rank, world_size)
    _run(words)


def _run(words: Sequence[str]) -> None:
    program, *rest = words
    if PYTHON.fullmatch(Path(program).name) is None:
        _run_file(_python_file(program), rest)
        return
    while rest and (ONE_WORD.fullmatch(rest[0]) or rest[0] in TWO_WORDS):
        del rest[: 2 if rest[0] in TWO_WORDS else 1]
    if not rest or rest[0] == "-c":
        raise DryRunError(
            f"a dry run needs a Python file or module, but {' '.join(words)[:80]!r} names neither"
        )
    if rest[0] != "-m":
        _run_file(rest[0], rest[1:])
        return
    sys.argv = rest[1:]
    sys.path[0] = str(Path.cwd())
    runpy.run_module(rest[1], run_name="__main__", alter_sys=True)


def _python_file(program: str) -> str:
    """Return `program` if it is a Python file, such as a console script that pip installs.

    Raises `DryRunError` if it is not.
    """
    with Path(program).open("rb") as file:
        first = file.readline(200)
    if not first.startswith(b"#!") or b"python" not in first:
        raise DryRunError(
            f"a dry run can only run Python programs, but the command begins with {program!r}. Give "
            "the script as path= or module=, or a command that starts with python, torchrun or accelerate"
        )
    return program


def _run_file(file: str, arguments: Sequence[str]) -> None:
    if not Path(file).is_file():
        raise ScriptError(f"there is no script {file}")
    sys.argv = [file, *arguments]
    sys.path[0] = str(Path(file).absolute().parent)
    runpy.run_path(file, run_name="__main__")


def _replace_launchers(rank: int, world_size: int) -> None:
    class ElasticLaunch:
        """Replace the class with which torchrun starts the ranks of a node."""

        def __init__(self, config: Any, entrypoint: Any) -> None:
            started = config.max_nodes * config.nproc_per_node
            if started != world_size:
                raise MismatchError(
                    f"world_size: the case asks for {world_size} ranks, but the command starts {started} "
                    f"({config.max_nodes} x {config.nproc_per_node}). Give the same number in both"
                )
            self._entrypoint = entrypoint
            self._variables = _elastic_variables(config, rank)

        def __call__(self, *arguments: Any) -> None:
            os.environ.update(self._variables)
            if callable(self._entrypoint):
                self._entrypoint(*arguments)
            else:
                _run([self._entrypoint, *arguments])

    def spawn(
        function: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, *_: Any, **__: Any
    ) -> None:
        function(rank % nprocs, *args)

    prepare: Any = None  # set when accelerate is imported

    def replace_of_accelerate(package: ModuleType) -> None:
        nonlocal prepare
        prepare = attribute(package, "prepare_simple_launcher_cmd_env")
        replace(package, "prepare_simple_launcher_cmd_env", one_process)

    def one_process(args: Any) -> NoReturn:
        """Run the program in this process.

        The replaced function returns a command, which `accelerate launch` would start in a new process.
        """
        words, environment = prepare(args)
        os.environ.update(environment)
        _run(words)
        raise SystemExit

    imports.when_imported("accelerate.utils", replace_of_accelerate)
    replace(module("torch.distributed.launcher.api"), "elastic_launch", ElasticLaunch)
    replace(torch.multiprocessing, "spawn", spawn)


def _elastic_variables(config: Any, rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, from torchrun's `LaunchConfig`."""
    topology = Topology(nodes=config.max_nodes, processes_per_node=config.nproc_per_node)
    return {
        **rank_variables(topology, rank),
        **RANKS_MEET,
        **OF_ONE_DEVICE,
        "ROLE_NAME": config.role,
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def place(passed: Iterable[tuple[FrameType, int]], *, in_libraries: bool = True) -> str | None:
    """Return the last line of the user's code in these frames, or None if there is none.

    If that line called a library other than torch, the last line in the library is added. Without
    `in_libraries`, None is returned in this case.
    """
    own = None
    library = None
    not_own = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]), "<")
    for frame, line in passed:
        file = frame.f_code.co_filename
        code = linecache.getline(file, line).strip()
        _, installed, inside = file.rpartition("site-packages/")
        if installed and not inside.startswith("torch/"):
            library = f", in {inside}:{line}: {code}"
        elif not installed and not file.startswith(not_own):
            own = f"{os.path.relpath(file)}:{line}: {code}"
            library = None
    if library is not None and not in_libraries:
        return None
    return own and own + (library or "")
