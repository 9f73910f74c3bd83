"""The jobs that launchers start. Imports neither torch nor pytest."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
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
