"""The interface of launchers, and the jobs that they start. Imports neither torch nor pytest."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import RunDir

OnProgress = Callable[[int, int], None]
"""Called many times a second with the number of steps that rank 0 has finished and the tokens of one step."""


def no_progress(step: int, tokens_per_step: int) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job for a launcher to start. Only `run_dir.case` has been written."""

    run_dir: RunDir
    case: Case
    machine: Machine  #: The machine of each node.
    python: str = sys.executable  #: The interpreter of the agents and ranks.
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all its processes. They override those of the case and of perfsuite."""
    directory: Path | None = None  #: Where its agents and scripts run; None for this process's directory.


class Launcher(Protocol):
    """Starts jobs on the nodes that it knows. Chosen with `--perf-launcher NAME`.

    A package adds one as an entry point of the group `perfsuite.launchers`: a class without constructor
    arguments.
    """

    name: ClassVar[str]

    def machine(self, shared: Path) -> Machine:
        """Return what each node is and how many there are. Called once, before the first launch.

        Every node must see the directory `shared`, which contains the launches. Raises `MachineError` if a
        node does not, or if nodes differ or cannot be reached.
        """

    @property
    def lock(self) -> str | None:
        """The lock that sessions queue for; None for this machine's own. See `perfsuite.launch.lock`."""

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        """Run a job to its end, at most `case.timeout_s`. Afterwards none of its processes lives anywhere.

        Return why the job was ended before its ranks had ended, or what its scheduler reports about its end;
        None if neither is known. The reports of the ranks say how they ended.
        Every node runs `python -m perfsuite.node.agent RUNDIR` (`perfsuite.launch.driving`). Raises
        `AllocationOverError` if no further job can be started, and `LaunchError` if processes survive.
        """
