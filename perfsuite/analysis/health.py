"""Decide from readings whether the machine, rather than the code, was slow. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from perfsuite.case.hardware import Machine
from perfsuite.results.amounts import amount
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import DeviceHealth, Health, LaunchFile, Node, Run

THROTTLED_SHARE = 0.05  # maximum share of samples in which a healthy GPU may be throttled
# Maximum GPU memory that other processes may use. Monitoring tools use less, and training jobs use more.
FOREIGN_MEMORY_BYTES = 256 * 2**20
# Maximum share of the cores' time that other processes may use. On 2 cores, this is 0.4 of one core.
FOREIGN_CPU_SHARE = 0.20
# Maximum GPU memory in use before a launch. Desktops use less, and stuck jobs use more.
HELD_BYTES = 2**30
# Maximum seconds to wait until the GPUs' memory is free: GPU drivers free it only after a process has ended.
FREE_S = 30.0
STEAL_SHARE = 0.10  # maximum share of the cores' time that the hypervisor may take
SETTINGS = ("power_limit_w", "sm_clock_limit_mhz", "sm_clock_set_mhz", "ecc", "persistence", "nvlinks")
"""The fields of `DeviceHealth` that describe the setup of a GPU."""
POWER_LIMIT = "gpu_power_limit_w"  # key in a run's environment. Its value lists all distinct limits
BAD_REASONS = ("HwSlowdown", "HwThermalSlowdown", "SwThermalSlowdown", "HwPowerBrakeSlowdown")
"""Reasons for throttling that mean that a machine is too hot or lacks power. Other reasons, above all
SwPowerCap, are normal."""
NOTED_LAG = 0.10
"""There is a note if the slowest GPU lags behind the fastest by more than this share in equal work."""
UNEQUAL_LAG = 0.25
"""A launch is set aside if the slowest GPU lags behind by more than this share, unless a baseline shows how
unequal the GPUs are. The speed of healthy GPUs of the same model differs by up to 22% (arXiv 2208.11035)."""
NOT_SAMPLED = "the machine's health is unknown: no sample was taken during the steps"
# pragma: no mutate seconds=0, steps=0: without samples, these values are never read
UNKNOWN = Health(samples=0, seconds=0, steps=0)  # the health of a machine that was not sampled
BUSY = "busy or unavailable"  # CUDA's error 46: the GPU is in exclusive mode, or waits for its reset
# Parts of messages of CUDA, NCCL and NVML. A bug in a kernel can also cause an "unspecified launch failure".
HARDWARE_FAULTS = (
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "nvlink error",
    "gpu is lost",
    "fallen off the bus",
    "unspecified launch failure",
    "system not yet initialized",  # error 802: the Fabric Manager of an NVSwitch system is not running
    "nvrm: xid",
    "xid error",
    BUSY,
)


def gpu_setup(health: Health | None) -> dict[str, str]:
    """Return the settings of the GPUs by name. If GPUs differ, all distinct values are listed."""
    cards = health.devices if health is not None else ()
    values = {name: {getattr(card, name) for card in cards} - {None} for name in SETTINGS}
    return {
        f"gpu_{name}": ", ".join(map(_setting, sorted(distinct)))
        for name, distinct in values.items()
        if distinct
    }


def _setting(value: float | bool) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else f"{value:g}"


def hardware_fault(text: str) -> str | None:
    """Return the first line of a failed job's messages that names a hardware fault, or None."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if any(fault in line.lower() for fault in HARDWARE_FAULTS)), None)


def advice_on(fault: str) -> str:
    """Return where to look for the cause of a fault. `fault` is a line from `hardware_fault`."""
    if BUSY in fault.lower():
        return (
            "another process holds this GPU in exclusive mode (nvidia-smi -q -d COMPUTE; nvidia-smi -c 0 "
            "turns the mode off), or the GPU needs a reset (nvidia-smi -r, dmesg)"
        )
    return "look at `nvidia-smi -q`, dmesg (Xid) and `systemctl status nvidia-fabricmanager`"


