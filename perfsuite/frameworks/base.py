"""The interface of a framework: how its ranks start, what it cannot do, and how it builds a training step."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from perfsuite.case.case import Case
from perfsuite.case.framework import FrameworkOptions, MissingFramework, framework_class, not_installed
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError, PackageError
from perfsuite.results.rank_report import Flops, Memory

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process in the job."""

    rank: int  # from 0 to `world_size - 1`
    world_size: int
    device: Any  # the `torch.device` that it trains on
    # The directory of this launch, shared by all ranks, for files that a library reads or writes.
    directory: Path


class StepClock(Protocol):
    """The clock of a rank, which counts and times the steps of training.

    Most frameworks need not call it: each step of the first torch optimizer that steps is a training step.
    """

    def boundary(self) -> None:
        """End a step. If `LaunchPlan.clock` is `framework`, the training calls it after each of its steps."""

    def finish(self) -> None:
        """End the measurement, for a library that keeps running for a while after its last step."""

    def sleep(self, seconds: float) -> None:
        """Let time pass on this clock, which may be a simulated one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job that is ready to run, as returned by `Framework.build`."""

    run: Callable[[int], list[Any]]
    """Runs the given number of optimizer steps and returns the loss of each as this rank saw it: a float, or
    a 0-d tensor still on the device, because reading one inside a step would synchronise."""
    data_parallel: int  # the number of ranks (from 1 to the world size) that see different data
    model: Any = None
    """The model as wrapped. None if the library wraps it in `run`: the worker then looks for the living
    module that owns the parameters of the first optimizer that steps."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that only this framework knows, such as what was forced or patched. Kept in
    `Observed.settings`."""
    own_tokens_per_s: Callable[[], float | None] = lambda: None  # the library's own global value, after `run`
    flops: Flops | None = None  # FLOPs from the library's own formula, if it builds its own model
    notes: tuple[str, ...] = ()  # what a reader of a dry run has to know
    memory: Callable[[], Memory] | None = None  # returns the peak memory, if it is not that of this process

    def tokens_per_step(self, case: Case) -> int:
        """Return the tokens (or samples) on which all ranks together train in one step of `case`."""
        return case.micro_batch * case.gradient_accumulation * self.data_parallel * case.sample_length


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, and the directory that it runs in."""

    words: tuple[str, ...]  # `{launch_dir}` in them is replaced (`perfsuite.results.run_dir.LAUNCH_DIR`)
    directory: str
    starts_ranks: bool
    """Whether it starts the ranks of a job itself. If not, it is one of them, and the launcher runs it once
    per rank with torchrun's environment variables."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How the ranks of a launch are started."""

    environment: Mapping[str, str] = field(default_factory=dict)  # variables that ranks need from their start
    command: Command | None = None  # replaces perfsuite's worker; its Python processes measure themselves
    process_group: Literal["eager", "lazy", "library"] = "eager"
    """Who creates the default process group, and when NCCL connects its ranks. `eager`: the worker does, and
    NCCL connects all ranks at once and splits that communicator for each further group. `lazy`: the worker
    does, and ranks connect on first use. It is for unbatched send and recv, which an eager group serialises
    with all its other operations. `library`: `build` does."""
    clock: Literal["torch", "framework"] = "torch"
    """What ends a training step. `torch`: the step of the first torch optimizer that steps. `framework`: the
    training itself, with `StepClock.boundary`. It is for an engine that steps a torch optimizer several times
    in one training step, or not at all."""
    # False if nothing is trained: then ranks are plain forks without torch, on a simulated clock.
    needs_torch: bool = True


@dataclass(frozen=True, kw_only=True)
class DryPlan:
    """How a case runs dry: it is built and trained on fake tensors in one process (`perfsuite.dry`)."""

    impossible: str | None = None  # why this case cannot run dry
    pretend: Callable[[], None] = lambda: None
    """Replaces what fake tensors cannot do, using `perfsuite.frameworks.common.patches`, in the process of a
    dry run after `load`. Raises `DryRunError` if a name no longer exists."""
    ranks_differ: bool = False  # whether ranks do different work by design, like the stages of a pipeline
    # Whether each rank holds the whole model before it is sharded, so that it must fit.
    builds_whole: bool = False
    built_over: int = 1  # number of ranks that split the model while it is built, with tensor parallelism


class Engine:
    """A class of a library whose objects step optimizers of torch themselves, such as DeepSpeed's engine.

    One step of an engine is one step of training, however often it steps an optimizer. Engines are modules of
    torch around the model that they train.
    """

    path: ClassVar[str]
    """Where the class is, as `module:class`."""
    step: ClassVar[str]
    """The method of an engine that makes one step of training. It is called in every step."""
    not_dry: ClassVar[str | None] = None
    """Why a script that creates an engine cannot run dry; None if it can."""

    def optimizers(self, engine: Any) -> Sequence[Any]:
        """Return the optimizers that an engine steps: its own wrappers, and those of torch in them."""
        raise NotImplementedError

    def sharding(self, engine: Any) -> str | None:
        """Return what an engine partitions among ranks, for `Observed.settings`; None if nothing."""
        return None

    def gradient_norm(self, engine: Any) -> float | None:
        """Return the gradient norm over all ranks in the engine's last step; None if it does not know it.

        It is the norm before clipping, and without the scale of fp16's loss scaler.
        """
        return None


