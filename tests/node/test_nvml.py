import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from perfsuite.analysis.health import BAD_REASONS, machine_problems
from perfsuite.node.health_sampler import Sampler
from perfsuite.node.nvml import Gpus
from perfsuite.node.processes import JobProcesses
from perfsuite.results.counts import numbers
from tests.node.fake_nvml import (
    GIB,
    OTHER,
    OWN,
    TRAINING,
    FunctionNotFound,
    NotSupported,
    Nvml,
    NVMLError,
    using,
    watched,
)
from tests.samples import make_gpu_machine


def test_other_processes_on_the_gpu_are_foreign() -> None:
    processes = [using(OWN, 60 * GIB), using(OTHER, 12 * GIB), using(OTHER + 1, 1 * GIB)]
    alone = processes[:1]
    by_mig = [using(OWN, None), using(OTHER, None)]
    listed = ((alone, processes, alone), (by_mig,))
    health = watched(Nvml(*({"nvmlDeviceGetComputeRunningProcesses": readings} for readings in listed)))
    assert [device.foreign_memory_bytes for device in health.devices] == [13 * GIB, 0]
    assert machine_problems(health, make_gpu_machine(count=2)) == [
        "GPU 0 (00000000:1B:00.0) was shared: other processes held 13.0 GiB (at most 256.0 MiB is healthy)"
    ]


def test_newborn_child_is_not_foreign() -> None:
    nvml = Nvml({"nvmlDeviceGetComputeRunningProcesses": ([using(OWN, GIB)],)})
    gpus = Gpus(nvml, 1, JobProcesses(OWN))
    gpus.read(whole=True)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        nvml.devices[0]["nvmlDeviceGetComputeRunningProcesses"] = ([using(OWN, GIB), using(child.pid, GIB)],)
        (gpu,) = gpus.read(whole=True)
    assert gpu.foreign_bytes == 0


def test_own_job_in_a_container_is_not_foreign() -> None:
    """In a container, NVML lists no processes, or lists them under the ids that they have outside."""
    listed: list[list[Any]] = [[using(OTHER, 60 * GIB)], []]
    health = watched(Nvml({}, *({"nvmlDeviceGetComputeRunningProcesses": (process,)} for process in listed)))
    assert [device.foreign_memory_bytes for device in health.devices] == [0, None, None]
    (note,) = health.notes
    assert note.startswith("GPU 1, 2: NVML does not list this job's own processes")
    assert machine_problems(health, make_gpu_machine(count=3)) == []


FIELDS = {
    "ClockInfo": ["sm_clock_mhz", "sm_clock_mhz_min"],
    "UtilizationRates": ["utilisation"],
    "PowerUsage": ["power_w"],
    "TotalEnergyConsumption": ["energy_j"],
    "Temperature": ["temperature_c"],
    "CurrentClocksEventReasons": ["throttled"],
    "ComputeRunningProcesses": ["foreign_memory_bytes"],
    "MemoryInfo": ["held_before_bytes", "job_memory_bytes"],
    "EnforcedPowerLimit": ["power_limit_w"],
    "PowerManagementDefaultLimit": ["power_limit_default_w"],
    "MaxClockInfo": ["sm_clock_limit_mhz"],
    "ApplicationsClock": ["sm_clock_set_mhz"],
    "EccMode": ["ecc"],
    "PersistenceMode": ["persistence"],
    "RemappedRows": [],
    "RetiredPagesPendingStatus": [],
}


@pytest.mark.parametrize("function", FIELDS)
@pytest.mark.parametrize("error", [NotSupported("Not Supported"), FunctionNotFound("Function Not Found")])
def test_only_unsupported_gpu_values_are_none(function: str, error: NVMLError) -> None:
    health = watched(Nvml({f"nvmlDeviceGet{function}": error}))
    device = health.devices[0].model_dump(exclude={"node"})
    assert {name for name, value in device.items() if value is None} == set(FIELDS[function])
    assert health.notes == ()
    assert machine_problems(health, make_gpu_machine(count=1)) == []


