"""The jobs that launchers start. Imports neither torch nor pytest."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.results.run_dir import RunDir

OnProgress = Callable[[int, int], None]
"""Called many times per second. The arguments are the number of steps that rank 0 has finished, and the
number of tokens in a step."""


def no_progress(step: int, tokens_per_step: int) -> None:
    """Ignore the progress of a job."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job for a launcher to start. The run directory contains only the case so far."""

    run_dir: RunDir
    case: Case
    machine: Machine  #: A description of the machine that applies to every node.
    python: str = sys.executable  #: The Python interpreter of the agents and ranks.
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all processes of the job. They override those of the case and of perfsuite."""
    directory: Path | None = None  #: The directory in which agents and scripts run. None: the current one.
