"""How speed grows with the number of nodes, in cases that differ in nothing else. Pure."""

from collections import defaultdict
from collections.abc import Iterable

from perfsuite.case.case import Case
from perfsuite.report.text import plural
from perfsuite.results.session_file import Measurement


def scalings(results: Iterable[Measurement]) -> list[str]:
    """Return a sentence for each group of cases that one kind of device measured on several numbers of nodes.

    A share is the speed of one device by that on the fewest nodes; each device has the same work.
    """
    groups: dict[tuple[str, str], list[tuple[Case, float]]] = defaultdict(list)
    for result in results:
        if result.no_evidence is None and (speed := result.figures.tokens_per_s) is not None:
            run = result.runs[-1]
            on_one_node = run.case.replace(topology=run.case.topology.replace(nodes=1))
            of_device = speed / run.case.topology.world_size
            groups[run.machine.device_name, on_one_node.model_dump_json()].append((run.case, of_device))
    told = []
    for cases in groups.values():
        cases.sort(key=lambda each: each[0].topology.nodes)
        first, of_fewest = cases[0]
        if first.topology.nodes < cases[-1][0].topology.nodes:
            name = first.id.removesuffix(f"-{first.parameters['topology']}")
            parts = (
                f"{plural(case.topology.nodes, 'node')} {speed / of_fewest:.0%}" for case, speed in cases
            )
            told.append(f"scaling of {name}: {', '.join(parts)} of the speed per device")
    return told
