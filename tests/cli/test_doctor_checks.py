from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from perfsuite.cli import doctor_checks
from perfsuite.cli.doctor_checks import (
    LAUNCHES,
    Row,
    clock_rows,
    device_rows,
    examine,
    extensions_row,
    gpu_rows,
    machine_row,
    memory_row,
    neighbours_row,
    noise_row,
    system_rows,
    torch_rows,
    well_row,
)
from perfsuite.cli.selftest_faults import small_case
from perfsuite.launch.machine import detect
from perfsuite.launch.quiet import Neighbours
from perfsuite.launch.requirements import unsupported
from perfsuite.results.outcome import Verdict
from perfsuite.worker.doctor_probe import ClockFacts, DoctorFile, MemoryFacts, TorchFacts
from tests.launch.fake_nvml import Nvml
from tests.packages import Packages
from tests.samples import make_gpu_machine, make_launches, make_machine, make_report, make_run

TORCH = TorchFacts(version="2.13.0", cuda="13.0", nccl="2.29.3", devices=8)
CLOCK = ClockFacts(overhead=(1.001,) * 5, wall=(1.0002,) * 5, step_s=0.1)
H100 = make_gpu_machine()


def statuses(rows: list[Row]) -> dict[str, str]:
    return {row.check: row.status for row in rows}


def linux(directory: Path, **files: str) -> Path:
    """A root with just these files; `__` stands for a slash."""
    for name, text in {"proc__self__clear_refs": "", **files}.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_a_gpu_that_is_not_in_the_table_is_unknown() -> None:
    row = machine_row(make_gpu_machine("NVIDIA Imaginary X1"))
    assert row.status == "unknown"
    assert "add it to PRODUCTS" in str(row.advice)
    assert machine_row(H100).status == "pass"


@pytest.mark.parametrize(
    ("quota", "status"), [("max 100000", "pass"), ("400000000 100000", "pass"), ("50000 100000", "fail")]
)
def test_a_container_grants_all_of_the_visible_cores_time(quota: str, status: str, tmp_path: Path) -> None:
    root = linux(tmp_path)
    assert "no limit" in system_rows(make_machine(), root=root)[0].found
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text(quota)
    cores = system_rows(make_machine(), root=root)[0]
    assert cores.status == status
    assert "no limit" not in cores.found
    if status == "fail":
        visible = len(os.sched_getaffinity(0))
        assert cores.found == f"{visible} cores are visible, and a cgroup grants the time of 0.5"
        assert "--cpuset-cpus" in str(cores.advice)


def test_a_peak_that_cannot_be_reset_fails(tmp_path: Path) -> None:
    assert statuses(system_rows(make_machine(), root=linux(tmp_path)))["peak memory reset"] == "pass"
    (tmp_path / "proc/self/clear_refs").unlink()
    assert statuses(system_rows(make_machine(), root=tmp_path))["peak memory reset"] == "fail"


def test_limited_ptrace_is_told_and_fails_nothing(tmp_path: Path) -> None:
    root = linux(tmp_path, proc__sys__kernel__yama__ptrace_scope="3")
    [row] = [row for row in system_rows(make_machine(), root=root) if row.check == "ptrace"]
    assert row.status == "unknown"
    assert "the stacks of a hang need no ptrace" in str(row.advice)


