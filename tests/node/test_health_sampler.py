import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from perfsuite.analysis.health import FREE_S, machine_problems
from perfsuite.node import health_sampler
from perfsuite.node.cpu import Cpu
from perfsuite.node.health_sampler import EVERY_S, HealthWatch, Sampler
from perfsuite.node.nvml import Gpu
from perfsuite.node.processes import JobProcesses
from perfsuite.results.run import DeviceHealth, Health
from tests.node.fake_nvml import CARD, GIB, Clock, NotSupported, Nvml, NVMLError, sampled, using, watched
from tests.node.test_cpu import stat
from tests.processes import wait_until
from tests.samples import make_gpu_machine

SPIN = "import time\nuntil = time.monotonic() + 20\nwhile time.monotonic() < until: pass"


def seen(health: Health | None) -> Health:
    assert health is not None
    return health


def test_reports_means_and_extremes_of_a_gpu() -> None:
    health = watched(Nvml({}))
    assert (health.samples, health.seconds, health.steps, health.notes) == (20, 4.75, 19, ())
    assert health.devices == (
        DeviceHealth(
            index=0,
            sm_clock_mhz=1755,
            sm_clock_mhz_min=1740,
            utilisation=98.8,  # the mean of five readings, one per second: 98, 100, 98, ...
            power_w=687.823,
            energy_j=3277.5,
            temperature_c=64,
            throttled={"SwPowerCap": 1},
            foreign_memory_bytes=0,
            job_memory_bytes=63 * GIB,
            **CARD,
        ),
    )
    assert (health.cores, health.cores_of_machine) == (len(os.sched_getaffinity(0)), os.cpu_count())
    assert machine_problems(health, make_gpu_machine(count=1)) == []


def test_reads_slow_gpu_values_once_a_second() -> None:
    nvml = Nvml({})
    assert watched(nvml).samples == 20
    asked = Counter(function.removeprefix("nvmlDeviceGet") for function, _ in nvml.calls)
    quick = ("ClockInfo", "CurrentClocksEventReasons", "PowerUsage")
    assert {function: asked[function] for function in quick} == dict.fromkeys(quick, 20)
    assert asked["UtilizationRates"] == asked["Temperature"] == 5
    # The additional call is before the launch.
    assert asked["MemoryInfo"] == asked["ComputeRunningProcesses"] == 5 + 1


def test_reads_all_values_at_both_ends_of_a_training() -> None:
    nvml = Nvml({"nvmlDeviceGetTemperature": (50, 60, 90)})
    health = seen(sampled([0, 1, 25], every_s=0.1, is_last=25, devices=1, nvml=nvml))
    assert (health.samples, health.devices[0].temperature_c) == (2, 90)


def test_reads_energy_only_at_the_ends_of_steps() -> None:
    """Each call takes a lock of the driver, and only the first and the last value are needed."""
    nvml = Nvml({})
    steps = [1] * 40 + [2] * 40 + [3] * 40
    health = seen(sampled(steps, every_s=0.05, devices=1, nvml=nvml))
    asked = Counter(function.removeprefix("nvmlDeviceGet") for function, _ in nvml.calls)
    assert health.steps == 2
    assert asked["TotalEnergyConsumption"] == 3
    assert asked["PowerUsage"] > 15
    assert health.devices[0].energy_j == pytest.approx(2 * 172.5)


def test_watches_the_processor_without_nvml() -> None:
    health = watched(Nvml(init=NVMLError("Driver Not Loaded")), proc=Path("/proc"))
    assert health.devices == ()
    assert health.notes == ("the GPUs' health is unknown: Driver Not Loaded",)
    assert health.foreign_cpu is None or health.foreign_cpu >= 0