def machine_problems(health: Health | None, machine: Machine) -> list[str]:
    """List the problems of the machine that cause a launch to be set aside, with the readings."""
    if health is None:
        return []
    problems = [reason for device in health.devices for reason in _unhealthy_gpu(device)]
    problems += _lost_nvlinks(health.devices)
    whose = "the cores' time" + (f" of {health.node}" if health.node else "")
    if machine.device == "cuda":
        return [*problems, *_few_cores(health, whose)]
    return problems + [
        f"{who} {share:.0%} of {whose} (at most {most:.0%} is healthy)"
        for who, share, most in (
            ("other processes used", health.foreign_cpu, FOREIGN_CPU_SHARE),
            ("the hypervisor took", health.steal, STEAL_SHARE),
        )
        if share is not None and share > most
    ]


def slowest_gpu(run: Run, name: str) -> str:
    """Describe the slowest and the fastest GPU according to one rate of the device probe."""
    rates = {rank: probe[name] for rank, probe in enumerate(run.rank_probes) if name in probe}
    slowest, fastest = (choose(rates, key=rates.__getitem__) for choose in (min, max))
    return (
        f"before the workload, {name} was {rates[slowest]:.4g} on {gpu_of(run, slowest)}, "
        f"{1 - rates[slowest] / rates[fastest]:.0%} less than the {rates[fastest]:.4g} on "
        f"{gpu_of(run, fastest)}"
    )


def unequal_gpus(run: Run) -> list[str]:
    """Return a note about each rate in which one GPU lags behind the others."""
    return [
        f"{slowest_gpu(run, name)}. The ranks wait for the slowest GPU in each step"
        for name, share in run.slowest_shares().items()
        if 1 - share > NOTED_LAG
    ]


def is_shared(health: Health | None, machine: Machine) -> bool:
    """Return whether others used the machine more than is healthy.

    Unlike throttling, such use can end soon, and a later launch can then be healthy.
    """
    if health is None:
        return False
    if machine.device == "cpu":
        return _exceeds(health.foreign_cpu, FOREIGN_CPU_SHARE) or _exceeds(health.steal, STEAL_SHARE)
    return any(
        _exceeds(device.foreign_memory_bytes, FOREIGN_MEMORY_BYTES)
        or _exceeds(device.held_before_bytes, HELD_BYTES)
        for device in health.devices
    )


def all_shared(verdict: Verdict, runs: Sequence[Run]) -> bool:
    """Return whether no launch was healthy, and others disturbed at least one launch.

    The launches then prove nothing.
    """
    return not verdict.healthy(runs) and any(is_shared(run.health, run.machine) for run in runs)


def _exceeds(value: float | None, bound: float) -> bool:
    return value is not None and value > bound


def _few_cores(health: Health, whose: str) -> list[str]:
    """Return a problem if other processes leave less than one core per rank. Kernels then start late."""
    ranks = sum(device.node == health.node for device in health.devices)
    if health.foreign_cpu is None or health.cores is None or not ranks or health.cores < ranks:
        return []
    left = (1 - health.foreign_cpu) * health.cores / ranks
    used = f"other processes used {health.foreign_cpu:.0%} of {whose}"
    of_each = (
        f"each of {ranks} ranks a share of {left:.2g} cores, out of {health.cores} cores in total "
        "(a rank needs at least 1 core)"
    )
    return [] if left >= 1 else [f"{used}, which leaves {of_each}"]


def _lost_nvlinks(devices: Sequence[DeviceHealth]) -> list[str]:
    most = dict(sorted((device.node or "", device.nvlinks or 0) for device in devices))
    return [
        f"{device.name}: {device.nvlinks} of its NVLinks are up, "
        f"but another GPU has {most[device.node or '']} that are up"
        for device in devices
        if device.nvlinks is not None and device.nvlinks < most[device.node or ""]
    ]


