"""What a preflight measured of each node, as data. `perfsuite.analysis.bad_nodes` judges it."""

from __future__ import annotations

from pydantic import Field

from perfsuite.case.hardware import Machine
from perfsuite.documents import Data
from perfsuite.results.run import Health


class NodePreflight(Data):
    """One node in a preflight."""

    name: str
    rates: dict[str, float] = Field(default_factory=dict)
    """Those of its slowest rank (`perfsuite.worker.node_probe`). Empty if a rank did not report."""
    health: Health | None = None
    """Its GPUs by NVML meanwhile."""
    problems: tuple[str, ...] = ()
    """What is wrong with it, with the readings."""


class Preflight(Data):
    """One preflight: what the first nodes of a session could do before they were used."""

    started_at: str
    """ISO 8601, with time zone."""
    duration_s: float
    machine: Machine
    """What each of the nodes is."""
    nodes: tuple[NodePreflight, ...]
    """In the order of their ranks."""
    failure: str | None = None
    """Why it failed alike on every node, which says nothing against any of them; else None."""
    directory: str
    """The directory with its files."""

    @property
    def problems(self) -> list[str]:
        """What is wrong with each node, behind its name."""
        return [f"{node.name}: {problem}" for node in self.nodes for problem in node.problems]