def test_counts_only_time_with_steps() -> None:
    nvml = Nvml({})
    # The steps are 0 during the launch, and 20 during the hang.
    steps = [0] * 200 + [1] * 40 + [9] * 20 + [20] * 200
    health = seen(sampled(steps, every_s=0.05, devices=1, nvml=nvml))
    assert health.steps == 19
    assert health.seconds == pytest.approx(3, abs=0.06)  # step 1 is seen at 10 s, 9 at 12 s, 20 at 13 s
    assert 12 <= health.samples <= 16
    assert nvml.calls.count(("nvmlDeviceGetClockInfo", 0)) <= 13.5 / EVERY_S + 3


@pytest.mark.parametrize("every_s", [0.06, 0.01])
@pytest.mark.parametrize(
    ("steps", "between"),
    [
        *(([None, 0, 25], 25), ([None, 25], 25), ([0, 1], 1), ([10, 25], 15)),
        *((steps, None) for steps in ([], [None] * 9, [0] * 9, [3] * 9)),
    ],
)
def test_samples_both_ends_of_a_short_training(
    steps: list[int | None], between: int | None, every_s: float
) -> None:
    """If training has begun before the first look, it is assumed to have begun with the launch."""
    health = sampled(steps, every_s=every_s, is_last=None if between is None else steps[-1])
    assert (health and (health.samples, health.steps)) == (between and (2, between))


def test_reads_no_gpu_before_the_job_uses_it() -> None:
    nvml = Nvml({})
    clock = Clock()
    sampler = Sampler(devices=1, nvml=nvml, clock=clock)
    sampler.sample(None)
    assert nvml.calls == []
    sampler.sample(0)
    clock.now += 0.1
    sampler.sample(25, is_last=True)
    health = seen(sampler.finish())
    assert (health.samples, health.steps, health.notes) == (2, 25, ())
    assert health.devices[0].power_w == pytest.approx(692.192, abs=0.001)


def test_a_machine_gets_its_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml({}, {}, {})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert health_sampler.sampler("cpu", 2).finish() is None
    assert nvml.initialised == 0
    on_gpu = health_sampler.sampler("cuda", 2)
    on_gpu.prepare()
    on_gpu.sample(1)
    health = seen(on_gpu.finish())
    assert {handle for name, handle in nvml.calls if name == "nvmlDeviceGetPowerUsage"} == {0, 1}
    assert (health.samples, health.seconds, health.steps, len(health.devices)) == (0, 0, 0, 2)


class Waits(Nvml):
    """An NVML that does not answer one function until the test allows it."""

    def __init__(self, function: str) -> None:
        super().__init__({})
        self.function = function
        self.asked = threading.Event()
        self.may_answer = threading.Event()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name == self.function:
            self.asked.set()
            self.may_answer.wait()
        return super().__getattribute__(name)


def test_sampler_hears_of_all_steps() -> None:
    sampled_steps: list[int | None] = []

    class Listener(Sampler):
        def sample(self, step: int | None, *, is_last: bool = False) -> None:
            sampled_steps.append(step)

    steps = iter([None, 3, None])
    watch = HealthWatch(Listener(), lambda: next(steps, 4))
    watch.begin()
    wait_until(lambda: len(sampled_steps) > 4, "the steps")
    watch.finish()
    assert sampled_steps[:5] == [None, None, 3, None, 4]


@pytest.mark.parametrize(
    ("function", "cards"), [("nvmlInit", []), ("nvmlDeviceGetPowerUsage", ["00000000:1B:00.0"])]
)
def test_never_waits_for_an_unresponsive_nvml(
    monkeypatch: pytest.MonkeyPatch, function: str, cards: list[str]
) -> None:
    nvml = Waits(function)
    waited: list[float] = []
    watch = HealthWatch(Sampler(devices=1, nvml=nvml), lambda: 1)
    monkeypatch.setattr(watch._is_prepared, "wait", waited.append)
    monkeypatch.setattr(watch._thread, "join", waited.append)
    assert watch._thread.daemon, "the thread does not keep the agent alive either"
    watch.begin()
    nvml.asked.wait()
    health = seen(watch.finish())
    nvml.may_answer.set()
    assert waited == [35, 5], "30 s until the memory is free and 5 s for the answer, then 5 s at the end"
    assert health.samples == 0
    assert [device.pci_bus_id for device in health.devices] == cards
    assert health.notes == ("NVML does not answer (is a GPU lost?). Look at `nvidia-smi` and dmesg",)


