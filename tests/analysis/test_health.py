from __future__ import annotations

from typing import Any

import pytest

from perfsuite.analysis import health
from perfsuite.analysis.health import gpu_setup, hardware_fault, is_shared, machine_problems
from perfsuite.results.run import DeviceHealth, Health
from tests.samples import make_gpu_machine, make_machine

GIB = 2**30


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unspecified launch failure",
        "nvmlDeviceGetPowerUsage: GPU is lost",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    ],
)
def test_what_speaks_of_broken_hardware_is_found(said: str) -> None:
    assert hardware_fault(f"Traceback\n  {said}\nmore") == said
    assert hardware_fault("RuntimeError: CUDA error: device-side assert triggered") is None


def make_health(device: dict[str, Any] | None = None, **changes: Any) -> Health:
    devices = () if device is None else (DeviceHealth(index=0, **device),)
    return Health(**{"samples": 20, "seconds": 5.0, "steps": 19, "devices": devices, **changes})


def test_nothing_known_is_not_unhealthy() -> None:
    assert machine_problems(None, make_machine()) == []
    assert machine_problems(make_health({}), make_gpu_machine()) == []


@pytest.mark.parametrize(
    "name", ["HwSlowdown", "HwThermalSlowdown", "SwThermalSlowdown", "HwPowerBrakeSlowdown"]
)
def test_throttling_for_more_than_a_moment_is_unhealthy(name: str) -> None:
    assert machine_problems(make_health({"throttled": {name: 0.05}}), make_gpu_machine()) == []
    assert machine_problems(make_health({"throttled": {name: 0.06}}), make_gpu_machine()) == [
        f"GPU 0 was throttled: {name} in 6% of samples (at most 5% is healthy)"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "SwPowerCap",
        "GpuIdle",
        "ApplicationsClocksSetting",
        "SyncBoost",
        "DisplayClockSetting",
        "BoardLimit",
        "Reliability",
    ],
)
def test_reasons_that_are_normal(name: str) -> None:
    assert machine_problems(make_health({"throttled": {name: 1.0}}), make_gpu_machine()) == []


def test_a_little_foreign_memory_is_let_pass() -> None:
    assert machine_problems(make_health({"foreign_memory_bytes": 256 * 2**20}), make_gpu_machine()) == []
    assert (
        len(machine_problems(make_health({"foreign_memory_bytes": 256 * 2**20 + 1}), make_gpu_machine())) == 1
    )


def test_a_busy_processor_is_unhealthy_where_it_trains() -> None:
    busy = make_health(foreign_cpu=0.347, steal=0.12)
    assert machine_problems(busy, make_machine()) == [
        "other processes used 35% of the cores' time (at most 20% is healthy)",
        "the hypervisor took 12% of the cores' time (steal; at most 10% is healthy)",
    ]
    assert machine_problems(busy, make_gpu_machine()) == []
    assert machine_problems(make_health(foreign_cpu=0.2, steal=0.1), make_machine()) == []


@pytest.mark.parametrize(
    ("health", "on_cpu", "on_gpu"),
    [
        (None, False, False),
        (make_health(), False, False),
        (make_health(foreign_cpu=0.2, steal=0.1), False, False),
        (make_health(foreign_cpu=0.21), True, False),
        (make_health(steal=0.11), True, False),
        (make_health({"foreign_memory_bytes": 256 * 2**20}), False, False),
        (make_health({"foreign_memory_bytes": 2 * GIB}), False, True),
        (make_health({"held_before_bytes": GIB}), False, False),
        (make_health({"held_before_bytes": 2 * GIB}), False, True),
        (make_health({"throttled": {"HwSlowdown": 1.0}}), False, False),
    ],
)
def test_a_machine_is_shared_where_others_are_unhealthy_for_it(
    health: Health | None, on_cpu: bool, on_gpu: bool
) -> None:
    assert is_shared(health, make_machine()) is on_cpu
    assert is_shared(health, make_gpu_machine()) is on_gpu


@pytest.mark.parametrize(
    ("cores", "foreign_cpu", "ranks", "left"),
    [
        (96, 0.95, 4, None),
        (96, 0.97, 4, "97% of the cores' time, which leaves 0.72 of 96 cores to each of 4 ranks"),
        (8, 0.51, 4, "leaves 0.98 of 8 cores"),
        (8, 0.5, 4, None),
        (2, 0.9, 4, None),  # never had a core each
        (None, 0.99, 4, None),
        (8, None, 4, None),
        (8, 0.99, 0, None),
    ],
)
def test_others_that_leave_ranks_of_gpus_less_than_a_core_each_are_unhealthy(
    cores: int | None, foreign_cpu: float | None, ranks: int, left: str | None
) -> None:
    """The host launches the kernels: a GPU waits for a host that has no core."""
    devices = tuple(DeviceHealth(index=index, node="n1") for index in range(ranks))
    elsewhere = (DeviceHealth(index=0, node="n2"),)
    busy = make_health(cores=cores, foreign_cpu=foreign_cpu, node="n1", devices=devices + elsewhere)
    said = machine_problems(busy, make_gpu_machine())
    assert len(said) == (left is not None)
    assert left is None or left.replace("time,", "time of n1,") in said[0]
    assert not is_shared(busy, make_gpu_machine()), "nobody waits for them: they hold no GPU"


