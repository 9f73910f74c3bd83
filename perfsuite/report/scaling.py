"""How speed grows with the number of nodes: cases that differ in nothing else, side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from perfsuite.case.case import Case, Unit
from perfsuite.report.table import Table
from perfsuite.report.text import plural
from perfsuite.results.amounts import rate
from perfsuite.results.session_file import Measurement


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """One case of such a group."""

    nodes: int
    devices: int
    tokens_per_s: float
    efficiency: float
    """Speed per device as a share of that with the fewest nodes; each device has the same work."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Cases that differ in the number of nodes alone, the fewest first."""

    name: str
    """What they share: the id, without the topology."""
    unit: Unit
    cases: tuple[Scaled, ...]

    def table(self) -> Table:
        """Return a row for each case."""
        rows = [
            (
                str(each.nodes),
                str(each.devices),
                f"{rate(each.tokens_per_s)} {self.unit}/s",
                f"{rate(each.tokens_per_s / each.devices)} {self.unit}/s",
                f"{each.efficiency:.0%}",
            )
            for each in self.cases
        ]
        caption = (
            "Cases that differ in nodes alone; efficiency is the speed per device by that of the first row."
        )
        headers = ("nodes", "devices", "speed", "per device", "efficiency")
        return Table(caption=caption, headers=headers, rows=rows)

    def __str__(self) -> str:
        parts = [f"{plural(each.nodes, 'node')} {each.efficiency:.0%}" for each in self.cases]
        return f"scaling of {self.name}: {', '.join(parts)} of the speed per device"


def scalings(results: Iterable[Measurement]) -> list[Scaling]:
    """Return every group of cases that one kind of device measured with different numbers of nodes."""
    groups: dict[tuple[str, str], list[tuple[Case, float]]] = {}
    for result in results:
        if result.no_evidence:
            continue
        speeds = [run.figures.tokens_per_s for run in result.healthy_runs]
        known = [speed for speed in speeds if speed is not None]
        if known:
            run = result.runs[-1]
            key = (run.machine.device_name, _without_nodes(run.case))
            groups.setdefault(key, []).append((run.case, median(known)))
    return [
        _scaling(cases) for cases in groups.values() if len({case.topology.nodes for case, _ in cases}) > 1
    ]


def _without_nodes(case: Case) -> str:
    return case.replace(topology=case.topology.replace(nodes=1)).model_dump_json()


def _scaling(cases: list[tuple[Case, float]]) -> Scaling:
    ordered = sorted(cases, key=lambda each: each[0].topology.nodes)
    first, first_speed = ordered[0]
    best = first_speed / first.topology.world_size
    return Scaling(
        name=first.id.removesuffix(f"-{first.parameters['topology']}"),
        unit=first.unit,
        cases=tuple(
            Scaled(
                nodes=case.topology.nodes,
                devices=case.topology.world_size,
                tokens_per_s=speed,
                efficiency=speed / case.topology.world_size / best,
            )
            for case, speed in ordered
        ),
    )