def test_reads_nvlink_errors_in_its_thread() -> None:
    """NVML might not answer, so the agent itself must not call it."""
    threads: list[str] = []
    errors = iter([7, 12])

    class Linked(Nvml):
        def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
            threads.append(threading.current_thread().name)
            value = SimpleNamespace(ullVal=next(errors))
            return [SimpleNamespace(nvmlReturn=0, valueType=3, value=value)]

    watch = HealthWatch(Sampler(devices=1, nvml=Linked({})), lambda: 1)
    watch.begin()
    health = seen(watch.finish())
    assert threads == ["perfsuite-health"] * 2
    assert any(": 5 NVLink errors" in note for note in health.notes)


def test_takes_no_end_sample_without_a_step() -> None:
    assert HealthWatch(Sampler(), lambda: None).finish() is None
    nvml = Nvml({})
    watch = HealthWatch(Sampler(devices=1, nvml=nvml), lambda: None)
    watch.begin()
    watch.finish()
    assert ("nvmlDeviceGetEccMode", 0) in nvml.calls
    assert ("nvmlDeviceGetPowerUsage", 0) not in nvml.calls


def test_a_sampler_that_breaks_ends_no_launch() -> None:
    sampler = Sampler(devices=1, nvml=Nvml({}))
    sampler._job.cpu_s = lambda: 1 / 0  # type: ignore[method-assign]
    watch = HealthWatch(sampler, lambda: 1)
    watch.begin()
    watch._thread.join()
    note = "the machine's health is unknown: ZeroDivisionError: division by zero"
    assert seen(watch.finish()).notes == (note,)


def used(*gib: float) -> dict[str, Any]:
    """Return a card whose used memory has these values, one for each look."""
    return {"nvmlDeviceGetMemoryInfo": [SimpleNamespace(used=int(amount * GIB)) for amount in gib]}


def prepared(*devices: dict[str, Any]) -> tuple[Health, list[float]]:
    """Return the memory that a sampler found before the launch, and how long it slept each time."""
    clock = Clock()
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    sampler = Sampler(devices=len(devices), nvml=Nvml(*devices), clock=clock, sleep=sleep)
    sampler.prepare()
    return seen(sampler.finish()), slept


BY = "nvmlDeviceGetComputeRunningProcesses"
HELD = "GPU 1 (00000000:1C:00.0): 12.3 GiB held before the launch by {} (at most 1.00 GiB is healthy"


@pytest.mark.parametrize(
    ("devices", "slept_s", "held", "problems"),
    [
        ((used(40, 40, 40, 0.2), used(0.1)), 1.5, [int(0.2 * GIB), int(0.1 * GIB)], []),
        (
            *((used(0.5), used(12.3) | {BY: ([using(77, 9), using(5, 9)],)}), FREE_S),
            *([int(0.5 * GIB), int(12.3 * GIB)], [HELD.format("pid 5, 77")]),
        ),
        (
            *((used(0.5), used(12.3) | {BY: ([],)}), FREE_S, [int(0.5 * GIB), int(12.3 * GIB)]),
            [HELD.format("no process that NVML lists")],
        ),
        (({"nvmlDeviceGetMemoryInfo": NotSupported("Not Supported")},), 0, [None], []),
        ((used(1),), 0, [GIB], []),
    ],
    ids=["until it is free", "never free", "by nobody", "unknown", "healthy"],
)
def test_a_launch_waits_until_the_gpus_are_free(
    devices: Any, slept_s: float, held: list[int | None], problems: list[str]
) -> None:
    cards, slept = prepared(*devices)
    assert sum(slept) == slept_s
    assert set(slept) <= {0.5}
    assert [device.held_before_bytes for device in cards.devices] == held
    said = machine_problems(cards, make_gpu_machine())
    assert said == [f"{problem}; waited 30 s)" for problem in problems]


