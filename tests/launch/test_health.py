from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from perfsuite.launch import health, nvml
from perfsuite.launch.health import EVERY_S, Sampler
from perfsuite.launch.local import launch
from perfsuite.results.figures import _energy_per_token_j, _gpu_utilisation
from perfsuite.results.health import BAD_REASONS, FREE_S, hardware_fault, is_shared, machine_problems
from perfsuite.results.run import DeviceHealth, Health
from perfsuite.results.run_dir import RunDir
from tests.samples import make_case, make_gpu_machine, make_machine

GIB = 2**30
OWN, OTHER = os.getpid(), 4_000_000  # the job is this test's process; no Linux has the other one
SLOW_COPIES = "copies from and to the host are slower"
SPIN = "import time\nuntil = time.monotonic() + 20\nwhile time.monotonic() < until: pass"


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class FunctionNotFound(NVMLError):
    pass


def using(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


# What a H100 SXM answers while it trains: at its power limit, which is how it is meant to run.
TRAINING: dict[str, Any] = {
    "nvmlDeviceGetClockInfo": (1755, 1980, 1740, 1770, 1755),
    "nvmlDeviceGetUtilizationRates": tuple(SimpleNamespace(gpu=gpu, memory=45) for gpu in (98, 100)),
    "nvmlDeviceGetPowerUsage": (684_512, 699_871, 691_020, 675_313, 688_400),
    "nvmlDeviceGetTotalEnergyConsumption": range(9_000_000_000, 9_100_000_000, 172_500),
    "nvmlDeviceGetTemperature": (61, 63, 64, 63),
    "nvmlDeviceGetCurrentClocksEventReasons": (0x4,),
    "nvmlDeviceGetComputeRunningProcesses": ([using(OWN, 60 * GIB)],),
    "nvmlDeviceGetMemoryInfo": (SimpleNamespace(used=4 * 2**20), SimpleNamespace(used=63 * GIB + 4 * 2**20)),
    "nvmlDeviceGetUUID": ("GPU-8932f937",),
    "nvmlDeviceGetSerial": ("1654123000001",),
    "nvmlDeviceGetEnforcedPowerLimit": (700_000,),
    "nvmlDeviceGetPowerManagementDefaultLimit": (700_000,),
    "nvmlDeviceGetPowerManagementLimitConstraints": ([200_000, 700_000],),
    "nvmlDeviceGetMaxClockInfo": (1980,),
    "nvmlDeviceGetApplicationsClock": (1980,),
    "nvmlDeviceGetEccMode": ([1, 1],),
    "nvmlDeviceGetPersistenceMode": (1,),
    "nvmlDeviceGetRemappedRows": ((0, 0, 0, 0),),
    "nvmlDeviceGetRetiredPagesPendingStatus": (0,),
    "nvmlDeviceGetCurrPcieLinkWidth": (16,),
    "nvmlDeviceGetMaxPcieLinkWidth": (16,),
    "nvmlDeviceGetCurrPcieLinkGeneration": (5,),
    "nvmlDeviceGetMaxPcieLinkGeneration": (5,),
}
CARD: dict[str, Any] = {
    "pci_bus_id": "00000000:1B:00.0",
    "uuid": "GPU-8932f937",
    "serial": "1654123000001",
    "power_limit_w": 700,
    "power_limit_default_w": 700,
    "power_limit_max_w": 700,
    "sm_clock_limit_mhz": 1980,
    "sm_clock_set_mhz": 1980,
    "ecc": True,
    "persistence": True,
    "held_before_bytes": 4 * 2**20,
    "held_before_by": (OWN,),
}


class Nvml:
    """Stands in for the module pynvml: every device gives its recorded answers, one after the other."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVMLError_FunctionNotFound = FunctionNotFound
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 33554472

    def __init__(self, *devices: dict[str, Any], init: Exception | None = None) -> None:
        self.devices = [{**TRAINING, **changes} for changes in devices]
        self.calls: list[tuple[str, int]] = []
        self.initialised = 0
        self.init_error = init

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        if not self.initialised:
            raise NVMLError("Uninitialized")
        self.initialised -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0x1B + handle:02X}:00.0".encode())

    def __getattr__(self, function: str) -> Any:
        if function not in {*TRAINING, "nvmlDeviceGetCurrentClocksThrottleReasons"}:
            raise AttributeError(function)

        def answer(handle: int, *arguments: int) -> Any:
            asked = self.calls.count((function, handle))
            self.calls.append((function, handle))
            answers = self.devices[handle].get(function, NotSupported("Not Supported"))
            value = answers[asked % len(answers)] if isinstance(answers, Sequence) else answers
            if isinstance(value, Exception):
                raise value
            return value

        return answer


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _all_gpus_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def watched(nvml: Nvml, *, samples: int = 20, devices: int | None = None) -> Health:
    """What a sampler says that was asked every quarter of a second, a step finished in each."""
    clock = Clock()
    sampler = Sampler(devices=devices or len(nvml.devices), nvml=nvml, clock=clock)
    sampler.prepare()
    sampler.begin(OWN)
    for step in range(1, samples + 1):
        sampler.sample(step)
        clock.now += EVERY_S
    found = sampler.finish()
    assert found is not None
    assert nvml.initialised == 0
    assert Health.model_validate_json(found.model_dump_json()) == found
    return found


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


def test_other_processes_on_the_gpu_are_foreign() -> None:
    processes = [using(OWN, 60 * GIB), using(OTHER, 12 * GIB), using(OTHER + 1, 1 * GIB)]
    alone = processes[:1]
    found = watched(Nvml({"nvmlDeviceGetComputeRunningProcesses": (alone, processes, alone)}))
    assert found.devices[0].foreign_memory_bytes == 13 * GIB
    assert machine_problems(found, make_gpu_machine(count=1)) == [
        "GPU 0 (00000000:1B:00.0) was shared: other processes held 13,312 MiB (at most 256 MiB)"
    ]


def test_a_child_that_was_born_since_the_last_look_is_not_foreign() -> None:
    clock = Clock()
    nvml = Nvml({"nvmlDeviceGetComputeRunningProcesses": ([using(OWN, GIB)],)})
    sampler = Sampler(devices=1, nvml=nvml, clock=clock)
    sampler.begin(OWN)
    sampler.sample(1)
    with subprocess.Popen([sys.executable, "-c", SPIN]) as child:
        listed = ([using(OWN, GIB), using(child.pid, GIB)],)
        nvml.devices[0]["nvmlDeviceGetComputeRunningProcesses"] = listed
        clock.now += EVERY_S
        sampler.sample(2)
        child.kill()
    found = sampler.finish()
    assert found is not None
    assert found.devices[0].foreign_memory_bytes == 0


def test_in_a_container_the_own_job_is_not_called_foreign() -> None:
    nvml = Nvml({"nvmlDeviceGetComputeRunningProcesses": ([using(OTHER, 60 * GIB)],)})
    found = watched(nvml)
    assert found.devices[0].foreign_memory_bytes is None
    assert len(found.notes) == 1
    assert "GPU 0: NVML does not list this job's own processes" in found.notes[0]
    assert machine_problems(found, make_gpu_machine(count=1)) == []


def test_a_container_that_lists_nobody_leaves_it_open_too() -> None:
    found = watched(Nvml({}, {"nvmlDeviceGetComputeRunningProcesses": ([],)}))
    assert [device.foreign_memory_bytes for device in found.devices] == [0, None]
    assert "GPU 1: NVML does not list" in found.notes[0]


def test_foreign_memory_that_mig_does_not_tell_counts_as_none() -> None:
    listed = ([using(OWN, None), using(OTHER, None)],)
    found = watched(Nvml({"nvmlDeviceGetComputeRunningProcesses": listed}))
    assert found.devices[0].foreign_memory_bytes == 0


FIELDS = {
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "sm_clock_mhz_min"},
    "nvmlDeviceGetUtilizationRates": {"utilisation"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttled"},
    "nvmlDeviceGetComputeRunningProcesses": {"foreign_memory_bytes"},
    "nvmlDeviceGetMemoryInfo": {"held_before_bytes", "job_memory_bytes"},
    "nvmlDeviceGetUUID": {"uuid"},
    "nvmlDeviceGetSerial": {"serial"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetPowerManagementDefaultLimit": {"power_limit_default_w"},
    "nvmlDeviceGetPowerManagementLimitConstraints": {"power_limit_max_w"},
    "nvmlDeviceGetMaxClockInfo": {"sm_clock_limit_mhz"},
    "nvmlDeviceGetApplicationsClock": {"sm_clock_set_mhz"},
    "nvmlDeviceGetEccMode": {"ecc"},
    "nvmlDeviceGetPersistenceMode": {"persistence"},
    "nvmlDeviceGetRemappedRows": set(),
    "nvmlDeviceGetRetiredPagesPendingStatus": set(),
    "nvmlDeviceGetMaxPcieLinkWidth": set(),
    "nvmlDeviceGetCurrPcieLinkGeneration": set(),
}


@pytest.mark.parametrize("function", FIELDS)
def test_what_a_gpu_does_not_support_is_none_and_nothing_else_is(function: str) -> None:
    nvml = Nvml({function: NotSupported("Not Supported")})
    found = watched(nvml)
    device = found.devices[0].model_dump()
    assert {name for name, value in device.items() if value is None} == FIELDS[function]
    assert found.notes == ()
    assert nvml.calls.count((function, 0)) == 1  # it is not asked in vain again
    assert machine_problems(found, make_gpu_machine(count=1)) == []


def test_without_an_energy_counter_energy_is_mean_power_times_time() -> None:
    silent = {"nvmlDeviceGetTotalEnergyConsumption": NotSupported("Not Supported")}
    assert watched(Nvml(silent)).devices[0].energy_j == pytest.approx(687.823 * 4.75, abs=0.01)
    silent["nvmlDeviceGetPowerUsage"] = NotSupported("Not Supported")
    assert watched(Nvml(silent)).devices[0].energy_j is None


def test_an_old_driver_is_asked_by_the_old_name() -> None:
    old = {
        "nvmlDeviceGetCurrentClocksEventReasons": FunctionNotFound("Function Not Found"),
        "nvmlDeviceGetCurrentClocksThrottleReasons": (0x1, 0x20, 0x80, 0x800),
    }
    assert watched(Nvml(old)).devices[0].throttled == {
        "GpuIdle": 0.25,
        "SwThermalSlowdown": 0.25,
        "HwPowerBrakeSlowdown": 0.25,
        "0x800": 0.25,
    }


def test_an_error_is_noted_once_and_the_other_samples_count() -> None:
    found = watched(Nvml({"nvmlDeviceGetTemperature": (60, NVMLError("GPU is lost"), 70)}))
    assert found.devices[0].temperature_c == 70
    assert found.notes == ("GPU 0 (00000000:1B:00.0): nvmlDeviceGetTemperature: GPU is lost",)


def test_what_is_no_error_of_nvml_is_noted_too() -> None:
    """As pynvml's NVMLLibraryMismatchError, which is a plain Exception."""
    mismatch = Exception("Unversioned function called and the pyNVML version does not match the NVML lib")
    found = watched(Nvml({"nvmlDeviceGetComputeRunningProcesses": mismatch}))
    assert found.devices[0].foreign_memory_bytes is None
    (note,) = found.notes
    assert note.startswith("GPU 0 (00000000:1B:00.0): nvmlDeviceGetComputeRunningProcesses: Unversioned")


def test_without_nvml_the_processor_is_still_watched() -> None:
    found = watched(Nvml(init=NVMLError("Driver Not Loaded")))
    assert found.devices == ()
    assert found.notes == ("the GPUs' health is unknown: Driver Not Loaded",)
    assert found.foreign_cpu is None or found.foreign_cpu >= 0


def test_only_the_jobs_gpus_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    nvml = Nvml({}, {"nvmlDeviceGetTemperature": (41,)}, {}, {"nvmlDeviceGetTemperature": (43,)})
    found = watched(nvml, devices=2)
    assert [(device.index, device.temperature_c) for device in found.devices] == [(0, 43), (1, 41)]


def test_the_bits_are_those_of_the_library() -> None:
    import pynvml

    named = {
        bit: name.removeprefix("nvmlClocksThrottleReason")
        for name, bit in vars(pynvml).items()
        if name.startswith("nvmlClocksThrottleReason")
        and not name.endswith(("All", "None", "UserDefinedClocks"))
    }
    assert named == nvml.REASONS
    assert set(BAD_REASONS) <= set(named.values())


def test_the_stand_in_has_the_names_of_the_library() -> None:
    import pynvml

    mine = {name for name in {*vars(Nvml), *TRAINING} if name.startswith(("nvml", "NVML"))}
    assert mine <= set(vars(pynvml))
    assert hasattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    constants = ("NVML_CLOCK_SM", "NVML_TEMPERATURE_GPU", "nvmlMemory_v2")
    assert [getattr(Nvml, name) for name in constants] == [getattr(pynvml, name) for name in constants]


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


@pytest.mark.parametrize(
    ("function", "answer", "note"),
    [
        ("RemappedRows", (0, 1, 1, 0), "rows of its memory wait to be remapped: reset the GPU"),
        ("RemappedRows", (0, 9, 0, 1), "a row of its memory could not be remapped: have the card replaced"),
        ("RetiredPagesPendingStatus", 1, "pages of its memory wait to be retired: reset the GPU"),
        ("CurrPcieLinkWidth", 4, f"PCIe width x4, it can have x16: {SLOW_COPIES}"),
        ("CurrPcieLinkGeneration", 1, f"PCIe generation 1, it can have 5: {SLOW_COPIES}"),
    ],
)
def test_what_is_wrong_with_a_card_is_noted(function: str, answer: Any, note: str) -> None:
    wrong = {f"nvmlDeviceGet{function}": (answer,)}
    assert watched(Nvml({}, wrong)).notes == (f"GPU 1 (00000000:1C:00.0): {note}",)


def test_the_clock_of_the_slowest_gpu_is_kept_by_step() -> None:
    slow = {"nvmlDeviceGetClockInfo": (1200, 1300, 1100)}
    assert watched(Nvml({}, slow), samples=3).sm_clocks_mhz == ((1, 1200), (2, 1300), (3, 1100))


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unspecified launch failure",
        "nvmlDeviceGetPowerUsage: GPU is lost",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.",
        "CUDA error: uncorrectable NVLink error detected during the execution",
    ],
)
def test_what_speaks_of_broken_hardware_is_found(said: str) -> None:
    assert hardware_fault(f"Traceback\n  {said}\nmore") == said
    assert hardware_fault("RuntimeError: CUDA error: device-side assert triggered") is None


