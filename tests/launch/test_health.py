from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from perfsuite.launch import health
from perfsuite.launch.health import EVERY_S, Sampler
from perfsuite.launch.local import launch
from perfsuite.results.health import FREE_S, machine_problems
from perfsuite.results.run import DeviceHealth, Health
from perfsuite.results.run_dir import RunDir
from tests.launch.fake_nvml import CARD, GIB, OTHER, OWN, Clock, NotSupported, Nvml, NVMLError, using, watched
from tests.launch.test_cpu import stat
from tests.samples import make_case, make_gpu_machine, make_machine

SPIN = "import time\nuntil = time.monotonic() + 20\nwhile time.monotonic() < until: pass"


def test_a_healthy_gpu() -> None:
    found = watched(Nvml({}))
    assert (found.samples, found.seconds, found.steps, found.notes) == (20, 4.75, 19, ())
    assert found.devices == (
        DeviceHealth(
            index=0,
            sm_clock_mhz=1755,
            sm_clock_mhz_min=1740,
            utilisation=99,
            power_w=687.823,
            energy_j=3277.5,
            temperature_c=64,
            throttled={"SwPowerCap": 1},
            foreign_memory_bytes=0,
            job_memory_bytes=63 * GIB,
            **CARD,
        ),
    )
    assert machine_problems(found, make_gpu_machine(count=1)) == []


def test_a_hot_gpu_among_healthy_ones_is_named() -> None:
    hot = {
        "nvmlDeviceGetClockInfo": (1755, 1755, 645),
        "nvmlDeviceGetTemperature": (85, 88, 91),
        "nvmlDeviceGetCurrentClocksEventReasons": (0x4, 0x4, 0x4 | 0x8 | 0x40, 0x4),
    }
    found = watched(Nvml({}, hot))
    assert found.devices[0].throttled == {"SwPowerCap": 1}
    assert found.devices[1].throttled == {"HwSlowdown": 0.25, "HwThermalSlowdown": 0.25, "SwPowerCap": 1}
    assert found.devices[1].sm_clock_mhz_min == 645
    assert machine_problems(found, make_gpu_machine(count=2)) == [
        "GPU 1 (00000000:1C:00.0) was throttled: HwSlowdown in 25%, HwThermalSlowdown in 25% of samples "
        "(at most 5% is healthy; up to 91 °C; median clock 1755 MHz)"
    ]


def test_without_an_energy_counter_energy_is_mean_power_times_time() -> None:
    silent = {"nvmlDeviceGetTotalEnergyConsumption": NotSupported("Not Supported")}
    assert watched(Nvml(silent)).devices[0].energy_j == pytest.approx(687.823 * 4.75, abs=0.01)
    silent["nvmlDeviceGetPowerUsage"] = NotSupported("Not Supported")
    assert watched(Nvml(silent)).devices[0].energy_j is None


def test_without_nvml_the_processor_is_still_watched() -> None:
    found = watched(Nvml(init=NVMLError("Driver Not Loaded")))
    assert found.devices == ()
    assert found.notes == ("the GPUs' health is unknown: Driver Not Loaded",)
    assert found.foreign_cpu is None or found.foreign_cpu >= 0


def test_only_time_in_which_steps_were_made_counts() -> None:
    nvml, clock = Nvml({}), Clock()
    sampler = Sampler(devices=1, nvml=nvml, clock=clock)
    sampler.begin(OWN)
    for step in [0] * 200 + [1] * 40 + [9] * 20 + [20] * 200:  # the launch, ..., the hang
        sampler.sample(step)
        clock.now += 0.05
    found = sampler.finish()
    assert found is not None
    assert found.steps == 19
    assert found.seconds == pytest.approx(3, abs=0.06)  # 1 is seen after 10 s, 9 after 12 s, 20 after 13 s
    assert 12 <= found.samples <= 16
    assert len([call for call in nvml.calls if call[0] == "nvmlDeviceGetClockInfo"]) <= 13.5 / EVERY_S + 3


@pytest.mark.parametrize("steps", [[], [0] * 9, [3] * 9, [0, 1, 1]])
def test_too_little_was_seen(steps: list[int]) -> None:
    clock = Clock()
    sampler = Sampler(clock=clock)
    sampler.begin(OWN)
    for step in steps:
        sampler.sample(step)
        clock.now += 1
    assert sampler.finish() is None


def test_a_launch_begins_and_asks(tmp_path: Path) -> None:
    """A stand-in launcher tells a step and stays for a moment."""
    launcher = tmp_path / "python"
    launcher.write_text(f"#!/bin/sh\necho 3 256 > {RunDir(tmp_path).progress}\nsleep 0.3\n")
    launcher.chmod(0o755)
    told: list[int] = []

    class Listener(Sampler):
        def prepare(self) -> None:
            told.append(-2)

        def begin(self, launcher_pid: int) -> None:
            assert psutil.Process(launcher_pid).ppid() == os.getpid()
            told.append(-1)

        def sample(self, step: int) -> None:
            told.append(step)

    assert (
        launch(RunDir(tmp_path), make_case(), device="cpu", python=str(launcher), sampler=Listener()) is None
    )
    assert told[:2] == [-2, -1]
    assert 3 in told[2:]


