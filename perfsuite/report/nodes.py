"""Describe the results of a preflight, and how speed scales with the number of nodes. Pure."""

from collections import defaultdict
from collections.abc import Iterable

from perfsuite.case.case import Case
from perfsuite.report.text import NONE, Table, plural
from perfsuite.results.session_file import Measurement, Preflight

RATES = {  # heading and unit of each rate of a node, in the order of the columns
    "matmul_tflops": ("matmul", "TFLOP/s"),
    "copy_gb_s": ("copy", "GB/s"),
    "all_reduce_gb_s": ("all-reduce of all", "GB/s"),
    "previous_gb_s": ("with previous node", "GB/s"),
    "next_gb_s": ("with next node", "GB/s"),
}


def title(preflight: Preflight) -> str:
    """Summarise a preflight: its nodes, its duration, and the number of bad nodes."""
    bad = sum(bool(node.problems) for node in preflight.nodes)
    outcome = f"{bad} of them bad" if bad else "none of them bad"
    if preflight.failure is not None:
        outcome = f"it failed, so nothing is known about the nodes: {preflight.failure}"
    nodes = plural(len(preflight.nodes), "node")
    took = f"{preflight.duration_s:.0f} s"
    return f"preflight of {nodes} ({preflight.machine.device_name}) in {took}: {outcome}"


def table(preflight: Preflight) -> Table:
    """Return the rates and the problems of each node as a table."""
    rows = [
        (
            node.name,
            *(
                f"{node.rates[key]:.3g} {unit}" if key in node.rates else NONE
                for key, (_, unit) in RATES.items()
            ),
            "; ".join(node.problems) or "nothing",
        )
        for node in preflight.nodes
    ]
    caption = (
        "The speed of each node before the first launch: the rates of its slowest rank. Nodes are compared "
        "with each other."
    )
    headers = ("node", *(heading for heading, _ in RATES.values()), "what is wrong")
    return Table(caption=caption, headers=headers, rows=rows, last_text_columns=1)


def notes(preflight: Preflight) -> list[str]:
    """Return the notes on the nodes' GPUs, such as why a reading failed, each as `node: note`."""
    by_node = [(node.name, node.health.notes) for node in preflight.nodes if node.health is not None]
    return [f"{name}: {note}" for name, texts in by_node for note in texts]


def scalings(results: Iterable[Measurement]) -> list[str]:
    """Return a sentence for each group of cases that differ only in the number of nodes.

    All cases of a group use the same kind of device. A share is the speed per device, relative to the speed
    per device on the smallest number of nodes.
    """
    groups = defaultdict[tuple[str, str], list[tuple[Case, float]]](list)
    for result in results:
        if result.no_evidence is None:
            speed = result.figures.tokens_per_s
            if speed is not None:
                run = result.runs[-1]
                on_one_node = run.case.replace(topology=run.case.topology.replace(nodes=1))
                of_device = speed / run.case.topology.world_size
                groups[run.machine.device_name, on_one_node.model_dump_json()].append((run.case, of_device))
    sentences = []
    for cases in groups.values():
        cases.sort(key=lambda entry: entry[0].topology.nodes)
        first, of_fewest = cases[0]
        if first.topology.nodes < cases[-1][0].topology.nodes:
            name = first.id.removesuffix(f"-{first.parameters['topology']}")
            parts = [
                f"{plural(case.topology.nodes, 'node')} {speed / of_fewest:.0%}" for case, speed in cases
            ]
            sentences.append(
                f"speed per device of {name}, relative to the smallest number of nodes: {', '.join(parts)}"
            )
    return sentences