def test_the_thresholds() -> None:
    """As the documentation tells them."""
    assert health.THROTTLED_SHARE == 0.05
    assert health.FOREIGN_MEMORY_BYTES == 256 * 2**20
    assert health.FOREIGN_CPU_SHARE == 0.20
    assert health.STEAL_SHARE == 0.10
    assert (health.HELD_BYTES, health.FREE_S) == (2**30, 30)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (
            {"throttled": {"HwSlowdown": 0.5, "SwPowerCap": 1.0, "HwThermalSlowdown": 0.25}},
            "GPU 0 was throttled: HwSlowdown in 50%, HwThermalSlowdown in 25% of samples (at most 5% is "
            "healthy)",
        ),
        (
            {"throttled": {"HwSlowdown": 0.5}, "temperature_c": 91.4},
            "GPU 0 was throttled: HwSlowdown in 50% of samples (at most 5% is healthy; up to 91 °C)",
        ),
        (
            {"throttled": {"HwSlowdown": 0.5}, "sm_clock_mhz": 1200.0},
            "GPU 0 was throttled: HwSlowdown in 50% of samples (at most 5% is healthy; median clock 1200 "
            "MHz)",
        ),
        (
            {"foreign_memory_bytes": 256 * 2**20 + 2**20},
            "GPU 0 was shared: other processes held 257.0 MiB (at most 256.0 MiB)",
        ),
        (
            {"held_before_bytes": 3 * GIB // 2, "held_before_by": (17, 4)},
            "GPU 0: 1.50 GiB held before the launch by pid 17, 4 (at most 1.00 GiB is healthy; waited 30 s)",
        ),
        (
            {"held_before_bytes": GIB + 1},
            "GPU 0: 1.00 GiB held before the launch by no process that NVML lists (at most 1.00 GiB is "
            "healthy; "
            "waited 30 s)",
        ),
    ],
)
def test_what_is_wrong_with_a_gpu_is_told_with_its_values(device: dict[str, Any], reason: str) -> None:
    assert machine_problems(make_health(device), make_gpu_machine()) == [reason]


def test_a_gpu_that_held_as_much_as_is_healthy_is_healthy() -> None:
    assert machine_problems(make_health({"held_before_bytes": GIB}), make_gpu_machine()) == []


def test_every_gpu_is_looked_at() -> None:
    well, ill = DeviceHealth(index=0), DeviceHealth(index=1, foreign_memory_bytes=GIB)
    for devices in ((well, ill), (ill, well)):
        told = make_health(devices=devices)
        assert len(machine_problems(told, make_gpu_machine())) == 1
        assert is_shared(told, make_gpu_machine())


@pytest.mark.parametrize(
    ("shares", "problems"),
    [
        ({"foreign_cpu": 0.21, "steal": 0.1}, 1),
        ({"foreign_cpu": 0.2, "steal": 0.11}, 1),
        ({"foreign_cpu": None, "steal": None}, 0),
        ({"foreign_cpu": 1.0, "steal": 1.0}, 2),
    ],
)
def test_each_share_of_the_cores_has_its_own_bound(shares: dict[str, Any], problems: int) -> None:
    told = make_health(**shares)
    assert len(machine_problems(told, make_machine())) == problems
    assert is_shared(told, make_machine()) == (problems > 0)


def test_how_gpus_are_set_up_is_told_once_where_they_are_alike() -> None:
    assert gpu_setup(None) == gpu_setup(make_health()) == gpu_setup(make_health({})) == {}
    first = DeviceHealth(index=0, power_limit_w=700, sm_clock_limit_mhz=1980, ecc=True, persistence=False)
    second = first.replace(index=1, power_limit_w=650.5, sm_clock_set_mhz=1590, ecc=False)
    assert gpu_setup(make_health(devices=(first, first))) == {
        "gpu_power_limit_w": "700",
        "gpu_sm_clock_limit_mhz": "1980",
        "gpu_ecc": "on",
        "gpu_persistence": "off",
    }
    assert gpu_setup(make_health(devices=(first, second))) == {
        "gpu_power_limit_w": "650.5, 700",
        "gpu_sm_clock_limit_mhz": "1980",
        "gpu_sm_clock_set_mhz": "1590",
        "gpu_ecc": "off, on",
        "gpu_persistence": "off",
    }


def test_only_the_first_line_about_broken_hardware_is_told() -> None:
    assert hardware_fault("") is None
    assert hardware_fault("one\n  Xid error 79  \nGPU is lost\n") == "Xid error 79"