def test_throttle_reasons_have_nvmls_names() -> None:
    reasons = {"nvmlDeviceGetCurrentClocksEventReasons": (0x1, 0x20, 0x80, 0x800)}
    assert watched(Nvml(reasons)).devices[0].throttled == {
        "GpuIdle": 0.25,
        "SwThermalSlowdown": 0.25,
        "HwPowerBrakeSlowdown": 0.25,
        "0x800": 0.25,
    }


@pytest.mark.parametrize("kind", [NVMLError, Exception])  # NVMLLibraryMismatchError is not an NVMLError
def test_notes_an_error_once_and_goes_on(kind: type[Exception]) -> None:
    health = watched(Nvml({"nvmlDeviceGetTemperature": (60, kind("GPU is lost"), 70)}))
    assert health.devices[0].temperature_c == 70
    assert health.notes == ("GPU 0 (00000000:1B:00.0): nvmlDeviceGetTemperature: GPU is lost",)


def test_only_the_jobs_gpus_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    nvml = Nvml({}, {"nvmlDeviceGetTemperature": (41,)}, {}, {"nvmlDeviceGetTemperature": (43,)})
    health = watched(nvml, devices=2)
    assert [(device.index, device.temperature_c) for device in health.devices] == [(0, 43), (1, 41)]


def test_stand_in_has_the_librarys_names() -> None:
    import pynvml

    named = Gpus(pynvml, 0, JobProcesses(OWN))._reasons
    assert (min(named), max(named), len(named)) == (1, 0x400, 11)
    assert set(BAD_REASONS) <= set(named.values())
    mine = {name for name in {*vars(Nvml), *TRAINING} if name.startswith(("nvml", "NVML"))}
    assert mine <= set(vars(pynvml))


PENDING = "of memory are waiting to be"
NO_ECC = "memory errors that ECC could not correct"
REPLACE = "have the card replaced"


@pytest.mark.parametrize(
    ("function", "answer", "pending", "fault"),
    [
        ("RemappedRows", (0, 1, 1, 0), f"rows {PENDING} remapped: reset the GPU", None),
        ("RetiredPagesPendingStatus", 1, f"pages {PENDING} retired: reset the GPU", None),
        ("TotalEccErrors", 2, None, f"2 {NO_ECC}: reset the GPU"),
        ("RemappedRows", (0, 9, 0, 1), None, f"a row of memory could not be remapped: {REPLACE}"),
    ],
)
def test_notes_pending_errors_and_judges_faults(
    function: str, answer: Any, pending: str | None, fault: str | None
) -> None:
    seen = watched(Nvml({}, {f"nvmlDeviceGet{function}": (answer,)}))
    card = "GPU 1 (00000000:1C:00.0)"
    assert list(seen.notes) == [f"{card}: {pending}"] * (pending is not None), (
        "otherwise a fault would be reported twice"
    )
    assert [card.memory_pending for card in seen.devices] == [(), () if pending is None else (pending,)]
    said = machine_problems(seen, make_gpu_machine(count=2))
    assert said == [f"{card}: {fault}"] * (fault is not None)


@pytest.mark.parametrize(
    ("states", "links", "why"),
    [
        (
            (1,) * 17 + (0,),
            [(18, 0), (17, 1)],
            ["17 of its NVLinks are up, but another GPU has 18 that are up"],
        ),
        ((1,) * 12 + (NVMLError("Invalid Argument"),), [(18, 0), (12, 0)], ["12 of its NVLinks are up"]),
        ((0,), [(18, 0), (None, None)], []),  # like one of two cards without a bridge
        (NotSupported("Not Supported"), [(18, 0), (None, None)], []),
        ((1,), [(18, 0), (18, 0)], []),
    ],
)
def test_gpu_without_an_nvlink_is_unhealthy(states: Any, links: list[Any], why: list[str]) -> None:
    seen = watched(Nvml({}, {"nvmlDeviceGetNvLinkState": states}))
    assert [(card.nvlinks, card.nvlinks_down) for card in seen.devices] == links
    said = machine_problems(seen, make_gpu_machine(count=2))
    assert len(said) == len(why)
    assert all(
        f"GPU 1 (00000000:1C:00.0): {reason}" in sentence for reason, sentence in zip(why, said, strict=True)
    )
    assert seen.notes == ()


