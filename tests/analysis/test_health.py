from typing import Any

import pytest

from perfsuite.analysis import health
from perfsuite.analysis.health import (
    all_shared,
    gpu_setup,
    hardware_fault,
    is_shared,
    machine_problems,
    unequal_gpus,
)
from perfsuite.case.case import Topology
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import DeviceHealth, Health, LaunchFile, Node
from tests.samples import make_case, make_gpu_machine, make_machine, make_run

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"Traceback\n  {said}\nmore", said)
        for said in (
            "CUDA error: uncorrectable ECC error encountered",
            "CUDA error: unspecified launch failure",
            "nvmlDeviceGetPowerUsage: GPU is lost",
            "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.",
            "CUDA error: uncorrectable NVLink error detected during the execution",
            "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        )
    ]
    + [
        ("one\n  Xid error 79  \nGPU is lost\n", "Xid error 79"),  # the first matching line counts
        ("RuntimeError: CUDA error: device-side assert triggered", None),
        ("", None),
    ],
)
def test_finds_the_first_hardware_fault_line(said: str, expected: str | None) -> None:
    assert hardware_fault(said) == expected


def make_health(device: dict[str, Any] | None = None, **changes: Any) -> Health:
    devices = () if device is None else (DeviceHealth(index=0, **device),)
    return Health(**{"samples": 20, "seconds": 5.0, "steps": 19, "devices": devices, **changes})


NORMAL = "SwPowerCap GpuIdle ApplicationsClocksSetting SyncBoost DisplayClockSetting BoardLimit Reliability"
BAD = "HwSlowdown HwThermalSlowdown SwThermalSlowdown HwPowerBrakeSlowdown"


WELL = DeviceHealth(index=0)
ILL = DeviceHealth(index=1, foreign_memory_bytes=GIB)
SHARED = "GPU 0 was shared: other processes held 257.0 MiB (at most 256.0 MiB is healthy)"


def throttled(why: str, more: str = "") -> str:
    return f"GPU 0 was throttled: {why} of samples (at most 5% is healthy{more})"


def held(by: str, amount: str = "1.00") -> str:
    return f"GPU 0: {amount} GiB held before the launch by {by} (at most 1.00 GiB is healthy; waited 30 s)"


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ({}, None),
        *(({"throttled": {name: 1.0}}, None) for name in NORMAL.split()),
        *(({"throttled": {name: 0.05}}, None) for name in BAD.split()),
        *(({"throttled": {name: 0.06}}, throttled(f"{name} in 6%")) for name in BAD.split()),
        (
            {"throttled": {"HwSlowdown": 0.5, "SwPowerCap": 1.0, "HwThermalSlowdown": 0.25}},
            throttled("HwSlowdown in 50%, HwThermalSlowdown in 25%"),
        ),
        (
            {"throttled": {"HwSlowdown": 0.5}, "temperature_c": 91.4, "sm_clock_mhz": 1200.0},
            throttled("HwSlowdown in 50%", "; up to 91 °C; median clock 1200 MHz"),
        ),
        ({"foreign_memory_bytes": 256 * MIB}, None),
        ({"foreign_memory_bytes": 257 * MIB}, SHARED),
        ({"held_before_bytes": GIB}, None),
        ({"held_before_bytes": 3 * GIB // 2, "held_before_by": (17, 4)}, held("pid 17, 4", "1.50")),
        ({"held_before_bytes": GIB + 1}, held("no process that NVML lists")),
    ],
)
def test_reports_gpu_problems_with_values(device: dict[str, Any], reason: str | None) -> None:
    reasons = [] if reason is None else [reason]
    assert machine_problems(make_health(device), make_gpu_machine()) == reasons


