"""How speed grows with the number of nodes: cases that differ in nothing else, side by side. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfsuite.case.case import Case
from perfsuite.report.text import Table, plural
from perfsuite.results.amounts import rate
from perfsuite.results.session_file import Measurement


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Cases that differ in the number of nodes alone, the fewest first."""

    name: str  # what they share: the id, without the topology
    cases: Sequence[tuple[Case, float]]  # each case with its speed

    @property
    def efficiencies(self) -> list[float]:
        """The speed per device as a share of that with the fewest nodes; each device has the same work."""
        per_device = [speed / case.topology.world_size for case, speed in self.cases]
        return [each / per_device[0] for each in per_device]

    def table(self) -> Table:
        """Return a row for each case."""
        rows = [
            (
                str(case.topology.nodes),
                str(case.topology.world_size),
                f"{rate(speed)} {case.unit}/s",
                f"{rate(speed / case.topology.world_size)} {case.unit}/s",
                f"{efficiency:.0%}",
            )
            for (case, speed), efficiency in zip(self.cases, self.efficiencies, strict=True)
        ]
        caption = (
            "Cases that differ in nodes alone; efficiency is the speed per device by that of the first row."
        )
        headers = ("nodes", "devices", "speed", "per device", "efficiency")
        return Table(caption=caption, headers=headers, rows=rows)

    def __str__(self) -> str:
        nodes = [plural(case.topology.nodes, "node") for case, _ in self.cases]
        parts = [f"{each} {share:.0%}" for each, share in zip(nodes, self.efficiencies, strict=True)]
        return f"scaling of {self.name}: {', '.join(parts)} of the speed per device"


def scalings(results: Iterable[Measurement]) -> list[Scaling]:
    """Return every group of cases that one kind of device measured with different numbers of nodes."""
    groups: dict[tuple[str, str], list[tuple[Case, float]]] = defaultdict(list)
    for result in results:
        if result.no_evidence is None and (speed := result.figures.tokens_per_s) is not None:
            run = result.runs[-1]
            on_one_node = run.case.replace(topology=run.case.topology.replace(nodes=1))
            groups[run.machine.device_name, on_one_node.model_dump_json()].append((run.case, speed))
    found = []
    for cases in groups.values():
        cases.sort(key=lambda each: each[0].topology.nodes)
        first, last = cases[0][0], cases[-1][0]
        if first.topology.nodes < last.topology.nodes:
            name = first.id.removesuffix(f"-{first.parameters['topology']}")
            found.append(Scaling(name=name, cases=cases))
    return found
