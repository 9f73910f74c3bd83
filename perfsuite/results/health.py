"""Which readings of a machine say that it, and not the code, is slow. Pure."""

from __future__ import annotations

from perfsuite.case.hardware import Machine
from perfsuite.results.run import DeviceHealth, Health

THROTTLED_SHARE = 0.05
"""Of the samples: a GPU that is slowed down for longer is not healthy."""


FOREIGN_MEMORY_BYTES = 256 * 2**20
"""On a GPU: a monitor holds less, a program that computes holds more."""


FOREIGN_CPU_SHARE = 0.20
"""Of the cores' time: on 2 cores this is less than half of one."""


HELD_BYTES = 2**30
"""Of a GPU's memory before a launch: a desktop or a monitor holds less, a job that did not let go more."""
FREE_S = 30.0
"""At the most, until the memory of the GPUs is free before a launch: a driver tears a dead process down."""
STEAL_SHARE = 0.10
"""Of the cores' time, taken by the hypervisor."""


POWER_LIMIT = "gpu_power_limit_w"
"""In a run's environment: the power limit that the driver enforces; of GPUs that differ, each, ascending."""


BAD_REASONS = ("HwSlowdown", "HwThermalSlowdown", "SwThermalSlowdown", "HwPowerBrakeSlowdown")
"""The machine is too hot or short of power. The others, SwPowerCap above all, are how GPUs normally run."""


HARDWARE_FAULTS = (
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "nvlink error",
    "gpu is lost",
    "fallen off the bus",
    "unspecified launch failure",
    "nvrm: xid",
    "xid error",
)
"""What CUDA, NCCL and NVML say when a card or its link is broken; an unspecified launch failure may also be a
kernel's own bug."""


def gpu_setup(health: Health | None) -> dict[str, str]:
    """How the GPUs are set up, by name; for several that differ, each value once."""
    cards = health.devices if health is not None else ()
    values: dict[str, list[float | bool | None]] = {
        POWER_LIMIT: [card.power_limit_w for card in cards],
        "gpu_sm_clock_limit_mhz": [card.sm_clock_limit_mhz for card in cards],
        "gpu_sm_clock_set_mhz": [card.sm_clock_set_mhz for card in cards],
        "gpu_ecc": [card.ecc for card in cards],
        "gpu_persistence": [card.persistence for card in cards],
    }
    told = {name: sorted({value for value in each if value is not None}) for name, each in values.items()}
    return {name: ", ".join(map(_setup, each)) for name, each in told.items() if each}


def _setup(value: float | bool) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else f"{value:g}"


def hardware_fault(said: str) -> str | None:
    """The first line of what a failed job said that speaks of broken hardware, or None."""
    lines = (line.strip() for line in said.splitlines())
    return next((line for line in lines if any(fault in line.lower() for fault in HARDWARE_FAULTS)), None)


def machine_problems(health: Health | None, machine: Machine) -> list[str]:
    """Why this machine's figures are not the code's, with the values; empty if nothing speaks against it."""
    if health is None:
        return []
    found = [reason for device in health.devices for reason in _unhealthy_gpu(device)]
    if machine.device == "cpu":
        if _exceeds(health.foreign_cpu, FOREIGN_CPU_SHARE):
            found.append(
                f"other processes used {health.foreign_cpu:.0%} of the cores' time "
                f"(at most {FOREIGN_CPU_SHARE:.0%} is healthy)"
            )
        if _exceeds(health.steal, STEAL_SHARE):
            found.append(
                f"the hypervisor took {health.steal:.0%} of the cores' time "
                f"(steal; at most {STEAL_SHARE:.0%} is healthy)"
            )
    return found


def is_shared(health: Health | None, machine: Machine) -> bool:
    """Whether others used the machine beyond what is healthy: that may end soon, unlike throttling."""
    if health is None:
        return False
    if machine.device == "cpu":
        return _exceeds(health.foreign_cpu, FOREIGN_CPU_SHARE) or _exceeds(health.steal, STEAL_SHARE)
    return any(
        _exceeds(device.foreign_memory_bytes, FOREIGN_MEMORY_BYTES)
        or _exceeds(device.held_before_bytes, HELD_BYTES)
        for device in health.devices
    )


def _exceeds(value: float | None, bound: float) -> bool:
    """Whether a reading is beyond a bound; one that the machine does not give never is."""
    return value is not None and value > bound


def _unhealthy_gpu(device: DeviceHealth) -> list[str]:
    found = []
    shares = [(name, (device.throttled or {}).get(name, 0)) for name in BAD_REASONS]
    if bad := [f"{name} in {share:.0%}" for name, share in shares if share > THROTTLED_SHARE]:
        facts = [f"at most {THROTTLED_SHARE:.0%} is healthy"]
        if device.temperature_c is not None:
            facts.append(f"up to {device.temperature_c:.0f} °C")
        if device.sm_clock_mhz is not None:
            facts.append(f"median clock {device.sm_clock_mhz:.0f} MHz")
        found.append(f"{device.name} was throttled: {', '.join(bad)} of samples ({'; '.join(facts)})")
    if (foreign := device.foreign_memory_bytes) is not None and foreign > FOREIGN_MEMORY_BYTES:
        held = f"{foreign / 2**20:,.0f} MiB"
        let_pass = f"{FOREIGN_MEMORY_BYTES / 2**20:.0f} MiB"
        found.append(f"{device.name} was shared: other processes held {held} (at most {let_pass})")
    if (before := device.held_before_bytes) is not None and before > HELD_BYTES:
        pids = ", ".join(map(str, device.held_before_by))
        found.append(
            f"{device.name}: {before / 2**30:.1f} GiB held before the launch by "
            f"{f'pid {pids}' if pids else 'no process that NVML lists'} "
            f"(at most {HELD_BYTES / 2**30:.0f} GiB is healthy; waited {FREE_S:.0f} s)"
        )
    return found