@pytest.mark.parametrize(
    ("cores", "masks", "near"),
    [
        (8, [[0x0F], [0xF0]], [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (96, [[1 << 63, 0b101]], [{63, 64, 66}]),
        (8, [NotSupported("Not Supported"), [0xF0]], [set(), {4, 5, 6, 7}]),
        (8, [NVMLError("Unknown Error")], [set()]),
    ],
)
def test_reports_the_cores_near_each_gpu(
    monkeypatch: pytest.MonkeyPatch, cores: int, masks: list[Any], near: list[set[int]]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    nvml = Nvml(*({"nvmlDeviceGetCpuAffinity": (mask,)} for mask in masks))
    sampler = Sampler(devices=len(masks), nvml=nvml)
    assert sampler.near_cores == ()
    sampler.prepare()
    assert sampler.near_cores == tuple(map(frozenset, near))
    health = sampler.seen()
    assert health is not None
    assert [set(numbers(card.near_cores)) if card.near_cores else set() for card in health.devices] == near


@pytest.mark.parametrize(
    ("visible", "count", "only"),
    [(None, 4, None), (None, 2, "0,1"), ("3,1,2", 3, None), ("3,1,2", 1, "3"), ("GPU-2,GPU-0", 1, "GPU-2")],
)
def test_a_job_sees_only_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, only: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml(*({"nvmlDeviceGetUUID": (f"GPU-{number}",)} for number in range(4)))
    assert Gpus(nvml, count, JobProcesses(os.getpid())).only_visible() == only


def field(value: int, *, type_of_value: int = 3, status: int = 0) -> SimpleNamespace:
    """A fake nvmlFieldValue_t: the value of one counter."""
    values = SimpleNamespace(uiVal=value % 2**32, ullVal=value)
    return SimpleNamespace(nvmlReturn=status, valueType=type_of_value, value=values)


def test_nvlink_errors_of_a_launch_are_noted() -> None:
    before = [field(7, type_of_value=1), field(2**33), field(1, status=3)]
    after = [field(9, type_of_value=1), field(2**33 + 10), field(99, status=3)]
    nvml = Nvml(
        {"nvmlDeviceGetFieldValues": (before, after)},
        {"nvmlDeviceGetFieldValues": (before,)},
        {},
        {"nvmlDeviceGetFieldValues": ([field(5, status=3)],)},
    )
    gpus = Gpus(nvml, 4, JobProcesses(OWN))
    gpus.count_link_errors()
    gpus.note_link_errors()
    assert gpus.finish() == (
        "GPU 0 (00000000:1B:00.0): 12 NVLink errors (CRC, replay, recovery) during this launch, which slow "
        "collectives down. Look at nvidia-smi nvlink -e",
    )


def test_a_counter_that_was_reset_hides_no_other() -> None:
    nvml = Nvml({"nvmlDeviceGetFieldValues": ([field(900), field(1)], [field(0), field(4)])})
    gpus = Gpus(nvml, 1, JobProcesses(OWN))
    gpus.count_link_errors()
    gpus.note_link_errors()
    (note,) = gpus.finish()
    assert ": 3 NVLink errors" in note


def test_unread_nvlink_errors_are_not_noted() -> None:
    """A counter that fell was reset. The errors of a counter that was not read twice are unknown."""
    nvml = Nvml(
        {"nvmlDeviceGetFieldValues": ([field(9)], [field(2)])},
        {"nvmlDeviceGetFieldValues": ([field(9, status=3), field(1)], [field(9), field(1)])},
        {"nvmlDeviceGetFieldValues": ([field(9), field(1)], [field(9, status=3), field(1)])},
    )
    gpus = Gpus(nvml, 3, JobProcesses(OWN))
    gpus.count_link_errors()
    gpus.note_link_errors()
    assert gpus.finish() == ()
    assert Gpus(nvml, 1, JobProcesses(OWN)).finish() == ()