def _unhealthy_gpu(device: DeviceHealth) -> list[str]:
    problems = [f"{device.name}: {fault}" for fault in device.memory_faults]
    # pragma: no mutate name, 0 to name, -1: both are below every share that is bad
    shares = [(name, (device.throttled or {}).get(name, 0)) for name in BAD_REASONS]
    bad = [f"{name} in {share:.0%}" for name, share in shares if share > THROTTLED_SHARE]
    if bad:
        facts = [f"at most {THROTTLED_SHARE:.0%} is healthy"]
        if device.temperature_c is not None:
            facts.append(f"up to {device.temperature_c:.0f} °C")
        if device.sm_clock_mhz is not None:
            facts.append(f"median clock {device.sm_clock_mhz:.0f} MHz")
        problems.append(f"{device.name} was throttled: {', '.join(bad)} of samples ({'; '.join(facts)})")
    foreign = device.foreign_memory_bytes
    if foreign is not None and foreign > FOREIGN_MEMORY_BYTES:
        held = amount(foreign, "bytes")
        let_pass = amount(FOREIGN_MEMORY_BYTES, "bytes")
        problems.append(
            f"{device.name} was shared: other processes held {held} (at most {let_pass} is healthy)"
        )
    before = device.held_before_bytes
    if before is not None and before > HELD_BYTES:
        pids = ", ".join(map(str, device.held_before_by))
        by = f"before the launch by {f'pid {pids}' if pids else 'no process that NVML lists'}"
        why = (
            f"at most {amount(HELD_BYTES, 'bytes')} is healthy; "
            f"perfsuite waited {FREE_S:.0f} s for the memory to be freed"
        )
        problems.append(f"{device.name}: {amount(before, 'bytes')} held {by} ({why})")
    return problems


def with_nodes(run: Run, agents: Mapping[int, LaunchFile], hosts: Mapping[int, str]) -> Run:
    """Return the run with the health of its machines. `agents` and `hosts` are by node number."""
    count = run.case.topology.nodes
    if count == 1:
        return run.replace(health=agents[0].health if agents else None)
    nodes = tuple(
        Node(name=agents[number].host, health=agents[number].health)
        if number in agents
        else Node(name=hosts.get(number, f"node {number}"))
        for number in range(count)
    )
    return run.replace(nodes=nodes, health=worst_health(nodes))


def worst_health(nodes: Sequence[Node]) -> Health | None:
    """Return the worst value of each reading, and the GPUs of all nodes. None if no health is known."""
    seen = {node.name: node.health for node in nodes if node.health is not None}
    if not seen:
        return None
    healths = list(seen.values())
    clocks = sorted((clock for health in healths for clock in health.sm_clocks_mhz), reverse=True)
    # The entries are in descending order, so `dict` keeps the lowest clock for each number of steps.
    slowest = dict(clocks)
    busiest = max(seen, key=lambda name: (seen[name].foreign_cpu or 0) + (seen[name].steal or 0))
    return Health(
        node=busiest,
        samples=min(health.samples for health in healths) if len(seen) == len(nodes) else 0,
        seconds=min(health.seconds for health in healths),
        steps=min(health.steps for health in healths),
        devices=tuple(card.replace(node=name) for name, health in seen.items() for card in health.devices),
        sm_clocks_mhz=tuple(sorted(slowest.items())),
        cores=seen[busiest].cores,
        cores_of_machine=seen[busiest].cores_of_machine,
        job_cpu=over_known(min, (health.job_cpu for health in healths)),
        foreign_cpu=over_known(max, (health.foreign_cpu for health in healths)),
        steal=over_known(max, (health.steal for health in healths)),
        notes=(
            *(f"{name}: {note}" for name, health in seen.items() for note in health.notes),
            *(f"{node.name}: its health is unknown" for node in nodes if node.health is None),
        ),
    )


def gpu_of(run: Run, rank: int) -> str:
    """Return a rank and its GPU for messages, such as `rank 5, GPU 5 (00000000:9B:00.0) of n2`."""
    number, index = divmod(rank, run.case.topology.processes_per_node)
    node = run.nodes[number].name if number < len(run.nodes) else None
    seen = run.health.devices if run.health is not None else ()
    cards = [card for card in seen if (card.index, card.node) == (index, node)]
    return f"rank {rank}, {(cards or [DeviceHealth(index=index, node=node)])[0].name}"


def over_known(choose: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    """Apply `choose` to the known values; None if there are none."""
    given = [value for value in values if value is not None]
    return choose(given) if given else None
