"""Measure any training script without changing it (`worker.script.attach` attaches a clock to the script)."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from perfsuite.case.case import Case
from perfsuite.case.framework import LossRule, Promises, changed_fields
from perfsuite.case.hardware import Machine
from perfsuite.case.model import FrozenMapping
from perfsuite.case.phases import phase_name
from perfsuite.documents import digest
from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.base import Command, DryPlan, Framework, LaunchPlan, Ranks, StepClock, Workload
from perfsuite.inputs import files
from perfsuite.redaction import secret_variable, secret_word


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


Text = Annotated[str, BeforeValidator(_text)]


class Script(Framework):
    """Run `path` or `module` in ranks that perfsuite starts, or a `command` that starts its own ranks.

    A relative `path` is looked up in `cwd` and in the directory in which pytest was started. All other
    relative paths are relative to the directory in which pytest was started.

    Each launch has its own directory, which is empty at first. In `arguments`, `command` and `env`,
    `{launch_dir}` is replaced with the path of this directory. Every process also finds this path in the
    environment variable PERFSUITE_LAUNCH_DIR.
    """

    name: ClassVar[str] = "script"

    path: Annotated[str, Field(min_length=1), BeforeValidator(_text)] | None = None
    """A Python file, which runs as `python PATH ARGUMENTS`. With several ranks, it runs once per rank, with
    torchrun's environment variables."""
    module: str | None = Field(default=None, min_length=1)
    """A Python module, which runs as `python -m MODULE ARGUMENTS`. Like `path`, it runs once per rank."""
    command: tuple[Text, ...] | None = Field(default=None, min_length=1)
    """A command that starts its own ranks. Give separate words: `("torchrun", "--nproc-per-node=2",
    "train.py")`. The directory of the Python that runs pytest comes first on the command's PATH."""
    arguments: tuple[Text, ...] = ()
    cwd: Text = "."
    """The working directory of the training."""
    env: FrozenMapping[str] = Field(default_factory=lambda: MappingProxyType({}))
    """Environment variables to set in addition to those of pytest."""
    label: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)
    """A name that replaces the name of the script in ids, for example if two scripts are called `main.py`."""
    data_parallel: int | None = Field(default=None, ge=1, strict=True)
    """Number of ranks that see different data. None: all ranks. With tensor or pipeline parallelism, this is
    smaller than the number of ranks."""
    loader: str | None = None
    """The source of the training's batches, as `module:name`, if it is not a torch `DataLoader`. It can be a
    function that returns a batch or an iterator, a class with `__next__` or `__iter__`, or a method of a
    class."""
    phases: FrozenMapping[str] = Field(default_factory=lambda: MappingProxyType({}))
    """Functions whose calls are reported as phases: name of the phase -> `module:name` of a function or
    method, such as `{"rollout": "train:generate"}`."""
    loss: LossRule | None = "finite"
    """The rule for the loss. `finite`: the loss must be finite. `falls`: the loss must also fall.

    The loss is the tensor on which the script calls `backward`, summed over the micro-batches of a step. The
    factor of a loss scaler of torch or DeepSpeed is removed. If this tensor is not the loss, for example with
    a pipeline schedule, give None: the loss is then not observed.
    """
    clock: str | None = Field(default=None, pattern=r"^[^\W\d]\w*(:[1-9]\d*)?$")
    """The class of the optimizer whose steps are counted and timed, such as `"AdamW"`. `"AdamW:2"` is the
    second AdamW whose `step` is called. None: the optimizer whose `step` is called first."""
    tokens: Literal["fixed", "vary"] = "fixed"
    """`fixed`: each step has as many tokens as the case says. This is checked in the second step. `vary`:
    steps have different numbers of tokens. tokens/s are then computed from the tokens per step that the case
    gives, and a note gives the number of tokens in the second step."""
    replicas: Literal["agree", "differ"] = "agree"
    """`agree`: parameters that are not sharded must be equal on all data-parallel ranks after the last step.
    `differ`: these parameters are not compared. Use `differ` if experts differ between ranks, or if replicas
    are averaged only from time to time. With either value, a run with several data-parallel ranks is rejected
    if no collective runs after the first step."""

    @field_validator("command", "arguments", mode="before")
    @classmethod
    def _word_by_word(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError('give separate words, such as ("torchrun", "train.py"); shlex.split makes them')
        return value

    @field_validator("loader")
    @classmethod
    def _names_a_loader(cls, loader: str | None) -> str | None:
        if loader is not None:
            _check_module_and_name(
                f"{loader!r}",
                loader,
                example="train:get_batch",
                advice="Give the module and the name of a function or class that provides the batches",
            )
        return loader

    @field_validator("phases")
    @classmethod
    def _names_functions(cls, phases: Mapping[str, str]) -> Mapping[str, str]:
        for phase, function in phases.items():
            phase_name(phase)
            _check_module_and_name(
                f"{{{phase!r}: {function!r}}}",
                function,
                example="train:generate",
                advice="Name a function or method, and its module",
            )
        return phases

    @model_validator(mode="after")
    def _can_be_run_and_kept(self) -> Script:
        """Check the fields. Messages must not contain a secret, because they are printed and stored."""
        given = [name for name in ("path", "module", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of path, module and command, not {' and '.join(given) or 'none'}")
        if self.command is not None and self.arguments:
            raise ValueError("`arguments` needs `path` or `module`. Add a command's arguments to `command`")
        self._refuse_what_no_process_is_given()
        variable = secret_variable(self.env)
        word = secret_word([*(self.command or ()), *self.arguments])
        if variable is not None or word is not None:
            where = f"arguments: {word!r}" if variable is None else f"env: {variable!r}"
            raise ValueError(
                f"{where} looks like a secret, but results, baselines and reports contain the case in plain "
                "text. Set the secret in the environment of pytest, which the script inherits"
            )
        return self

    def _refuse_what_no_process_is_given(self) -> None:
        """Raise `ValueError` for variables and arguments that Linux cannot pass to a process.

        The message does not contain values, because they can be secret.
        """
        for name in self.env:
            if not name or "=" in name or "\0" in name:
                begin = re.split("[=\0]", name)[0]
                wrong = f"the name that begins with {begin!r} contains '=' or NUL"
                raise ValueError(
                    f"env: {wrong if name else 'a name is empty'}. "
                    "Give name and value separately, as env={'NAME': 'value'}"
                )
        words: dict[str, tuple[str, ...]] = {
            "path": (self.path or "",),
            "module": (self.module or "",),
            "cwd": (self.cwd,),
            "command": self.command or (),
            "arguments": self.arguments,
            "env": tuple(self.env.values()),
        }
        for field, given in words.items():
            if any("\0" in word for word in given):
                raise ValueError(f"{field}: NUL (\\0) cannot be passed to a process: remove it")

    @property
    def promises(self) -> Promises:
        return Promises(
            builds_model=False,
            ignores=frozenset({"learning_rate", "seed", "compile"}),  # because the script sets these itself
            loss=self.loss,
            tokens_vary=self.tokens == "vary",
            replicas_differ=self.replicas == "differ",
        )

    def slug(self) -> str:
        """Return the script's name, options, and a digest of arguments, directories and variables."""
        what = self.label or _name(self.command or (self.path or self.module or "",))
        fields = self.model_dump(include=set(_IN_DIGEST))
        fields |= {name: _from_here(fields[name]) for name in ("path", "cwd")}
        changed = changed_fields(self, skip=_IN_DIGEST | {"label", "loader", "phases"})
        return "-".join([self.name, what, *changed, digest(fields, 6)])

    def check(self, case: Case) -> None:
        """Raise `CaseError` if the file, module, command or directory does not exist."""
        if not Path(self.cwd).is_dir():
            raise CaseError(f"cwd={self.cwd!r}: no such directory in {Path.cwd()}")
        if self.path is not None:
            assert self.file is not None
            try:
                ast.parse(files.read_bytes(self.file))
            except FileError as error:
                raise CaseError(f"path: {error}") from None
            except CaseError:
                raise
            except OSError as error:
                in_cwd = "" if self.cwd == "." else f", nor in cwd={self.cwd!r}"
                raise CaseError(
                    f"path={self.path!r}: {error.strerror} in {Path.cwd()}{in_cwd}. "
                    "Give an absolute path, or one relative to cwd or to the directory in which pytest was "
                    "started."
                ) from None
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                # Python raises RecursionError or MemoryError if code is nested too deeply.
                said = f"path={self.path!r} is not Python ({error}). Use command=(...) for other programs."
                raise CaseError(said) from None
        if self.module is not None:
            top = self.module.partition(".")[0]
            if PathFinder.find_spec(top, [self.cwd]) is None and importlib.util.find_spec(top) is None:
                raise CaseError(f"module={self.module!r}: {top} is neither in {self.cwd} nor installed here")
        if self.command is not None and _executable(self.command[0]) is None:
            raise CaseError(
                f"command: {self.command[0]!r} is neither on PATH nor next to {sys.executable}. "
                "Install the package that provides it, or give its path."
            )

    @property
    def file(self) -> Path | None:
        """The file of `path`, in `cwd` or in the current directory.

        Raises `CaseError` if both directories have such a file, and the files are not the same.
        """
        if self.path is None:
            return None
        here = Path(self.path)
        in_cwd = Path(self.cwd, self.path)
        with contextlib.suppress(OSError):  # for example, the name is too long. `check` reports it
            if here.exists() and in_cwd.exists() and not here.samefile(in_cwd):
                raise CaseError(
                    f"path={self.path!r} is a file in {Path.cwd()} and a different file in cwd={self.cwd!r}. "
                    "Give the absolute path of the right one"
                )
            return in_cwd if in_cwd.exists() else here
        return here

    def plan(self, case: Case) -> LaunchPlan:
        """Return the command to run, with the absolute path of its program.

        `path` and `module` run in this Python, with unbuffered output, as under torchrun.
        """
        what = ("-m", str(self.module)) if self.file is None else (str(self.file.absolute()),)
        words: tuple[str, ...] = (sys.executable, "-u", *what, *self.arguments)
        if self.command is not None:
            words = (_executable(self.command[0]) or self.command[0], *self.command[1:])
        command = Command(words=words, directory=self.cwd, starts_ranks=self.command is not None)
        return LaunchPlan(environment=self.env, command=command)

    def dry(self, case: Case) -> DryPlan:
        """Return the plan to run the script unchanged, as one rank (`perfsuite.dry.script`)."""
        return DryPlan()

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Return why a script cannot run `case` (for example, a field cannot be observed), or None."""
        if case.attention != Case.model_fields["attention"].default and not case.model.config:
            return f"attention cannot be observed in {case.model.name}: only the model's name is known"
        if self.data_parallel is not None and case.topology.world_size % self.data_parallel:
            return f"data_parallel={self.data_parallel} does not divide {case.topology.world_size} processes"
        return None

    def expected(self, case: Case) -> dict[str, str | None]:
        """Return None for each setting that cannot be checked for this case."""
        unseen = ["parameter_dtype", "optimizer_parameters"]
        if not case.model.config:
            unseen.append("attention")
        if case.topology.world_size == 1:
            unseen.append("world_size")  # a script with one process need not create a process group
        return dict.fromkeys(unseen)

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Return a workload that runs nothing.

        This method is called in the process in which the script runs (`perfsuite.worker.script.attach`).
        """
        return Workload(run=lambda steps: [], data_parallel=self.data_parallel or case.topology.world_size)


def _check_module_and_name(shown: str, text: str, *, example: str, advice: str) -> None:
    """Raise `ValueError` if `text` is not of the form `module:name`. `shown` is the text for messages."""
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is None:
        raise ValueError(f"{shown} is not of the form module:name, such as {example!r}. {advice}")
    module, _, name = text.partition(":")
    if module.endswith(".py"):
        right = f"{module.removesuffix('.py')}:{name}"
        raise ValueError(f"{shown} names a file, not a module. Leave out '.py': {right!r}")


def _name(words: Sequence[str]) -> str:
    """Return a short name for a command.

    This is the stem of the first Python file. If there is none, it is the module after `-m`. If there is no
    module either, it is the program and its first argument.
    """
    file = next((word for word in words if word.endswith(".py")), None)
    if file is not None:
        return Path(file).stem
    modules = [word for flag, word in pairwise(words) if flag == "-m"]
    if modules:
        return modules[-1]
    task = next((word for word in words[1:] if not word.startswith("-")), "")
    return "-".join([Path(words[0]).name, *([task] if re.fullmatch(r"[\w.-]{1,40}", task) else [])])


def _from_here(path: str | None) -> str | None:
    """Make a path relative if it is in the current directory.

    A relative path is the same in all clones of a repository.
    """
    if path is None:
        return None
    where = Path(path)
    return str(where.relative_to(Path.cwd())) if where.is_relative_to(Path.cwd()) else path


def _executable(program: str) -> str | None:
    """Return the absolute path of a program that is next to this Python or on PATH. None if there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    executable = shutil.which(program, path=path)
    return None if executable is None else str(Path(executable).absolute())


_IN_DIGEST = frozenset({"path", "module", "command", "arguments", "cwd", "env"})
