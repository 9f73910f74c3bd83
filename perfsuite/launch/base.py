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
    """Starts jobs on the nodes that it knows. Chosen with `--perf-launcher NAME`.

    A package adds one as an entry point of the group `perfsuite.launchers`: a subclass, which is called with
    the value of each of its settings as a keyword argument.
    """

    settings: ClassVar[Sequence[Setting]] = ()
    """Its options of pytest and ini keys. Their names begin with that of the launcher: `--perf-slurm-python`
    of the launcher `slurm` is its argument `python`."""
    runs_here: ClassVar[bool] = False
    """Whether its jobs run on this machine, so that others who use this machine disturb them."""

    @classmethod
    def is_default(cls) -> bool:
        """Return whether sessions of this process use it unless the user names another; False by default."""
        return False

    @abstractmethod
    def machine(self, shared: Path) -> Machine:
        """Return what each node is and how many there are. Called once, before the first launch.

        Every node must see the directory `shared`, which contains the launches. Raises `MachineError` if a
        node does not, or if nodes differ or cannot be reached.
        """

    @property
    def lock(self) -> str | None:
        """The lock that sessions queue for; None for this machine's own. See `perfsuite.launch.lock`."""
        return None

    def check_nodes(
        self, machine: Machine, nodes: int, directory: Path, *, names: Sequence[str] = ()
    ) -> Preflight:
        """Check the first nodes before the first case on so many. `names` are those of the nodes, if known.

        By default a short job in `directory` probes each of them (`perfsuite.launch.preflight`).
        """
        return preflight(self.launch, machine, nodes, directory, names=names)

    @abstractmethod
    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        """Run a job to its end, at most `case.timeout_s`. Afterwards none of its processes lives anywhere.

        Return why the job was ended before its ranks had ended, or what its scheduler reports about its end;
        None if neither is known. The reports of the ranks say how they ended.
        Every node runs `python -m perfsuite.node.agent RUNDIR` (`perfsuite.launch.driving`). Raises
        `AllocationOverError` if no further job can be started, and `LaunchError` if processes survive.
        """
