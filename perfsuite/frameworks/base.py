"""The interface of a framework: how to start its ranks, what it cannot run, and how to build the training."""

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
from perfsuite.results.counts import Event
from perfsuite.results.rank_report import Flops, Memory

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process, and the job that it belongs to."""

    rank: int  # from 0 to `world_size - 1`
    world_size: int
    device: Any  # the `torch.device` that this rank trains on
    # The directory of this launch, for files that a library reads or writes. All ranks share it.
    directory: Path


class StepClock(Protocol):
    """The clock of a rank, which counts and times the training steps.

    Most frameworks need not call its methods, because the clock watches the torch optimizer whose `step` is
    called first, and counts each step of this optimizer as a training step.
    """

    def boundary(self) -> None:
        """End a step. If `LaunchPlan.clock` is `framework`, the training must call this after each step."""

    def finish(self) -> None:
        """End the measurement, for a library that keeps running for a while after its last step."""

    def sleep(self, seconds: float) -> None:
        """Spend this time in the running step. A simulated clock only advances its time."""


def _reports_no_speed() -> None:
    """Return None, for a library that does not report tokens/s."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job that is ready to run, as returned by `Framework.build`."""

    run: Callable[[int], list[Any]]
    """Runs the given number of optimizer steps and returns this rank's loss of each step. A loss is a float
    or a 0-d tensor. The tensor stays on the device, because reading it inside a step would synchronise."""
    data_parallel: int  # the number of ranks (from 1 to the world size) that see different data
    model: Any = None
    """The wrapped model. None if the library wraps the model only when `run` is called. The worker then looks
    for the module that owns the parameters of the first optimizer that steps."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that only this framework knows, such as forced options or patches. They are recorded in
    `Observed.settings`."""
    # Returns the tokens/s that the library itself reports, over all ranks. It is called after `run`.
    own_tokens_per_s: Callable[[], float | None] = _reports_no_speed
    flops: Flops | None = None  # FLOPs from the library's own formula, if the library builds the model
    notes: tuple[str, ...] = ()  # notes for the reader of a dry run
    # Returns the peak memory. None: the worker measures the peak memory of this process.
    memory: Callable[[], Memory] | None = None

    def tokens_per_step(self, case: Case) -> int:
        """Return the number of tokens (or samples) in one step of `case`, over all ranks."""
        return case.micro_batch * case.gradient_accumulation * self.data_parallel * case.sample_length


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, and the directory that it runs in."""

    # In each word, `{launch_dir}` (`perfsuite.results.run_dir.LAUNCH_DIR`) is replaced with a path: the
    # directory for the files of the launch.
    words: tuple[str, ...]
    directory: str
    starts_ranks: bool
    """Whether the command starts the ranks of a job itself. If not, the launcher runs it once per rank, with
    torchrun's environment variables."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How the ranks of a launch are started."""

    environment: Mapping[str, str] = field(default_factory=dict)  # variables to set before a rank starts
    # A command that runs instead of perfsuite's worker. Its Python processes measure themselves.
    command: Command | None = None
    process_group: Literal["eager", "lazy", "library"] = "eager"
    """Who creates the default process group, and when NCCL connects its ranks.

    `eager`: the worker creates it. NCCL connects all ranks at once in one communicator, and splits this
    communicator for each further group. `lazy`: the worker creates it, and ranks connect on first use.
    Training that uses unbatched send and recv needs `lazy`, because an eager group serialises these with all
    its other operations. `library`: `build` creates it.
    """
    clock: Literal["torch", "framework"] = "torch"
    """What ends a training step.

    `torch`: each call of `step` on the torch optimizer whose `step` is called first. `framework`: the
    training calls `StepClock.boundary`. `framework` is for an engine that steps a torch optimizer several
    times in a training step, or not at all.
    """
    # False if nothing is trained. Ranks are then plain forks without torch, and have a simulated clock.
    needs_torch: bool = True


def _replaces_nothing() -> None:
    """Replace no function, because all functions work on fake tensors."""


@dataclass(frozen=True, kw_only=True)
class DryPlan:
    """How to do a dry run of a case: build and train it on fake tensors, in one process (`perfsuite.dry`)."""

    impossible: str | None = None  # why no dry run of this case is possible; None if one is possible
    pretend: Callable[[], None] = _replaces_nothing
    """Uses `perfsuite.frameworks.common.patches` to replace functions that fail on fake tensors. The process
    of the dry run calls it after `load`. It raises `DryRunError` if a function no longer exists."""
    ranks_differ: bool = False  # whether ranks do different work by design, like the stages of a pipeline
    # Whether each rank holds the whole model before it is sharded. The whole model must then fit in memory.
    builds_whole: bool = False
    built_over: int = 1  # number of tensor-parallel ranks that split the model while it is built


