"""What a framework does: how its ranks are started, what it cannot do, and how it builds a training step."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
    directory: Path  # of this launch, the same for all ranks: for files that a library reads or writes


class StepClock(Protocol):
    """The clock of a rank, which counts and times the steps of training.

    Most frameworks leave it alone: each step of the first torch optimizer that steps is one of training.
    """

    def boundary(self) -> None:
        """End a step. For a training whose `LaunchPlan.clock` is `framework`, after each of its steps."""

    def finish(self) -> None:
        """End the measurement: for a library that goes on for a while after its last step."""

    def sleep(self, seconds: float) -> None:
        """Let time pass on this clock, which may be a simulated one."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job that is ready to run: what `Framework.build` returns."""

    run: Callable[[int], list[Any]]
    """Makes the given number of optimizer steps and returns the loss of each as this rank saw it: a float, or
    a 0-d tensor still on the device, because reading one inside a step would synchronise."""
    data_parallel: int  # the number of ranks (from 1 to the world size) that see different data
    model: Any = None
    """The model as wrapped. None if the library wraps it in `run`: the worker then finds the living module
    that owns the parameters of the first optimizer that steps."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What this framework alone knows, such as what was forced or patched. Kept in `Observed.settings`."""
    own_tokens_per_s: Callable[[], float | None] = lambda: None  # global, after `run`, by the library itself
    flops: Flops | None = None  # FLOPs by the library's own formula, where it builds a model of its own
    notes: tuple[str, ...] = ()  # what a reader of a dry run has to know
    memory: Callable[[], Memory] | None = None  # return the peak memory, if it is not that of this process

    def tokens_per_step(self, case: Case) -> int:
        """Return the tokens (or samples) that all ranks together train in one step of `case`."""
        return case.micro_batch * case.gradient_accumulation * self.data_parallel * case.sample_length


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run, and the directory that it runs in."""

    words: tuple[str, ...]  # `{launch_dir}` in them is replaced (`perfsuite.results.run_dir.LAUNCH_DIR`)
    directory: str
    starts_ranks: bool
    """Whether it starts the ranks of a job by itself. If not it is one of them: the launcher runs it once per
    rank, with torchrun's environment variables."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How the ranks of a launch are started."""

    environment: Mapping[str, str] = field(default_factory=dict)  # that ranks need from their start
    command: Command | None = None  # in place of perfsuite's worker; Python processes measure themselves
    process_group: Literal["eager", "lazy", "library"] = "eager"
    """Who creates the default process group, and when NCCL connects its ranks. `eager`: the worker does, and
    NCCL connects all ranks at once and splits that communicator for each further group. `lazy`: the worker
    does, and ranks connect when they first talk to each other: for unbatched send and recv, which an eager
    group serialises with all its other operations. `library`: `build` does."""
    clock: Literal["torch", "framework"] = "torch"
    """What ends a step of training. `torch`: the step of the first torch optimizer that steps. `framework`:
    the training itself, by `StepClock.boundary`, for an engine that steps a torch optimizer several times in
    one step of training, or none."""
    needs_torch: bool = True  # False if nothing is trained: plain forks without torch, on a simulated clock


@dataclass(frozen=True, kw_only=True)
class DryPlan:
    """How a case is run dry: built and trained on fake tensors in one process (`perfsuite.dry`)."""

    impossible: str | None = None  # why this case cannot be run dry
    pretend: Callable[[], None] = lambda: None
    """Replaces what fake tensors cannot do, by `perfsuite.frameworks.common.patches`, in the process of a dry
    run after `load`. Raises `DryRunError` if a name is gone."""
    ranks_differ: bool = False  # whether ranks do unlike work by design, as the stages of a pipeline do
    builds_whole: bool = False  # whether each rank has the whole model before it is sharded: it must fit
    built_over: int = 1  # ranks that split the model while it is built, by tensor parallelism


class Framework(FrameworkOptions):
    """A training framework: its options are its fields; its methods say how a case runs with them.

    The driver calls `unsupported`, `check`, `plan` and `dry`, without torch; each rank calls `load`, `build`,
    and `expected` after its last step. All but `build` may be left as they are.
    """

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Return why this framework cannot run `case` on `machine`, or None. Must not import torch."""
        return None

    def check(self, case: Case) -> None:
        """Raise `CaseError` if the case contradicts itself or a file that it names: an error, not a skip."""

    def plan(self, case: Case) -> LaunchPlan:
        """Return how the ranks of `case` are started."""
        return LaunchPlan()

    def dry(self, case: Case) -> DryPlan | None:
        """Return how `case` is run dry. None: nobody has tried this framework on fake tensors."""
        return None

    def load(self, case: Case, device: Any) -> None:
        """Import the library, so that what it allocates is not taken for the model's memory (on a CPU)."""

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build model, optimizer and data on `ranks.device`. Inside a step, neither print nor call `.item()`.

        The process group exists, unless `plan` says that the library creates it.
        """
        raise NotImplementedError

    def expected(self, case: Case) -> Mapping[str, str | None]:
        """Return what the worker must find in `Observed.settings` for this to be the run that the case names.

        Every framework is checked for world size, dtypes, attention, checkpointed blocks, and parameters that
        change (`perfsuite.worker.observation.observe`); None for one of those says that it cannot be seen
        here.
        """
        return {}


def framework_of(case: Case) -> Framework:
    """The framework that runs `case`.

    Raises `CaseError` if it is not installed here, or only has options; `ExtensionError` if it is broken.
    """
    framework = case.framework
    if isinstance(framework, MissingFramework):
        framework_class(framework.name)  # raises the error of a broken one
        raise CaseError(not_installed(framework.name, framework.package))
    if not isinstance(framework, Framework):
        raise CaseError(f"{type(framework)} cannot be run: derive it from perfsuite.frameworks.Framework")
    return framework


def missing_package(*packages: str) -> str | None:
    """Which of these is not installed in a version that perfsuite takes, and how to get it, or None."""
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
    """Return the extra and versions of each package that is not installed with perfsuite, by its metadata."""
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
    """Raise `PackageError` if one of these packages is not installed. `purpose`: what needs it."""
    missing = missing_package(*packages)
    if missing is not None:
        raise PackageError(f"{purpose}: {missing}")


NCCL_AFTER_S = 60  # after `timeout_s`: then NCCL's watchdog may end a rank, for the driver has not
