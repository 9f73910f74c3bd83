"""What a launch is asked for, and who launches. Imports neither torch nor pytest."""

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
"""Is called many times a second with the steps that rank 0 has finished and the tokens of one step."""


def no_progress(step: int, tokens_per_step: int) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a launcher is to start: `run_dir.case` is written, nothing else is."""

    run_dir: RunDir
    case: Case
    machine: Machine  #: The machine of each node.
    python: str = sys.executable  #: The interpreter of the agents and ranks.
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all its processes: they win over those of the case and of perfsuite."""
    directory: Path | None = None  #: Where its agents run, and so its scripts; None: where this process does.


class Launcher(Protocol):
    """Starts jobs on the nodes that it knows. One is chosen by `--perf-launcher NAME`.

    A package adds one as an entry point of the group `perfsuite.launchers`: a class that takes no argument.
    """

    name: ClassVar[str]

    def machine(self, shared: Path) -> Machine:
        """Return what each node is, and how many nodes there are. Called once, before the first launch.

        Every node must see the directory `shared`, where launches are. Raises `MachineError` where one does
        not, or where nodes are unlike or cannot be reached.
        """

    @property
    def lock(self) -> str | None:
        """What sessions queue for; None for this machine. See `perfsuite.launch.lock`."""

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        """Run a job to its end, at most `case.timeout_s`. Afterwards none of its processes lives, anywhere.

        Returns why the job was ended before its ranks had ended, or what its scheduler says of its end; None
        where neither is known. How ranks ended is in their reports.
        Every node runs `python -m perfsuite.node.agent RUNDIR` (`perfsuite.launch.driving`). Raises
        `AllocationOverError` where no further job can be started, and `LaunchError` where processes stay.
        """