@pytest.mark.parametrize(
    ("health", "on_cpu", "on_gpu"),
    [
        (None, [], False),
        (make_health(), [], False),
        (make_health(foreign_cpu=0.2, steal=0.1), [], False),
        (make_health(foreign_cpu=0.347), ["other processes used 35% of the cores' time (at most 20%"], False),
        (make_health(steal=0.12), ["the hypervisor took 12% of the cores' time (at most 10% "], False),
        (make_health(foreign_cpu=1.0, steal=1.0), ["other processes used", "the hypervisor took"], False),
        (make_health({"foreign_memory_bytes": 256 * MIB}), [], False),
        (make_health({"foreign_memory_bytes": 256 * MIB + 1}), None, True),
        (make_health({"held_before_bytes": GIB}), [], False),
        (make_health({"held_before_bytes": GIB + 1}), None, True),
        *((make_health(devices=cards), None, True) for cards in ((WELL, ILL), (ILL, WELL))),
        (make_health({"throttled": {"HwSlowdown": 1.0}}), None, False),
    ],
)
def test_machine_is_shared_if_others_harm_it(
    health: Health | None, on_cpu: list[str] | None, on_gpu: bool
) -> None:
    """The cores are judged only if training runs on them.

    `on_cpu` is None for problems that only a GPU can have.
    """
    if on_cpu is not None:
        problems = machine_problems(health, make_machine())
        assert all(problem.startswith(start) for problem, start in zip(problems, on_cpu, strict=True))
        assert machine_problems(health, make_gpu_machine()) == []
    assert is_shared(health, make_machine()) is bool(on_cpu)
    assert is_shared(health, make_gpu_machine()) is on_gpu


def test_gpu_ranks_need_a_core_each() -> None:
    """The host launches the kernels, so a GPU waits if its host has no core."""
    for cores, foreign_cpu, ranks, left in (
        (96, 0.95, 4, None),
        (96, 0.97, 4, "97% of the cores' time of n1, which leaves each of 4 ranks 0.72 of 96 cores"),
        (8, 0.51, 4, "leaves each of 4 ranks 0.98 of 8 cores"),
        (8, 0.5, 4, None),
        (2, 0.9, 4, None),  # there were never enough cores for all ranks
        *((None, 0.99, 4, None), (8, None, 4, None), (8, 0.99, 0, None)),
    ):
        devices = tuple(DeviceHealth(index=index, node="n1") for index in range(ranks))
        elsewhere = (DeviceHealth(index=0, node="n2"),)
        busy = make_health(cores=cores, foreign_cpu=foreign_cpu, node="n1", devices=devices + elsewhere)
        said = machine_problems(busy, make_gpu_machine())
        assert len(said) == (left is not None)
        assert left is None or left in said[0]
        assert not is_shared(busy, make_gpu_machine()), (
            "perfsuite does not wait for these processes, because they hold no GPU"
        )


def test_names_a_gpu_with_fewer_nvlinks() -> None:
    links = [("n1", 18), ("n1", 17), ("n2", 12), ("n2", None)]
    devices = [DeviceHealth(index=index, node=node, nvlinks=up) for index, (node, up) in enumerate(links)]
    (said,) = machine_problems(make_health(devices=tuple(devices)), make_gpu_machine())
    assert said == "GPU 1 of n1: 17 of its NVLinks are up, but another GPU has 18 that are up"


def test_compares_nvlinks_only_with_known_ones() -> None:
    devices = (DeviceHealth(index=0, nvlinks=0), DeviceHealth(index=1, nvlinks=None))
    assert machine_problems(make_health(devices=devices), make_gpu_machine()) == []


def test_says_how_far_the_slowest_gpu_is_behind() -> None:
    run = make_run(machine=make_gpu_machine(), rank_probes=({"copy": 3000.0}, {"copy": 2400.0}))
    (note,) = unequal_gpus(run)
    assert "copy was 2400 on rank 1, GPU 1, 20% less than the 3000 on rank 0, GPU 0" in note


def test_names_a_rank_with_its_card_if_seen() -> None:
    cards = [
        DeviceHealth(index=i, node=node, pci_bus_id=f"{node}:{i}") for node in ("n1", "n2") for i in (0, 1)
    ]
    run = OF_TWO_NODES.replace(nodes=(Node(name="n1"), Node(name="n2")))
    seen = run.replace(health=make_health(devices=tuple(cards)))
    assert health.gpu_of(seen, 3) == "rank 3, GPU 1 (n2:1) of n2"
    assert health.gpu_of(run, 2) == "rank 2, GPU 0 of n2"
    assert health.gpu_of(make_run(), 1) == "rank 1, GPU 1"


def test_figures_are_shared_if_no_launch_is_healthy() -> None:
    runs = [make_run(health=make_health(foreign_cpu=share)) for share in (0.3, 0.1)]
    for unhealthy, expected in (((1, 2), True), ((1,), False)):
        verdict = Verdict(outcome="unhealthy", launches=2, unhealthy_launches=unhealthy)
        assert all_shared(verdict, runs) is all_shared(verdict, runs[::-1]) is expected
        assert not all_shared(verdict, runs[1:] * 2)