def test_keeps_the_slowest_gpus_clock_by_step() -> None:
    slow = {"nvmlDeviceGetClockInfo": (1200, 1300, 1100)}
    assert watched(Nvml({}, slow), samples=3).sm_clocks_mhz == ((1, 1200), (2, 1300), (3, 1100))


def test_shares_are_of_the_cores_allowed_to_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    clock = Clock()
    job = Mock(spec=JobProcesses, cpu_s=Mock(side_effect=(5.0, 8.0)))
    sampler = Sampler(job=job, clock=clock, proc=tmp_path)
    none = (0, 0, 0, 0, 0, 0, 0, 0)
    (tmp_path / "stat").write_text(stat(none, none, none))
    sampler.sample(1)
    clock.now += 5
    # Of 2 x 500 ticks, all processes used 450, of which the job used 300. Core 1 does not belong to the job.
    (tmp_path / "stat").write_text(
        stat((200, 10, 40, 100, 50, 0, 0, 100), (500, 0, 0, 0, 0, 0, 0, 0), (150, 0, 50, 250, 0, 10, 20, 20))
    )
    sampler.sample(2)
    health = seen(sampler.finish())
    assert (health.job_cpu, health.foreign_cpu, health.steal) == (0.3, 0.15, 0.12)


def test_samples_every_250_ms_or_when_steps_move() -> None:
    nvml = Nvml({})
    clock = Clock(0)  # the clock begins at zero, but the first sample is due at once
    sampler = Sampler(devices=1, nvml=nvml, clock=clock)
    taken = []
    for after, step in (
        *((0, 0), (0, 1), (0.1875, 1), (0.25, 1), (0.25 + 0.03125, 2), (0.25 + 0.0546875, 2)),
        *((0.25 + 0.0625, 2), (0.5, 2), (0.5625, 2)),
    ):
        clock.now = after
        nvml.calls.clear()
        sampler.sample(step)
        taken += [after] * nvml.calls.count(("nvmlDeviceGetPowerUsage", 0))
    assert taken == [0, 0, 0.25, 0.3125, 0.5625], "the first sample is that of the beginning"


def test_looks_for_processes_every_2_seconds() -> None:
    clock = Clock()
    scans: list[float] = []
    job = Mock(spec=JobProcesses, scan=lambda: scans.append(clock.now), cpu_s=lambda: 0.0)
    sampler = Sampler(job=job, clock=clock)
    start = clock.now
    for step in range(1, 20):
        sampler.sample(step)
        clock.now += 0.5
    assert scans == [start, start + 2, start + 4, start + 6, start + 8]


def a_sample(at: float, **changes: Any) -> health_sampler._Sample:
    cpu = Cpu(processes_s=at / 2, steal_s=0, total_s=at)
    fields = {"at": at, "step": int(at), "gpus": (), "cpu": cpu, "job_s": 0}
    return health_sampler._Sample(**{**fields, **changes})


def spent(*seconds: float) -> dict[str, Cpu]:
    return {"cpu": Cpu(**dict(zip(("processes_s", "steal_s", "total_s"), seconds, strict=True)))}


