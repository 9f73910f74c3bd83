from __future__ import annotations

from perfsuite.analysis import nodes
from perfsuite.analysis.health import machine_problems, unknown_health
from perfsuite.case.case import Topology
from perfsuite.results.run import DeviceHealth, Health, LaunchFile, Node
from tests.samples import make_case, make_machine, make_run

CASE = make_case(topology=Topology(nodes=2, processes_per_node=2))


def health(**changes: object) -> Health:
    values: dict[str, object] = {
        "samples": 20,
        "seconds": 5.0,
        "steps": 19,
        "foreign_cpu": 0.02,
        "steal": 0.0,
    }
    return Health(**{**values, **changes})


def test_one_machine_has_no_nodes() -> None:
    run = nodes.with_nodes(make_run(), {0: LaunchFile(host="here", health=health())}, {})
    assert (run.nodes, run.health) == ((), health())
    assert nodes.with_nodes(make_run(), {}, {}).health is None


def test_a_node_whose_agent_wrote_nothing_keeps_its_place() -> None:
    agents = {1: LaunchFile(host="n2", health=health())}
    run = nodes.with_nodes(make_run(case=CASE), agents, {0: "n1", 1: "n2"})
    assert [node.name for node in run.nodes] == ["n1", "n2"]
    assert run.health == health(node="n2", samples=0, notes=("n1: its health is unknown",))
    assert unknown_health(run.health), "of one of them"
    assert nodes.with_nodes(make_run(case=CASE), agents, {}).nodes[0].name == "node 0"


def test_the_worst_of_the_nodes_is_judged_and_named() -> None:
    quiet = health(samples=10, job_cpu=0.9, load_average=1.0, notes=("a note",))
    busy = health(seconds=4.0, foreign_cpu=0.6, steal=0.2, job_cpu=0.3, load_average=4.0)
    run = nodes.with_nodes(
        make_run(case=CASE),
        {0: LaunchFile(host="n1", health=quiet), 1: LaunchFile(host="n2", health=busy)},
        {},
    )
    assert [(node.name, node.health) for node in run.nodes] == [("n1", quiet), ("n2", busy)]
    assert run.health == health(
        node="n2",
        samples=10,
        seconds=4.0,
        job_cpu=0.3,
        foreign_cpu=0.6,
        steal=0.2,
        load_average=4.0,
        notes=("n1: a note",),
    )
    assert machine_problems(run.health, make_machine()) == [
        "other processes used 60% of the cores' time of n2 (at most 20% is healthy)",
        "the hypervisor took 20% of the cores' time of n2 (steal; at most 10% is healthy)",
    ]


def test_gpus_of_all_nodes_are_told_apart_and_the_slowest_clock_counts() -> None:
    first = health(devices=(DeviceHealth(index=0),), sm_clocks_mhz=((1, 1900.0), (2, 1800.0)))
    second = health(devices=(DeviceHealth(index=0),), sm_clocks_mhz=((2, 1700.0), (3, 1600.0)))
    worst = nodes.worst([Node(name="n1", health=first), Node(name="n2", health=second)])
    assert worst is not None
    assert [device.name for device in worst.devices] == ["GPU 0 of n1", "GPU 0 of n2"]
    assert worst.sm_clocks_mhz == ((1, 1900.0), (2, 1700.0), (3, 1600.0))


def test_a_node_that_was_not_sampled_is_left_out() -> None:
    assert nodes.worst([Node(name="n1"), Node(name="n2")]) is None
    worst = nodes.worst([Node(name="n1"), Node(name="n2", health=health(foreign_cpu=None, steal=None))])
    assert worst is not None
    assert (worst.foreign_cpu, worst.node) == (None, "n2")