def test_reports_equal_gpu_set_ups_once() -> None:
    assert gpu_setup(None) == gpu_setup(make_health()) == gpu_setup(make_health({})) == {}
    first = DeviceHealth(index=0, power_limit_w=700, sm_clock_limit_mhz=1980, ecc=True, persistence=False)
    second = first.replace(index=1, power_limit_w=650.5, sm_clock_set_mhz=1590, ecc=False, nvlinks=0)
    both = {"gpu_sm_clock_limit_mhz": "1980", "gpu_persistence": "off"}
    alike = {"gpu_power_limit_w": "700", "gpu_ecc": "on", **both}
    assert gpu_setup(make_health(devices=(first, first))) == alike
    differ = {"gpu_power_limit_w": "650.5, 700", "gpu_ecc": "off, on", **both}
    assert gpu_setup(make_health(devices=(first, second))) == {
        **differ,
        "gpu_sm_clock_set_mhz": "1590",
        "gpu_nvlinks": "0",
    }


# Several nodes

OF_TWO_NODES = make_run(case=make_case(topology=Topology(nodes=2, processes_per_node=2)))


def quiet(**changes: Any) -> Health:
    return make_health(**{"foreign_cpu": 0.02, "steal": 0.0, **changes})


def test_node_of_a_silent_agent_keeps_its_place() -> None:
    agents = {1: LaunchFile(node=1, host="n2", health=quiet())}
    run = health.with_nodes(OF_TWO_NODES, agents, {0: "n1", 1: "n2"})
    assert [node.name for node in run.nodes] == ["n1", "n2"]
    assert run.health == quiet(node="n2", samples=0, notes=("n1: its health is unknown",))
    assert health.with_nodes(OF_TWO_NODES, agents, {}).nodes[0].name == "node 0"
    alone = health.with_nodes(make_run(), {0: LaunchFile(node=0, host="here", health=quiet())}, {})
    assert (alone.nodes, alone.health) == ((), quiet()), "a single machine has no nodes"
    assert health.with_nodes(make_run(), {}, {}).health is None


def test_judges_and_names_the_worst_node() -> None:
    first = quiet(samples=10, steps=30, job_cpu=0.9, notes=("a note",))
    busy = {"seconds": 4.0, "foreign_cpu": 0.6, "steal": 0.2, "job_cpu": 0.3}
    agents = {
        0: LaunchFile(node=0, host="n1", health=first),
        1: LaunchFile(node=1, host="n2", health=quiet(**busy)),
    }
    run = health.with_nodes(OF_TWO_NODES, agents, {})
    assert [(node.name, node.health) for node in run.nodes] == [("n1", first), ("n2", quiet(**busy))]
    assert run.health == quiet(node="n2", samples=10, notes=("n1: a note",), **busy)
    assert machine_problems(run.health, make_machine()) == [
        "other processes used 60% of the cores' time of n2 (at most 20% is healthy)",
        "the hypervisor took 20% of the cores' time of n2 (at most 10% is healthy)",
    ]


def test_worst_node_merges_gpus_and_slowest_clocks() -> None:
    clocks = {"n1": ((1, 1900.0), (2, 1800.0)), "n2": ((2, 1700.0), (3, 1600.0))}
    card = (DeviceHealth(index=0),)
    nodes = [Node(name=name, health=quiet(devices=card, sm_clocks_mhz=mhz)) for name, mhz in clocks.items()]
    worst = health.worst_health(nodes)
    assert worst is not None
    assert [device.name for device in worst.devices] == ["GPU 0 of n1", "GPU 0 of n2"]
    assert worst.sm_clocks_mhz == ((1, 1900.0), (2, 1700.0), (3, 1600.0))


def test_worst_of_unsampled_nodes_is_unknown() -> None:
    assert health.worst_health([Node(name="n1"), Node(name="n2")]) is None


def test_a_sampled_node_is_the_worst() -> None:
    unknown = Node(name="n2", health=quiet(foreign_cpu=None, steal=None))
    worst = health.worst_health([Node(name="n1"), unknown])
    assert worst is not None
    assert (worst.foreign_cpu, worst.node) == (None, "n2")
