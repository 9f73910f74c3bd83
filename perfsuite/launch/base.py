"""The interface of launchers. Imports neither torch nor pytest."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from perfsuite.case.hardware import Machine
from perfsuite.inputs.setting import Setting
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.launch.preflight import preflight
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Preflight


class Launcher(ABC):
    """Starts jobs on nodes. The user chooses a launcher with `--perf-launcher NAME`.

    A package adds a launcher as an entry point of the group `perfsuite.launchers`. The launcher must be a
    subclass of this class. The subclass is called with the value of each of its settings as a keyword
    argument.
    """

    settings: ClassVar[Sequence[Setting]] = ()
    """The launcher's options and ini keys for pytest. Their names must begin with the name of the launcher.
    For example, the launcher `slurm` gets the option `--perf-slurm-python` as its argument `python`."""
    runs_here: ClassVar[bool] = False
    """Whether the jobs run on this machine. If so, other users of this machine disturb them."""

    @classmethod
    def is_default(cls) -> bool:
        """Return whether sessions of this process use this launcher by default."""
        return False

    @abstractmethod
    def machine(self, shared: Path) -> Machine:
        """Return a `Machine` that describes each node and has the number of nodes.

        Called once, before the first launch.

        Every node must see the directory `shared`, which contains the launches. Raises `MachineError` if a
        node cannot see it, if nodes differ, or if a node cannot be reached.
        """

    @property
    def lock(self) -> str | None:
        """The file of the lock that sessions wait for. None: the lock of this machine. See `MachineLock`."""
        return None

    def check_nodes(
        self, machine: Machine, nodes: int, directory: Path, *, names: Sequence[str] = ()
    ) -> Preflight:
        """Check the first `nodes` nodes, which have these `names`. Called before the first case that needs
        these nodes.

        By default, a short job in `directory` probes each node (`perfsuite.launch.preflight`).
        """
        return preflight(self.launch, machine, nodes, directory, names=names)

    @abstractmethod
    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        """Run a job to its end, for at most `case.timeout_s`. Afterwards, no process of the job is alive.

        Every node runs `python -m perfsuite.node.agent RUNDIR` (`perfsuite.launch.driving`). The ranks report
        how they ended. This method returns a failure only if the job was ended before its ranks had ended, or
        if the scheduler reports a failure. Raises `AllocationOverError` if no further job can be started, and
        `LaunchError` if processes survive.
        """