def test_shared_memory_matters_to_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = linux(tmp_path)
    assert "shared memory" not in statuses(system_rows(make_gpu_machine(count=1), root=root))
    assert statuses(system_rows(H100, root=root))["shared memory"] == "unknown"
    (root / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(doctor_checks, "SHARED_MEMORY_BYTES", 1)
    assert statuses(system_rows(H100, root=root))["shared memory"] == "pass"
    monkeypatch.setattr(doctor_checks, "SHARED_MEMORY_BYTES", 2**80)
    [row] = [row for row in system_rows(H100, root=root) if row.check == "shared memory"]
    assert row.status == "fail"
    assert "--shm-size" in str(row.advice)


def on_two_gpus(**changes: object) -> dict[str, Row]:
    """The rows of a machine whose second GPU answers otherwise."""
    return {row.check: row for row in gpu_rows(make_gpu_machine(count=2), Nvml({}, changes))}


def test_gpus_that_are_set_up_alike_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = on_two_gpus()
    assert {check: (row.status, row.found) for check, row in rows.items()} == {
        "GPU hardware": ("pass", "no fault is known to the driver"),
        "power limit": ("pass", "700 W"),
        "clocks": ("pass", "SM up to 1980 MHz, application clock 1980 MHz"),
        "ECC": ("pass", "on"),
        "persistence mode": ("pass", "on"),
        "NVLink": ("pass", "18 up"),
        "NVLink fabric": ("pass", "initialized"),
    }
    assert gpu_rows(make_machine()) == []


@pytest.mark.parametrize(
    ("function", "answer", "check", "said"),
    [
        ("nvmlDeviceGetEnforcedPowerLimit", 500_000, "power limit", "limited to 500 W, its default is 700 W"),
        (
            "nvmlDeviceGetTotalEccErrors",
            2,
            "GPU hardware",
            "GPU 1 (00000000:1C:00.0): 2 errors of its memory that ECC could not correct",
        ),
        (
            "nvmlDeviceGetApplicationsClock",
            1200,
            "clocks",
            "GPU 1: SM up to 1980 MHz, application clock 1200",
        ),
        ("nvmlDeviceGetEccMode", [0, 0], "ECC", "GPU 0: on, GPU 1: off"),
        ("nvmlDeviceGetPersistenceMode", 0, "persistence mode", "GPU 0: on, GPU 1: off"),
        ("nvmlDeviceGetRemappedRows", (0, 0, 0, 1), "GPU hardware", "have the card replaced"),
    ],
)
def test_a_gpu_that_is_unlike_the_others_is_named(
    function: str, answer: object, check: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = on_two_gpus(**{function: (answer,)})
    assert [name for name, row in rows.items() if row.status != "pass"] == [check]
    assert rows[check].status == "fail"
    assert said in rows[check].found


def test_a_gpu_without_all_of_its_nvlinks_or_its_fabric_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = on_two_gpus(nvmlDeviceGetNvLinkState=(1,) * 17 + (0,), fabric=(1, 0))
    assert (rows["NVLink"].status, rows["NVLink"].found) == ("fail", "GPU 0: 18 up, GPU 1: 17 up, 1 down")
    fabric = rows["NVLink fabric"]
    assert (fabric.status, fabric.found) == ("fail", "not initialized: GPU 1 (00000000:1C:00.0)")
    assert "nvidia-fabricmanager" in str(fabric.advice)


def test_gpus_without_nvlink_have_no_row_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    on_pcie = {"nvmlDeviceGetNvLinkState": Nvml.NVMLError_NotSupported("Not Supported"), "fabric": (0, 0)}
    rows = gpu_rows(make_gpu_machine(count=2), Nvml(on_pcie, on_pcie))
    assert not [row.check for row in rows if "NVLink" in row.check]


def test_what_nvml_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    no = Nvml.NVMLError_NotSupported("Not Supported")
    silent = {"nvmlDeviceGetEccMode": no, "nvmlDeviceGetEnforcedPowerLimit": no}
    rows = {row.check: row.status for row in gpu_rows(make_gpu_machine(count=1), Nvml(silent))}
    assert (rows["ECC"], rows["power limit"]) == ("unknown", "unknown")
    [row] = gpu_rows(make_gpu_machine(count=1), Nvml({}, init=Nvml.NVMLError("Driver Not Loaded")))
    assert (row.check, row.status) == ("NVML", "unknown")
    assert "Driver Not Loaded" in row.found


def test_who_else_uses_the_machine() -> None:
    others: list[str] = []
    seen = Neighbours(say=print, show=print, see_gpus=lambda devices: others, sleep=lambda seconds: None)
    assert neighbours_row(H100, seen).status == "pass"
    others.append("2,048 MiB of GPU 3 held by python (pid 7)")
    row = neighbours_row(H100, seen)
    assert (row.status, row.found) == ("fail", "2,048 MiB of GPU 3 held by python (pid 7)")


def test_torch_must_reach_the_gpus_that_nvml_sees() -> None:
    assert statuses(torch_rows(TORCH, H100)) == {"torch": "pass", "torch and GPUs": "pass"}
    old = TORCH.replace(devices=0, error="The NVIDIA driver on your system is too old", nccl=None)
    row = torch_rows(old, H100)[1]
    assert row.status == "fail"
    assert row.found == "NVML sees 8 GPUs (driver 580.1), The NVIDIA driver on your system is too old"
    assert torch_rows(TORCH.replace(devices=7), H100)[1].found.endswith("torch reaches 7 GPUs")
    assert statuses(torch_rows(TORCH.replace(devices=0), make_machine())) == {"torch": "pass"}


@pytest.mark.parametrize(
    ("read", "status"), [(100, "pass"), (102, "pass"), (40, "fail"), (0, "fail"), (110, "fail")]
)
def test_the_peak_is_what_was_allocated(read: int, status: str) -> None:
    facts = MemoryFacts(expected=100 * 2**20, read=read * 2**20, method="x")
    assert memory_row(facts).status == status


def test_the_clock_agrees_with_the_hosts_and_the_profilers() -> None:
    assert statuses(clock_rows(CLOCK)) == {"clock": "pass", "cost of measuring": "pass"}
    assert statuses(clock_rows(CLOCK.replace(wall=(1.02,) * 5)))["clock"] == "fail"
    for profiler_s, status in ((0.101, "pass"), (0.09, "fail")):
        found = statuses(clock_rows(CLOCK.replace(profiler_s=profiler_s)))
        assert found["clock and profiler"] == status


@pytest.mark.parametrize(
    ("overhead", "status"),
    [((1.0,) * 5, "pass"), ((1.05,) * 5, "fail"), ((0.8, 0.9, 1.1, 1.2, 1.3), "unknown")],
)
def test_what_measuring_costs(overhead: tuple[float, ...], status: str) -> None:
    row = clock_rows(CLOCK.replace(overhead=overhead))[-1]
    assert row.status == status
    assert (row.advice is None) == (status == "pass")


def test_one_slow_gpu_of_eight_is_named() -> None:
    reports = [
        make_report(rank, device_probe={"copy_gb_s": 3000.0 if rank != 3 else 2400.0, "matmul_tflops": 700.0})
        for rank in range(8)
    ]
    copy, matmul = device_rows(reports, H100)
    assert (copy.status, copy.found) == ("fail", "2400 to 3000 over 8 GPUs")
    assert "GPU 3 is 20% slower than the fastest" in str(copy.advice)
    assert (matmul.status, matmul.found) == ("pass", "700 to 700 over 8 GPUs, 71% of the data sheet's peak")
    assert device_rows(reports, make_machine()) == []


def test_a_single_gpu_is_compared_with_its_data_sheet_alone() -> None:
    report = make_report(device_probe={"copy_gb_s": 3000.0, "matmul_tflops": 300.0})
    copy, matmul = device_rows([report], make_gpu_machine(count=1))
    assert (copy.status, matmul.status) == ("unknown", "fail")
    assert "30% of the data sheet's peak" in matmul.found


def test_launches_that_were_set_aside_fail() -> None:
    runs = make_launches(*[1.0] * LAUNCHES)
    assert well_row(runs, Verdict(outcome="recorded", launches=LAUNCHES)).status == "pass"
    aside = Verdict(
        outcome="recorded", launches=6, unhealthy_launches=(1,), reasons=("launch 1 set aside: hot",)
    )
    assert well_row(runs, aside).found == "launch 1 set aside: hot"
    assert well_row(runs, aside).status == "fail"


@pytest.mark.parametrize(
    ("speeds", "status"),
    [
        ((1.0, 1.01, 0.99, 1.005, 0.995), "pass"),
        ((1.0, 1.6, 0.7, 1.3, 0.8), "fail"),
        ((1.0, 1.0), "unknown"),
    ],
)
def test_noise_says_which_tolerance_the_machine_can_hold(speeds: tuple[float, ...], status: str) -> None:
    runs = make_launches(*speeds)
    row = noise_row(runs, Verdict(outcome="recorded", launches=len(runs)), make_machine())
    assert row.status == status
    if status == "fail":
        found, advised = (
            re.search(r"(?:and by|drops below) ([\d.]+%)", str(text)) for text in (row.found, row.advice)
        )
        assert found is not None
        assert advised is not None
        assert found[1] == advised[1]


def test_a_failed_launch_is_no_evidence_of_noise() -> None:
    runs = [*make_launches(1.0, 1.0), make_run(failure={"kind": "crash", "message": "x"})]
    row = noise_row(runs, Verdict(outcome="failed", launches=3), make_machine())
    assert row.found == "2 healthy launches cannot tell it"


def test_its_small_case_runs_here() -> None:
    assert unsupported(small_case(detect()), detect()) is None


def test_a_probe_that_dies_is_one_row_that_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(
        doctor_checks, "neighbours_row", lambda machine: Row(check="x", status="pass", found="")
    )
    rows = examine(make_machine(), quick=True)
    assert (rows[-1].check, rows[-1].status) == ("torch", "fail")
    assert "it ended with status 1" in rows[-1].found


@pytest.mark.launch
def test_the_quick_part_on_this_machine() -> None:
    rows = examine(detect(), quick=True)
    assert {"machine", "cores", "torch"} <= set(statuses(rows))
    assert [row.status for row in rows if row.check == "torch"] == ["pass"]


@pytest.mark.launch
def test_the_probe_trains_on_this_machine(tmp_path: Path) -> None:
    probed = doctor_checks._probe(detect(), quick=False)
    assert isinstance(probed, DoctorFile)
    assert probed.clock is not None
    assert len(probed.clock.overhead) == len(probed.clock.wall) > 1
    assert probed.clock.step_s > 0
    assert probed.memory is not None
    assert memory_row(probed.memory).status == "pass"


EXTENSION = """
from typing import ClassVar
from perfsuite.frameworks.fake import Fake

class Mine(Fake):
    name: ClassVar[str] = "{name}"
"""


def test_no_extension(packages: Packages) -> None:
    row = extensions_row()
    assert (row.check, row.status, row.found) == ("extensions", "pass", "none installed")


def test_good_extensions_are_listed(packages: Packages) -> None:
    packages.install("perf-mine", EXTENSION.format(name="mine"), frameworks="mine = perf_mine:Mine")
    packages.install("perf-k8s", "K8s = object()", launchers="k8s = perf_k8s:K8s")
    row = extensions_row()
    assert (row.status, row.found) == ("pass", "mine of perf-mine, k8s of perf-k8s")


@pytest.mark.parametrize(
    ("code", "entry_points", "said"),
    [
        ("", {"launchers": "local = perf_mine:X"}, "taken twice: by perfsuite itself, and by perf-mine 1.5"),
        (
            EXTENSION.format(name="ddp"),
            {"frameworks": "ddp = perf_mine:Mine"},
            "taken twice: by perfsuite itself",
        ),
        (
            EXTENSION.format(name="x"),
            {"frameworks": "mine = perf_mine:Mine"},
            "Mine.name is 'x': set it to 'mine'",
        ),
        ("M = 3", {"metrics": "m = perf_mine:M"}, "it is a int"),
        ("1 / 0", {"launchers": "m = perf_mine:M"}, "cannot be imported: ZeroDivisionError"),
    ],
)
def test_bad_extensions_say_what_is_wrong(
    packages: Packages, code: str, entry_points: dict[str, str], said: str
) -> None:
    packages.install("perf-mine", code, **entry_points)
    row = extensions_row()
    assert row.status == "fail"
    assert said in row.found
    assert "pip uninstall perf-mine" in row.found
    assert row.advice is not None


@pytest.mark.parametrize(("package", "quick"), [("torch", True), ("torch", False), ("transformers", False)])
def test_a_package_that_the_probe_needs_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, package: str, quick: bool
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.setattr(
        doctor_checks, "neighbours_row", lambda machine: Row(check="x", status="pass", found="")
    )
    row = examine(make_machine(), quick=quick)[-1]
    assert (row.check, row.status) == ("torch", "fail")
    assert row.found == (
        f"to check it, it needs the package {package}, which is not installed: "
        f"pip install 'perfsuite[{package}]'"
    )


@pytest.mark.parametrize("broken", [False, True])
def test_no_launch_is_tried_while_an_extension_is_broken(
    monkeypatch: pytest.MonkeyPatch, packages: Packages, broken: bool
) -> None:
    """Each launch would end in that error, and every other row would be lost."""
    if broken:
        packages.install("perf-mine", "1 / 0", metrics="m = perf_mine:M")
    launched = Row(check="launches", status="pass", found="")
    ended = Row(check="neighbours", status="pass", found="")
    file = DoctorFile(torch=TorchFacts(version="2.13.0", cuda=None, nccl=None, devices=0))
    monkeypatch.setattr(doctor_checks, "neighbours_row", lambda machine: ended)
    monkeypatch.setattr(doctor_checks, "_probe", lambda machine, quick: file)
    monkeypatch.setattr(doctor_checks, "launch_rows", lambda machine, say: [launched])
    rows = examine(make_machine(), quick=False)
    assert (launched in rows) is not broken
    assert statuses(rows)["extensions"] == ("fail" if broken else "pass")