def stat(*cores: tuple[int, ...]) -> str:
    """Of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal and the two of guests."""
    lines = [f"cpu{index} {' '.join(map(str, (*ticks, 0, 0)))}" for index, ticks in enumerate(cores)]
    return "\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "intr 9 9 9", "cpufake 1", ""])


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


def test_the_time_of_the_jobs_dead_is_not_lost() -> None:
    burn = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"
    run = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    parent = f"{run}\nprint(flush=True)\ninput()"
    job = health.JobProcesses()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe) as launcher:
        job.begin(launcher.pid)
        assert launcher.stdout is not None
        launcher.stdout.readline()  # now the child is dead
        job.scan()
        assert job.cpu_s() >= 0.29
        launcher.kill()


def test_a_job_that_is_gone_is_no_error() -> None:
    sampler = Sampler()
    sampler.begin(OTHER)
    sampler.sample(1)
    assert sampler.finish() is None


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


def test_figures() -> None:
    devices = tuple(
        DeviceHealth(index=index, utilisation=90.0 + index, energy_j=3000.0 + index) for index in range(3)
    )
    told = make_health(devices=devices)
    assert _gpu_utilisation(told) == 91
    assert _energy_per_token_j(told, 100) == pytest.approx(9003 / 1900)
    silent = make_health(devices=(*devices, DeviceHealth(index=3)))
    assert _gpu_utilisation(silent) == 91
    assert _energy_per_token_j(silent, 100) is None
    for nothing in (None, make_health()):
        assert _gpu_utilisation(nothing) is None
        assert _energy_per_token_j(nothing, 100) is None
