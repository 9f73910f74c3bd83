from __future__ import annotations

from typing import Any

import pytest

from perfsuite.analysis.bad_nodes import judged
from perfsuite.results.run import DeviceHealth, Health
from perfsuite.results.session_file import NodePreflight, Preflight
from tests.samples import make_gpu_machine, make_machine

GIB = 2**30


def make_preflight(*nodes: NodePreflight, on_gpu: bool = False) -> Preflight:
    return Preflight(
        started_at="2026-01-02T03:04:05+00:00",
        duration_s=9.0,
        machine=make_gpu_machine() if on_gpu else make_machine(),
        nodes=nodes,
        directory="store/preflight-1",
    )


def make_node(number: int, *, health: Health | None = None, **rates: float) -> NodePreflight:
    usual = {"matmul_tflops": 0.1, "copy_gb_s": 10.0, "all_reduce_gb_s": 0.5, "next_gb_s": 1.0}
    return NodePreflight(name=f"n{number}", rates={**usual, **rates}, health=health)


def problems(*nodes: NodePreflight, on_gpu: bool = False) -> list[str]:
    return judged(make_preflight(*nodes, on_gpu=on_gpu)).problems


def make_health(**card: Any) -> Health:
    notes = card.pop("notes", ())
    device = DeviceHealth(index=3, pci_bus_id="00000000:5B:00.0", **card)
    return Health(samples=9, seconds=3, steps=9, devices=(device,), notes=notes)


@pytest.mark.parametrize(
    ("slow", "on_gpu", "told"),
    [
        ({"matmul_tflops": 0.041, "copy_gb_s": 4.0}, False, None),
        ({"matmul_tflops": 0.039}, False, "n2: matmul 0.039 TFLOP/s, n3 has 0.1 (at least 40% is healthy)"),
        ({"copy_gb_s": 3.9}, False, "n2: copy 3.9 GB/s, n3 has 10 (at least 40% is healthy)"),
        ({"matmul_tflops": 0.078}, True, None),
        ({"matmul_tflops": 0.074}, False, None),  # GPUs scatter less than cores
        ({"matmul_tflops": 0.074}, True, "n2: matmul 0.074 TFLOP/s, n3 has 0.1 (at least 75% is healthy)"),
    ],
)
def test_a_rate_far_below_that_of_the_best_other_node_is_told_with_both(
    slow: Any, on_gpu: bool, told: str | None
) -> None:
    nodes = make_node(1), make_node(2, **slow), make_node(3)
    assert problems(*nodes, on_gpu=on_gpu) == ([] if told is None else [told])


@pytest.mark.parametrize("nodes", [3, 4, 5])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_node_that_is_slow_with_both_neighbours_is_told_from_them(nodes: int, bad: int) -> None:
    slow = {bad, (bad - 1) % nodes}
    rates = [0.4 if number in slow else 1.0 for number in range(nodes)]
    found = problems(*(make_node(number, next_gb_s=rate) for number, rate in enumerate(rates)))
    assert found == [
        f"n{bad}: all-reduce with its neighbours 0.4 and 0.4 GB/s, between other nodes 1 "
        "(at least 50% is healthy)"
    ]


def test_links_are_compared_with_the_best_one_between_other_nodes() -> None:
    """Of five nodes; those of node 1 to node 0 and node 2 have 0.4 and 0.5."""
    rates = [0.4, 0.5, 0.3, 1.0, 1.0]
    assert problems(*(make_node(number, next_gb_s=rate) for number, rate in enumerate(rates))) == []
    rates[3] = 1.1
    assert problems(*(make_node(number, next_gb_s=rate) for number, rate in enumerate(rates)))[0] == (
        "n1: all-reduce with its neighbours 0.4 and 0.5 GB/s, between other nodes 1.1 "
        "(at least 50% is healthy)"
    )


def test_one_slow_link_says_nothing_against_either_end() -> None:
    assert problems(*(make_node(number, next_gb_s=0.1 if number == 1 else 1.0) for number in range(4))) == []


def test_a_node_of_which_one_link_is_not_known_is_not_judged_by_the_other() -> None:
    silent = NodePreflight(name="n3", problems=("crash: exit code 1",))
    nodes = (make_node(0), make_node(1), make_node(2, next_gb_s=0.1), silent, make_node(4, next_gb_s=0.1))
    assert problems(*nodes) == ["n3: crash: exit code 1"]


def test_of_two_nodes_there_is_no_other_link_to_compare() -> None:
    assert problems(make_node(1, next_gb_s=0.001), NodePreflight(name="n2")) == []


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (make_health(memory_faults=("rows wait: reset the GPU",)), "rows wait: reset the GPU"),
        (make_health(throttled={"HwThermalSlowdown": 0.5}), "was throttled: HwThermalSlowdown in 50%"),
        (make_health(foreign_memory_bytes=GIB), "was shared: other processes held 1.00 GiB"),
        (make_health(held_before_bytes=3 * GIB), "3.00 GiB held before the launch"),
        (make_health(notes=("GPU 3: nvmlDeviceGetUUID: GPU is lost",)), "GPU is lost"),
        (make_health(notes=("NVML does not answer (a GPU that is lost?)",)), "NVML does not answer"),
        (make_health(throttled={"SwPowerCap": 1.0}, foreign_memory_bytes=2**20), None),
        (make_health(notes=("GPU 3: PCIe width x8, it can have x16: copies are slower",)), None),
    ],
)
def test_what_nvml_says_against_a_gpu_is_said_against_its_node(seen: Health, told: str | None) -> None:
    found = problems(make_node(1), make_node(2, health=seen), on_gpu=True)
    assert len(found) == (told is not None)
    assert told is None or (found[0].startswith("n2: ") and told in found[0])


def test_on_cores_others_may_work_meanwhile() -> None:
    busy = Health(samples=9, seconds=3, steps=9, foreign_cpu=0.9, steal=0.5)
    assert problems(make_node(1), make_node(2, health=busy)) == []
