"""Finds the bad nodes of a preflight by comparing them: what all of them share is not seen. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfsuite.analysis.health import hardware_fault, machine_problems
from perfsuite.case.hardware import Machine
from perfsuite.results.run import Health
from perfsuite.results.session_file import NodePreflight, Preflight

GPU_SHARE = 0.75
"""Least rate of a node's slowest GPU, as a share of the best other node's. GPUs of one model differ by up to
22 % for no other reason than that they are different cards (arXiv 2208.11035)."""
CPU_SHARE = 0.4
"""The same of cores, which others may use meanwhile: with a load of 8 on two cores, the worse of two equal
nodes had 88 % of the other's matmul and 50 % of its copy, in the worst of 10 preflights."""
LINK_SHARE = 0.5
"""Least rate of the all-reduces with a node, as a share of the best between two others: the way between two
nodes may be longer than that between two others."""
JUDGED = {"matmul_tflops": "matmul {:.3g} TFLOP/s", "copy_gb_s": "copy {:.3g} GB/s"}
"""The rates that a node has by itself, and how a sentence tells them."""


def judged(preflight: Preflight) -> Preflight:
    """Return the preflight with what its readings say against each node added to its problems."""
    nodes = preflight.nodes
    links = {
        (number, (number + 1) % len(nodes)): node.rates["next_gb_s"]
        for number, node in enumerate(nodes)
        if "next_gb_s" in node.rates
    }
    return preflight.replace(
        nodes=tuple(
            node.replace(
                problems=(
                    *node.problems,
                    *_slow(node, nodes, preflight.machine),
                    *_slow_links(number, links),
                    *_gpu_problems(node.health, preflight.machine),
                )
            )
            for number, node in enumerate(nodes)
        )
    )


def _slow(node: NodePreflight, nodes: Sequence[NodePreflight], machine: Machine) -> list[str]:
    share = GPU_SHARE if machine.device == "cuda" else CPU_SHARE
    found = []
    for name, words in JUDGED.items():
        others = [(each.rates[name], each.name) for each in nodes if each is not node and name in each.rates]
        best, whose = max(others, default=(0.0, ""))
        if node.rates.get(name, math.inf) < share * best:
            found.append(
                f"{words.format(node.rates[name])}, {whose} has {best:.3g} (at least {share:.0%} is healthy)"
            )
    return found


def _slow_links(node: int, links: dict[tuple[int, int], float]) -> list[str]:
    """What is wrong if all-reduces with both neighbours are far slower than between other nodes. `links` are
    in GB/s, by the numbers of two neighbours.

    One slow link alone says nothing against either of its ends; of two nodes there is no other to compare.
    """
    own = [rate for pair, rate in links.items() if node in pair]
    others = [rate for pair, rate in links.items() if node not in pair]
    if len(own) < 2 or not others or max(own) >= LINK_SHARE * max(others):
        return []
    rates = " and ".join(f"{rate:.3g}" for rate in own)
    return [
        f"all-reduce with its neighbours {rates} GB/s, between other nodes {max(others):.3g} "
        f"(at least {LINK_SHARE:.0%} is healthy)"
    ]


def _gpu_problems(health: Health | None, machine: Machine) -> list[str]:
    """What NVML says against the GPUs of a node: as for a launch, and memory that waits for a reset."""
    if health is None or machine.device == "cpu":
        return []
    pending = [f"{card.name}: {each}" for card in health.devices for each in card.memory_pending]
    silent = [note for note in health.notes if hardware_fault(note) or "NVML does not answer" in note]
    return [*machine_problems(health, machine), *pending, *silent]