def test_a_machine_gets_its_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml({}, {}, {})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert health.sampler(make_machine(), 2).finish() is None
    assert nvml.initialised == 0
    on_gpu = health.sampler(make_gpu_machine(count=3), 2)
    assert isinstance(on_gpu, health.BackgroundSampler), "the loop that calls it enforces deadlines"
    on_gpu.prepare()
    on_gpu.begin(OWN)
    on_gpu.sample(1)
    found = on_gpu.finish()
    assert {handle for name, handle in nvml.calls if name == "nvmlDeviceGetPowerUsage"} == {0, 1}
    assert nvml.initialised == 0
    assert found == Health(
        samples=0,
        seconds=0,
        steps=0,
        devices=tuple(
            DeviceHealth(index=index, **{**CARD, "pci_bus_id": f"00000000:{0x1B + index:02X}:00.0"})
            for index in (0, 1)
        ),
    )


def test_nobody_waits_for_an_nvml_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SILENT_S", 0.05)
    answered, asked = threading.Event(), threading.Event()

    class Silent(Nvml):
        def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
            return SimpleNamespace(busId="00000000:1B:00.0")

        def __getattr__(self, function: str) -> Any:
            if function == "nvmlDeviceGetPowerUsage":
                asked.set()
                answered.wait()
            return super().__getattr__(function)

    sampler = health.BackgroundSampler(devices=1, nvml=Silent({}))
    sampler.prepare()
    sampler.begin(OWN)
    sampler.sample(1)
    asked.wait()
    for step in range(2, 100):
        sampler.sample(step)  # as from the loop that enforces the deadline
    found = sampler.finish()
    answered.set()
    assert found is not None
    assert found.samples == 0
    assert [device.uuid for device in found.devices] == ["GPU-8932f937"]
    assert found.notes == ("NVML does not answer (a GPU that is lost?): look at `nvidia-smi` and dmesg",)


def test_a_job_is_launched_though_nvml_is_silent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SILENT_S", 0.05)
    monkeypatch.setattr(health, "FREE_S", 0)
    answered = threading.Event()

    class Silent(Nvml):
        def nvmlInit(self) -> None:
            answered.wait()

    sampler = health.BackgroundSampler(devices=1, nvml=Silent({}))
    sampler.prepare()
    sampler.begin(OWN)
    sampler.sample(1)
    found = sampler.finish()
    answered.set()
    assert found is not None
    assert (found.samples, len(found.notes)) == (0, 1)


def test_an_answer_that_takes_long_is_noted() -> None:
    clock = Clock()

    class Slow(Nvml):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def __getattr__(self, function: str) -> Any:
            if function == "nvmlDeviceGetPowerUsage" and len(self.calls) < 40:
                clock.now += 7
            return super().__getattr__(function)

    sampler = Sampler(devices=1, nvml=Slow({}), clock=clock)
    sampler.begin(OWN)
    for step in (1, 2, 3):
        sampler.sample(step)
        clock.now += EVERY_S
    found = sampler.finish()
    assert found is not None
    assert found.notes == ("NVML took 7 s to answer: look at dmesg",)


def test_a_sampler_that_breaks_ends_no_launch() -> None:
    sampler = health.BackgroundSampler(devices=1, nvml=Nvml({}))
    sampler._job.cpu_s = lambda: 1 / 0  # type: ignore[method-assign]
    sampler.prepare()
    sampler.begin(OWN)
    sampler.sample(1)
    sampler._thread.join()
    found = sampler.finish()
    assert found is not None
    assert found.notes == ("the machine's health is unknown: ZeroDivisionError: division by zero",)


def used(*gib: float) -> dict[str, Any]:
    """A card of whose memory so much is used, look after look."""
    return {"nvmlDeviceGetMemoryInfo": [SimpleNamespace(used=int(each * GIB)) for each in gib]}