Event = Literal["save checkpoint", "load checkpoint", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Library:
    """The facts about a training library that a rank needs. Nothing in it may import the library.

    Functions are named as `module:function` or `module:class.method`.
    """

    events: Mapping[str, Event] = field(default_factory=dict)
    """Functions whose calls are an event of the training."""
    clips: tuple[str, ...] = ()
    """Functions of the library's own that change gradients before the optimizer's step."""
    engine: Engine | None = None
    shard: str | None = None
    """The attribute of a parameter that holds this rank's part of it, if the library partitions parameters
    in a way of its own."""


class Framework(FrameworkOptions):
    """A training framework: its options are its fields, and its methods say how a case runs with them.

    The driver calls `unsupported`, `check`, `plan` and `dry`, without torch. Each rank calls `load`, `build`,
    and after its last step `expected`. Only `build` must be overridden.
    """

    library: ClassVar[Library | None] = None
    """What ranks have to know of the library whose module has the name of this framework. It also holds where
    a user's script imports that module, and is not asked for otherwise."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Return why this framework cannot run `case` on `machine`, or None. Must not import torch."""
        return None

    def check(self, case: Case) -> None:
        """Raise `CaseError`, not a skip, if the case contradicts itself or a file that it names."""

    def plan(self, case: Case) -> LaunchPlan:
        """Return how the ranks of `case` are started."""
        return LaunchPlan()

    def dry(self, case: Case) -> DryPlan | None:
        """Return how `case` runs dry; None if this framework is untested on fake tensors."""
        return None

    def load(self, case: Case, device: Any) -> None:
        """Import the library, so that its allocations do not count as the model's memory (on a CPU)."""

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build model, optimizer and data on `ranks.device`. Inside a step, neither print nor call `.item()`.

        The process group exists, unless `plan` says that the library creates it.
        """
        raise NotImplementedError

    def expected(self, case: Case) -> Mapping[str, str | None]:
        """Return the values in `Observed.settings` that the worker must find for the run to match the case.

        Every framework is checked for world size, dtypes, attention, checkpointed blocks, and parameters that
        change (`perfsuite.worker.observation.observe`). None for one of these means that it cannot be
        observed here.
        """
        return {}


def framework_of(case: Case) -> Framework:
    """Return the framework that runs `case`.

    Raises `CaseError` if it is not installed here, or only has options, and `ExtensionError` if it is broken.
    """
    framework = case.framework
    if isinstance(framework, MissingFramework):
        framework_class(framework.name)  # raises the error of a broken one
        raise CaseError(not_installed(framework.name, framework.package))
    if not isinstance(framework, Framework):
        raise CaseError(f"{type(framework)} cannot be run: derive it from perfsuite.frameworks.Framework")
    return framework


def missing_package(*packages: str) -> str | None:
    """Return which package is missing or in an unsupported version, and what to install, or None."""
    for package in packages:
        extra, wanted = optional_packages().get(package, (None, None))
        what = package if extra is None else f"'perfsuite[{extra}]'"
        if importlib.util.find_spec(package) is None:
            return f"it needs the package {package}, which is not installed: pip install {what}"
        with suppress(importlib.metadata.PackageNotFoundError):  # on the path, but not installed by pip
            version = importlib.metadata.version(package)
            if wanted is not None and not wanted.contains(version, prereleases=True):
                return f"it needs {package}{wanted}, and {version} is installed: pip install {what}"
    return None


@functools.cache
def optional_packages() -> Mapping[str, tuple[str, SpecifierSet]]:
    """Return extra and versions of each package that perfsuite does not install, from its metadata."""
    from packaging.requirements import Requirement

    lines: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):
        lines += importlib.metadata.requires("perfsuite") or ()
    return {
        each.name.replace("-", "_"): (str(each.marker).split('"')[1], each.specifier)
        for each in map(Requirement, lines)
        if each.marker is not None and each.name != "perfsuite" and not each.marker.evaluate({"extra": "dev"})
    }


def require(*packages: str, purpose: str) -> None:
    """Raise `PackageError` if one of these packages is not installed. `purpose` names what needs it."""
    missing = missing_package(*packages)
    if missing is not None:
        raise PackageError(f"{purpose}: {missing}")


NCCL_AFTER_S = 60  # seconds after `timeout_s` when NCCL's watchdog may end a rank, because the driver has not
