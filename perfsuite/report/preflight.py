"""Tells in tables what a preflight found out about each node. Pure; imports neither torch nor pytest."""

from perfsuite.report.terminal import lines_of
from perfsuite.report.text import NONE, Table, plural
from perfsuite.results.session_file import Preflight

RATES = {
    "matmul_tflops": ("matmul", "TFLOP/s"),
    "copy_gb_s": ("copy", "GB/s"),
    "all_reduce_gb_s": ("all-reduce of all", "GB/s"),
    "previous_gb_s": ("with previous node", "GB/s"),
    "next_gb_s": ("with next node", "GB/s"),
}
"""The heading and the unit of each rate of a node, in the order of their columns."""


def title(preflight: Preflight) -> str:
    """Return which nodes were looked at, for how long, and how many of them are bad."""
    bad = sum(bool(node.problems) for node in preflight.nodes)
    found = f"{bad} of them bad" if bad else "none of them bad"
    if preflight.failure is not None:
        found = f"it failed, which tells nothing of the nodes: {preflight.failure}"
    nodes, took = plural(len(preflight.nodes), "node"), f"{preflight.duration_s:.0f} s"
    return f"preflight of {nodes} ({preflight.machine.device_name}) in {took}: {found}"


def table(preflight: Preflight) -> Table:
    """Return the rates of each node, and what is wrong with it."""
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
        "What each node could do before the first launch: the rates of its slowest rank. Nodes are compared "
        "with each other."
    )
    headers = ("node", *(heading for heading, _ in RATES.values()), "what is wrong")
    return Table(caption=caption, headers=headers, rows=rows, last_text_columns=1)


def notes(preflight: Preflight) -> list[str]:
    """Return what else NVML said of the nodes' GPUs, or could not say, behind the name of the node."""
    told = [(node.name, node.health.notes) for node in preflight.nodes if node.health is not None]
    return [f"{name}: {note}" for name, found in told for note in found]


def as_text(preflight: Preflight) -> str:
    """Return title, table and notes as lines for a terminal, without colours."""
    lines = [f"  {line}" for line in lines_of(table(preflight))]
    return "\n".join([title(preflight), *lines, *(f"  note: {note}" for note in notes(preflight))])
