"""What a framework is: its options as data, what it cannot do, and how it builds a training step.

Each file in `perfsuite/frameworks/` holds one subclass of `Framework`, named after the file; being there
is what registers it. This module imports neither torch nor pytest; `build` imports torch when called.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

import perfsuite.frameworks
from perfsuite.case.framework import LossRule, changed_fields
from perfsuite.documents import Data, explain
from perfsuite.errors import CaseError

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.case.hardware import Machine
    from perfsuite.results.rank_report import Memory
    from perfsuite.worker.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands in the job, and the device it trains on (a `torch.device`)."""

    rank: int
    world_size: int
    device: Any
    directory: Path
    """Of this launch, the same for all ranks: for what a library must read from files, or write to them."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What `Framework.build` returns: a training job that is ready to run.

    `run(steps)` makes that many optimizer steps and returns the loss of each as this rank saw it: floats,
    or 0-d tensors still on the device, because reading one inside a step would synchronise.
    """

    run: Callable[[int], list[Any]]
    data_parallel: int
    """Ranks (from 1 to the world size) that see different data."""
    model: Any = None
    """What trains, as wrapped. None where the library wraps it in `run`: the worker then finds the living
    module that owns the parameters of the first optimizer that steps."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What the worker cannot see and this framework knows to run: which kernel stands in for which, what was
    forced or patched. Kept in `Observed.settings`."""
    own_tokens_per_s: Callable[[], float | None] = lambda: None
    """Global tokens/s by the framework's own log, asked after `run`, to be shown beside the clock's."""
    memory: Callable[[], Memory] | None = None
    """Reads peak memory, where it is not this process's own."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run, and the directory that it runs in."""

    words: tuple[str, ...]
    """`{launch_dir}` in them is replaced (`perfsuite.results.run_dir.LAUNCH_DIR`)."""
    directory: str
    starts_ranks: bool
    """Whether it starts the ranks of a job by itself. If not it is one of them: the launcher runs it once per
    rank, with torchrun's environment variables."""


class Framework(Data):
    """A training framework and its options. Fields are the options; the id names those that differ."""

    name: ClassVar[str]
    needs_torch: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()
    """What it imports beyond torch and transformers; their versions are recorded."""
    builds_model: ClassVar[bool] = True
    """Whether it builds the case's model from its configuration; a script brings that, and its loop."""
    ignores: ClassVar[frozenset[str]] = frozenset({"lora", "quantization"})
    """Fields of a case that `build` does not look at: a case that sets one of them is refused.
    `torch_model.build_model` looks at all of them."""
    own_process_group: ClassVar[bool] = False
    """Whether the library insists on creating the default process group itself."""
    eager_nccl: ClassVar[bool] = True
    """Whether NCCL connects all ranks at once when the process group is created, and splits that communicator
    for each group. False: as the library itself would have it, when ranks first talk to each other; unbatched
    send and recv of an eager group are serialised with all its other operations."""

    @property
    def asks_of_loss(self) -> LossRule | None:
        """What the loss of each step has to do; None: it is not observed, and each run says so."""
        return "falls"

    @classmethod
    def upgraded(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Options as an earlier perfsuite may have written them into a file, in today's words."""
        return options

    def check(self, case: Case) -> None:
        """Raises `CaseError` where the case contradicts itself or a file that it names: no reason to skip."""

    @property
    def tokens_vary(self) -> bool:
        """Whether steps differ in their number of tokens, so that it cannot be compared with the case's."""
        return False

    @property
    def replicas_differ(self) -> bool:
        """Whether data-parallel ranks hold other parameters than each other, so that none are compared."""
        return False

    def environment(self) -> Mapping[str, str]:
        """Environment variables that its processes need from their start."""
        return {}

    def launched_by(self) -> Command | None:
        """What to run in place of `perfsuite.worker.main`: its Python processes measure themselves."""
        return None

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Why this framework cannot run `case` on `machine`, or None. Must not import torch."""
        return None

    def expected(self, case: Case) -> Mapping[str, str | None]:
        """What the worker must find in `Observed.settings` for this to be the run that was asked for.

        Every framework is checked for world size, dtypes, attention, checkpointed blocks, and parameters that
        change (`perfsuite.worker.observe`); None for one of those says that it cannot be seen here.
        """
        return {}

    def load(self, case: Case, device: Any) -> None:
        """Import the library, so that what it keeps itself is not taken for the model's memory (on a CPU)."""

    def build(self, case: Case, ranks: Ranks, recorder: Recorder) -> Workload:
        """Build model, optimizer and data on `ranks.device`. The process group exists already.

        (Unless `own_process_group`: then this creates it.)
        """
        raise NotImplementedError

    def slug(self) -> str:
        """Name and telling options, for a case's id: required options always, others if changed."""
        return "-".join([self.name, *changed_fields(self)])


def missing_package(*packages: str) -> str | None:
    """Which of these packages is not installed, and how to get it, or None. A broken one is not missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            what = f"'perfsuite[{package}]'" if package in EXTRAS else package
            return f"it needs the package {package}, which is not installed: pip install {what}"
    return None


EXTRAS = frozenset({"bitsandbytes", "lightning", "peft", "torchtitan"})
"""Packages that are not installed with perfsuite but by an extra of their name."""


def framework_names() -> list[str]:
    """Every framework there is: one per file in `perfsuite/frameworks/`."""
    names = {module.name for module in pkgutil.iter_modules(perfsuite.frameworks.__path__)}
    return sorted(names - {"base", "common"})


def _unknown(name: str) -> str:
    known = [each for each in framework_names() if each != "fake"]  # for tests
    near = get_close_matches(name.lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown framework {name!r}.{hint} Known: {', '.join(known)}."


def framework_class(name: str) -> type[Framework]:
    """The class in `perfsuite/frameworks/<name>.py`. A broken file raises its own traceback."""
    if name not in framework_names():
        raise CaseError(_unknown(name))
    module = importlib.import_module(f"perfsuite.frameworks.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Framework) and getattr(value, "name", "") == name:
            return value
    raise CaseError(f"{module.__file__} holds no Framework with name = {name!r}.")


def parse_framework(value: Any) -> Framework:
    """A framework from itself, from its name (default options), or from `{"name": ..., **options}`."""
    if isinstance(value, Framework):
        if not f"{type(value).__module__}.".startswith(
            f"perfsuite.frameworks.{value.name}."
        ):  # a worker would not find it
            raise CaseError(
                f"{type(value).__name__} stands in {type(value).__module__}: a framework is a file in "
                "perfsuite/frameworks/ (CONTRIBUTING.md); for a loop of your own, Script needs none"
            )
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CaseError(f"a framework is given as an object or by name, got {value!r}")
    options = {key: option for key, option in value.items() if key != "name"}
    kind = framework_class(value["name"])
    try:
        return kind.model_validate(kind.upgraded(options))
    except ValidationError as error:
        known = ", ".join(kind.model_fields) or "none"
        raise CaseError(f"{explain(error)}. Options of {value['name']}: {known}.") from None


NCCL_AFTER_S = 60
"""After a case's `timeout_s`: then NCCL's own watchdog may end a rank, for the driver has not."""