@pytest.mark.parametrize(
    ("first", "last", "shares"),
    [
        ({}, {}, (0, 0.5, 0)),
        ({"job_s": 2}, {"job_s": 4}, (0.25, 0.25, 0)),
        ({"job_s": 4}, {"job_s": 2}, (0, 0.5, 0)),
        ({}, {"job_s": 20}, (1, 0, 0)),
        ({"cpu": None}, {}, ()),
        ({}, {"cpu": None}, ()),
        ({}, spent(9, 9, 2), ()),
        ({}, spent(2, 1, 4), (0, 0.5, 0.5)),
        (spent(1, 0.5, 2), spent(2, 1, 4), (0, 0.5, 0.25)),
        ({}, spent(3, 1, 5), (0, 0.6667, 0.3333)),
    ],
)
def test_cpu_shares_span_first_to_last_sample(
    first: dict[str, Any], last: dict[str, Any], shares: tuple[float, ...]
) -> None:
    """The CPU time of ended processes is lost.

    The kernel counts in ticks of 10 ms, so the parts can add up to slightly more than the total.
    """
    measured = health_sampler._cpu_shares(a_sample(2, **first), a_sample(10, **last))
    assert measured == dict(zip(("job_cpu", "foreign_cpu", "steal"), shares, strict=False))


def test_reports_seconds_to_the_millisecond() -> None:
    samples = [a_sample(1), a_sample(2), a_sample(3.12345)]
    health = health_sampler._health(samples, (), ("noted",), 0)
    assert (health.samples, health.seconds, health.steps, health.notes) == (3, 2.123, 2, ("noted",))
    assert (health.devices, health.sm_clocks_mhz) == ((), ())


REASONS = [Gpu(reasons=frozenset(letters)) for letters in ("AB", "B", "")]


def using_memory(*sizes: int | None) -> tuple[Gpu, ...]:
    return tuple(Gpu(used_bytes=size) for size in sizes)


def spending(*counts: float | None) -> tuple[Gpu, ...]:
    return tuple(Gpu(energy_j=count) for count in counts)


@pytest.mark.parametrize(
    ("readings", "held", "expected"),
    [
        ((Gpu(), Gpu()), None, {}),
        ((*REASONS, Gpu()), None, {"throttled": {"A": 0.3333, "B": 0.6667}}),
        (using_memory(5, 9, 7), 4, {"job_memory_bytes": 5}),  # only the memory that was added
        (using_memory(3), 4, {"job_memory_bytes": 0}),
        *((using_memory(size), held, {}) for size, held in ((9, None), (None, 4))),
        (spending(100.0, 350.5679), None, {"energy_j": 250.568}),
        # A counter that does not grow was reset, or is unknown.
        *(
            (spending(*counts), None, {})
            for counts in ((100.0, 100.0), (300.0, 100.0), (None, 100.0), (100.0, None), (None, None))
        ),
    ],
)
def test_gpu_figures_use_the_available_readings(
    readings: tuple[Gpu, ...], held: int | None, expected: dict[str, Any]
) -> None:
    device = health_sampler._device(DeviceHealth(index=0, held_before_bytes=held), readings)
    assert device == DeviceHealth(index=0, held_before_bytes=held, **expected)


@pytest.mark.launch
def test_a_busy_process_beside_the_job_is_foreign() -> None:
    """The job is a process whose child spins."""
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}])"
    job = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        sampler = Sampler(job=JobProcesses(job.pid))
        children = psutil.Process(job.pid).children

        def spun_s() -> float:
            return sum(sum(child.cpu_times()[:2]) for child in children())

        wait_until(lambda: spun_s() > 0.1, "it to spin")
        began = time.monotonic()
        before_s = spun_s()
        for look in range(25):
            sampler.sample(1 + look // 8)
            time.sleep(0.05)
        passed = time.monotonic() - began
        job_s = spun_s() - before_s
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        stranger.kill()
        job.wait()
        stranger.wait()
    health = seen(sampler.finish())
    assert health.job_cpu is not None
    assert health.foreign_cpu is not None
    cores = len(os.sched_getaffinity(0))
    assert 3 <= health.samples <= 4 + passed / EVERY_S, (
        "one sample at each of four new steps, and the others at regular times"
    )
    assert 0 < health.job_cpu == pytest.approx(job_s / passed / cores, abs=0.1 / cores)
    assert 0.4 / cores < health.foreign_cpu <= 1 - health.job_cpu + 0.05
