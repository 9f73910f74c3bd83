"""What a launch on several nodes tells of each of them. Pure; imports neither torch nor pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from perfsuite.results.run import DeviceHealth, Health, LaunchFile, Node, Run

UNKNOWN = Health(samples=0, seconds=0, steps=0)
"""The health of a machine that was not sampled."""


def with_nodes(run: Run, agents: Mapping[int, LaunchFile], hosts: Mapping[int, str]) -> Run:
    """Return the run with the health of its machines, as their agents saw it, in the order of the nodes.

    `agents` and `hosts` are by the number of the node: what its agent wrote, and its name by its ranks.
    """
    count = run.case.topology.nodes
    if count == 1:
        return run.replace(health=agents[0].health if agents else None)
    nodes = tuple(
        Node(name=agents[number].host, health=agents[number].health)
        if number in agents
        else Node(name=hosts.get(number, f"node {number}"))
        for number in range(count)
    )
    return run.replace(nodes=nodes, health=worst(nodes))


def worst(nodes: Sequence[Node]) -> Health | None:
    """Return one health for all nodes: of each reading that tells trouble, the worst; None if none has any.

    GPUs of all nodes stand in it by the name of their node. A node without a reading is noted, and there are
    no samples of all of them.
    """
    seen = {node.name: node.health for node in nodes if node.health is not None}
    if not seen:
        return None
    healths = list(seen.values())
    busiest = max(seen, key=lambda name: (seen[name].foreign_cpu or 0) + (seen[name].steal or 0))
    return Health(
        node=busiest,
        samples=min(health.samples for health in healths) if len(seen) == len(nodes) else 0,
        seconds=min(health.seconds for health in healths),
        steps=min(health.steps for health in healths),
        devices=tuple(card.replace(node=name) for name, health in seen.items() for card in health.devices),
        sm_clocks_mhz=_slowest_clocks(healths),
        cores=seen[busiest].cores,
        job_cpu=_of(min, (health.job_cpu for health in healths)),
        foreign_cpu=_of(max, (health.foreign_cpu for health in healths)),
        steal=_of(max, (health.steal for health in healths)),
        load_average=_of(max, (health.load_average for health in healths)),
        cpu_pressure=_of(max, (health.cpu_pressure for health in healths)),
        notes=(
            *(f"{name}: {note}" for name, health in seen.items() for note in health.notes),
            *(f"{node.name}: its health is unknown" for node in nodes if node.health is None),
        ),
    )


def gpu_of(run: Run, rank: int) -> str:
    """Return a rank with its GPU, for messages: `rank 5, GPU 5 (00000000:9B:00.0) of n2`."""
    number, index = divmod(rank, run.case.topology.processes_per_node)
    node = run.nodes[number].name if number < len(run.nodes) else None
    known = run.health.devices if run.health is not None else ()
    cards = [card for card in known if (card.index, card.node) == (index, node)]
    return f"rank {rank}, {(cards or [DeviceHealth(index=index, node=node)])[0].name}"


def _of(choose: Callable[[Iterable[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _slowest_clocks(healths: Sequence[Health]) -> tuple[tuple[int, float], ...]:
    """Return for each number of finished steps the slowest clock that any node had then."""
    clocks: dict[int, float] = {}
    for step, clock in (each for health in healths for each in health.sm_clocks_mhz):
        clocks[step] = min(clock, clocks.get(step, clock))
    return tuple(sorted(clocks.items()))