class Engine:
    """A library's class whose objects step torch optimizers themselves, such as DeepSpeed's engine.

    One step of an engine is one training step, however often it steps an optimizer. An engine is a torch
    module around the model that it trains.
    """

    path: ClassVar[str]
    """The path of the class, as `module:class`."""
    step: ClassVar[str]
    """The name of the method that takes one training step. It must be called in every step."""
    not_dry: ClassVar[str | None] = None
    """Why a script that creates an engine cannot be run dry. None if it can."""

    def optimizers(self, engine: Any) -> Sequence[Any]:
        """Return the optimizers that an engine steps: its own wrappers and the torch optimizers in them."""
        raise NotImplementedError

    def sharding(self, engine: Any) -> str | None:
        """Describe what an engine partitions among ranks, for `Observed.settings`.

        Returns None if it partitions nothing.
        """
        return None

    def gradient_norm(self, engine: Any) -> float | None:
        """Return the gradient norm over all ranks in the engine's last step. None if it is unknown.

        This is the norm before clipping, without the factor of the fp16 loss scaler.
        """
        return None

    def loss_scale(self, engine: Any) -> float | None:
        """Return the factor by which an engine multiplies losses before backward, for fp16.

        None if the engine multiplies no losses. The factor of a `GradScaler` of torch is known without this
        method.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Library:
    """Facts that a rank needs about a training library. Nothing in this class may import the library.

    Functions are given as `module:function` or `module:class.method`.
    """

    events: Mapping[str, Event] = field(default_factory=dict)
    """Function -> the kind of event that is recorded when the function is called."""
    clips: tuple[str, ...] = ()
    """The library's own functions that clip gradients before the optimizer's step."""
    engine: Engine | None = None
    shard: str | None = None
    """The parameter attribute that holds this rank's shard, if the library does not partition parameters with
    torch."""


class Framework(FrameworkOptions):
    """A training framework. Its fields are its options. Its methods say how a case runs with these options.

    The driver calls `unsupported`, `check`, `plan` and `dry`, which must not import torch. Each rank calls
    `load`, `build` and, after its last step, `expected`. Only `build` must be overridden.
    """

    library: ClassVar[Library | None] = None
    """The facts that ranks need about the library. The library's Python module has the same name as this
    framework. Ranks use these facts whenever the module has been imported, even by a user's script."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Return why this framework cannot run `case` on `machine`, or None. Must not import torch."""
        return None

    def check(self, case: Case) -> None:
        """Raise `CaseError` if the case contradicts itself or a file that it names. The test then fails."""

    def plan(self, case: Case) -> LaunchPlan:
        """Return how to start the ranks of `case`."""
        return LaunchPlan()

    def dry(self, case: Case) -> DryPlan | None:
        """Return the plan for a dry run of `case`. None if fake tensors are untested in this framework."""
        return None

    def load(self, case: Case, device: Any) -> None:
        """Import the library before memory is measured.

        On a CPU, memory that the import allocates would otherwise be counted as memory of the model.
        """

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build model, optimizer and data on `ranks.device`.

        A step must neither print nor call `.item()`. The process group already exists, unless `plan` says
        that the library creates it.
        """
        raise NotImplementedError

    def expected(self, case: Case) -> Mapping[str, str | None]:
        """Return the values that the worker must find in `Observed.settings` if the run matches the case.

        In every framework, the worker also checks the world size, the dtypes, attention, checkpointed blocks,
        and whether parameters change (`perfsuite.worker.observation.observe`). If one of these settings
        cannot be observed in this framework, return None for the setting: None turns off its check.
        """
        return {}


def framework_of(case: Case) -> Framework:
    """Return the framework that runs `case`.

    Raises `CaseError` if the framework is not installed here or is not derived from `Framework`, and
    `ExtensionError` if it cannot be loaded.
    """
    framework = case.framework
    if isinstance(framework, MissingFramework):
        framework_class(framework.name)  # raises `ExtensionError` if the framework is broken
        raise CaseError(not_installed(framework.name, framework.package))
    if not isinstance(framework, Framework):
        raise CaseError(f"{type(framework)} cannot run a case: derive it from perfsuite.frameworks.Framework")
    return framework


def missing_package(*packages: str) -> str | None:
    """Return which package is missing or has an unsupported version, and how to install it.

    Returns None if all packages are fine.
    """
    for package in packages:
        extra, wanted = optional_packages().get(package, (None, None))
        what = package if extra is None else f"'perfsuite[{extra}]'"
        if importlib.util.find_spec(package) is None:
            return f"it needs the package {package}, which is not installed: pip install {what}"
        with suppress(importlib.metadata.PackageNotFoundError):  # the package was not installed with pip
            version = importlib.metadata.version(package)
            if wanted is not None and not wanted.contains(version, prereleases=True):
                return f"it needs {package}{wanted}, and {version} is installed: pip install {what}"
    return None


@functools.cache
def optional_packages() -> Mapping[str, tuple[str, SpecifierSet]]:
    """Return, for each optional dependency in perfsuite's metadata, its extra and its supported versions."""
    from packaging.requirements import Requirement

    lines: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):
        lines += importlib.metadata.requires("perfsuite") or ()
    return {
        requirement.name.replace("-", "_"): (str(requirement.marker).split('"')[1], requirement.specifier)
        for requirement in map(Requirement, lines)
        if requirement.marker is not None
        and requirement.name != "perfsuite"
        and not requirement.marker.evaluate({"extra": "dev"})
    }


def require(*packages: str, purpose: str) -> None:
    """Raise `PackageError` if a package is missing or has an unsupported version.

    `purpose` says what needs the packages.
    """
    missing = missing_package(*packages)
    if missing is not None:
        raise PackageError(f"{purpose}: {missing}")


# If perfsuite has not ended a rank at `timeout_s`, NCCL's watchdog ends the rank this many seconds later.
NCCL_AFTER_S = 60