def prepared(nvml: Nvml) -> tuple[Health, list[float]]:
    """What a sampler knows before the launch, and how long it slept each time."""
    clock, slept = Clock(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    sampler = Sampler(devices=len(nvml.devices), nvml=nvml, clock=clock, sleep=sleep)
    sampler.prepare()
    found = sampler.finish()
    assert found is not None
    return found, slept


def test_a_launch_waits_until_the_gpus_are_free() -> None:
    found, slept = prepared(Nvml(used(40, 40, 40, 0.2), used(0.1)))
    assert len(slept) == 3
    assert [device.held_before_bytes for device in found.devices] == [int(0.2 * GIB), int(0.1 * GIB)]
    assert machine_problems(found, make_gpu_machine()) == []


@pytest.mark.parametrize(
    ("processes", "whose"),
    [([using(77, 9), using(5, 9)], "pid 5, 77"), ([], "no process that NVML lists")],
)
def test_a_gpu_that_is_never_free_is_unhealthy(processes: list[Any], whose: str) -> None:
    found, slept = prepared(
        Nvml(used(0.5), used(12.3) | {"nvmlDeviceGetComputeRunningProcesses": (processes,)})
    )
    assert sum(slept) == FREE_S
    assert machine_problems(found, make_gpu_machine()) == [
        f"GPU 1 (00000000:1C:00.0): 12.3 GiB held before the launch by {whose} "
        "(at most 1 GiB is healthy; waited 30 s)"
    ]


def test_a_gpu_that_does_not_tell_its_memory_is_not_waited_for() -> None:
    found, slept = prepared(Nvml({"nvmlDeviceGetMemoryInfo": NotSupported("Not Supported")}))
    assert slept == []
    assert found.devices[0].held_before_bytes is None


def test_the_clock_of_the_slowest_gpu_is_kept_by_step() -> None:
    slow = {"nvmlDeviceGetClockInfo": (1200, 1300, 1100)}
    assert watched(Nvml({}, slow), samples=3).sm_clocks_mhz == ((1, 1200), (2, 1300), (3, 1100))


def test_shares_of_the_cores_that_the_job_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "allowed_cores", lambda: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text(
        "some avg10=12.50 avg60=6.84 avg300=6.67 total=24\nfull avg10=0\n"
    )
    clock = Clock()
    sampler = Sampler(clock=clock, proc=tmp_path)
    job_s = iter((5.0, 8.0))
    monkeypatch.setattr(sampler._job, "cpu_s", lambda: next(job_s))
    none = (0, 0, 0, 0, 0, 0, 0, 0)
    (tmp_path / "stat").write_text(stat(none, none, none))
    sampler.sample(1)
    clock.now += 5
    # Of 2 x 500 ticks 450 are in processes, 300 of these in the job's; core 1 is not ours.
    (tmp_path / "stat").write_text(
        stat((200, 10, 40, 100, 50, 0, 0, 100), (500, 0, 0, 0, 0, 0, 0, 0), (150, 0, 50, 250, 0, 10, 20, 20))
    )
    sampler.sample(2)
    found = sampler.finish()
    assert found is not None
    assert (found.job_cpu, found.foreign_cpu, found.steal) == (0.3, 0.15, 0.12)
    assert found.cpu_pressure == 12.5
    assert found.load_average is not None


@pytest.mark.parametrize("content", [None, "cpu0 1 2", "cpu0 a b c d e f g h"])
def test_a_proc_that_does_not_tell_leaves_shares_unknown(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)
    clock = Clock()
    sampler = Sampler(clock=clock, proc=tmp_path)
    for step in (1, 2):
        sampler.sample(step)
        clock.now += 1
    found = sampler.finish()
    assert found is not None
    assert (found.job_cpu, found.foreign_cpu, found.steal, found.cpu_pressure) == (None,) * 4
    assert machine_problems(found, make_machine()) == []


@pytest.fixture
def launcher_and_stranger() -> Iterator[int]:
    """A process whose child spins, and beside it a process that spins."""
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}])"
    launcher = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", SPIN])
    yield launcher.pid
    os.killpg(launcher.pid, 9)
    stranger.kill()
    launcher.wait()
    stranger.wait()


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")
@pytest.mark.launch
def test_a_busy_process_beside_the_job_is_foreign(launcher_and_stranger: int) -> None:
    cores = len(os.sched_getaffinity(0))
    sampler = Sampler()
    sampler.begin(launcher_and_stranger)
    time.sleep(0.3)  # until both spin
    began = time.monotonic()
    while (passed := time.monotonic() - began) < 1.2:
        sampler.sample(1 + int(passed / 0.4))
        time.sleep(0.05)
    found = sampler.finish()
    assert found is not None
    assert 3 <= found.samples <= 10
    assert found.foreign_cpu is not None
    assert found.job_cpu is not None
    assert 0.4 / cores < found.foreign_cpu <= 1 - found.job_cpu + 0.05
    assert 0.1 / cores < found.job_cpu < 1.2 / cores
    said = machine_problems(found, make_machine())
    assert any("other processes used" in reason for reason in said) == (found.foreign_cpu > 0.2)


def test_a_job_that_is_gone_is_no_error() -> None:
    sampler = Sampler()
    sampler.begin(OTHER)
    sampler.sample(1)
    assert sampler.finish() is None
