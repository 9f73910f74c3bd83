import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfsuite import documents
from perfsuite.case.hardware import Machine
from perfsuite.cli.app import command_of
from perfsuite.doctor.machine import extensions_row, machine_rows, neighbours_row, system_rows
from perfsuite.doctor.rows import Row
from perfsuite.errors import MachineError
from perfsuite.launch.quiet import Neighbours
from tests.packages import MINE, PODS, Packages
from tests.samples import make_gpu_machine, make_machine

H100 = make_gpu_machine()


def checked(machine: Machine, root: Path) -> dict[str, Row]:
    return {row.check: row for row in system_rows(machine, root=root)}


def test_names_the_machine_and_its_markers() -> None:
    rows = machine_rows(H100)
    assert [(row.status, row.found) for row in rows] == [
        ("pass", "h100-80gb-sxm: 8 GPUs, NVIDIA H100 80GB HBM3, 80 GiB"),
        ("pass", f"989.5 TFLOP/s dense at 16 bit ({H100.product.source if H100.product else ''})"),
        ("pass", "-m cpu, -m gpu, -m h100 (to see why another marker selects no cases: --expect MARKER)"),
    ]


def test_names_why_no_gpu_was_found() -> None:
    note = "NVML found no GPU: it is not there"
    assert [row.found for row in machine_rows(make_machine(note=note))[1:]] == [
        note,
        "-m cpu (to see why another marker selects no cases: --expect MARKER)",
    ]


def test_peak_of_an_unlisted_gpu_is_unknown() -> None:
    _, peak, _ = machine_rows(make_gpu_machine("NVIDIA Imaginary X1"))
    assert (peak.check, peak.status) == ("peak FLOP/s", "unknown")
    assert "its datasheet to perfsuite/case/accelerators.json" in str(peak.advice)


def test_peak_of_a_gpu_without_bf16_is_in_fp16() -> None:
    _, peak, _ = machine_rows(make_gpu_machine("Tesla T4"))
    assert (peak.status, peak.found) == (
        "pass",
        "65 TFLOP/s dense in fp16, unknown in bf16 (NVIDIA T4 datasheet, 2019)",
    )


def cores_under(quota: str, machine: Machine, root: Path) -> Row:
    """Return the row `cores` of a machine whose cgroup has this quota."""
    documents.write_text(root / "sys/fs/cgroup/cpu.max", quota)
    return checked(machine, root)["cores"]


VISIBLE = len(os.sched_getaffinity(0))


def test_cores_without_a_cgroup_are_reported_as_such(tmp_path: Path) -> None:
    assert "without a visible cgroup limit" in checked(make_machine(), tmp_path)["cores"].found


@pytest.mark.parametrize("quota", ["max 100000", "400000000 100000"])
def test_container_grants_all_visible_core_time(tmp_path: Path, quota: str) -> None:
    row = cores_under(quota, make_machine(), tmp_path)
    assert (row.status, row.found) == ("pass", f"{VISIBLE}, without a limit on their time")


@pytest.mark.parametrize(
    ("machine", "status"), [(make_machine(), "fail"), (H100, "unknown")], ids=["cpu", "gpu"]
)
def test_container_limits_core_time(tmp_path: Path, machine: Machine, status: str) -> None:
    row = cores_under("50000 100000", machine, tmp_path)
    assert row.found == (
        f"{VISIBLE} cores are visible, but a cgroup grants only as much CPU time as 0.5 cores have"
    )
    assert (row.status, "--cpuset-cpus" in str(row.advice)) == (status, True)


@pytest.mark.parametrize(
    ("count", "status", "observed"),
    [
        (192, "pass", "192 of 192, 24 for each GPU, without a visible cgroup limit"),
        (16, "pass", "16 of 192, 2 for each GPU, without a visible cgroup limit"),
        (12, "unknown", "12 of 192, 1.5 for each GPU, without a visible cgroup limit"),
    ],
)
def test_each_gpu_needs_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, status: str, observed: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    row = checked(H100, tmp_path)["cores"]
    assert (row.status, row.found) == (status, observed)
    assert ("--cpus-per-task" in str(row.advice)) == (status == "unknown")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    whole = checked(H100, tmp_path)["cores"]
    assert ("no other cores" in str(whole.advice)) == (status == "unknown")


def test_a_peak_that_cannot_be_reset_fails(tmp_path: Path) -> None:
    check = "peak memory reset"
    assert [checked(described, tmp_path)[check].status for described in (make_machine(), H100)] == [
        "fail",
        "unknown",
    ]
    documents.write_text(tmp_path / "proc/self/clear_refs", "")
    assert checked(make_machine(), tmp_path)[check].status == "pass"


@pytest.mark.parametrize(
    ("mib", "status", "shown"),
    [(None, "unknown", "No such file"), (64, "unknown", "holds 64 MiB"), (2048, "pass", "holds 2 GiB")],
)
def test_shared_memory_matters_to_several_gpus(
    mib: int | None, status: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that are linked can work without shared memory, so a lack of it is only `unknown`."""
    assert "shared memory" not in checked(make_gpu_machine(count=1), tmp_path)
    if mib is not None:
        size = SimpleNamespace(f_blocks=mib * 2**8, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: size)
    row = checked(H100, tmp_path)["shared memory"]
    assert (row.status, shown in row.found) == (status, True)
    remedy = "--ipc=host or --shm-size=8g, or mount an emptyDir"
    assert (remedy in str(row.advice)) == (status == "unknown")


def test_hidden_gpus_are_reported_with_a_remedy(tmp_path: Path) -> None:
    """The machine has four GPUs, a network card, and a bridge from NVIDIA."""
    for number, (vendor, kind) in enumerate([*[("0x10de", "0x030200")] * 4, ("0x15b3", "0x020000")]):
        documents.write_text(tmp_path / f"sys/bus/pci/devices/{number}/vendor", f"{vendor}\n")
        documents.write_text(tmp_path / f"sys/bus/pci/devices/{number}/class", f"{kind}\n")
    documents.write_text(tmp_path / "sys/bus/pci/devices/5/vendor", "0x10de\n")
    hidden = checked(make_gpu_machine(count=2), tmp_path)["hidden GPUs"]
    assert hidden.status == "unknown"
    assert hidden.found.startswith("2 of the 4 GPUs are visible: cases of more than 2 processes are skipped")
    assert "CUDA_VISIBLE_DEVICES, --gpus=all" in str(hidden.advice)
    assert "hidden GPUs" not in checked(make_gpu_machine(count=4), tmp_path)


def test_names_who_else_uses_the_machine() -> None:
    others: list[str] = []
    seen = Neighbours(say=print, show=print, see_gpus=lambda devices: others, sleep=lambda seconds: None)
    assert neighbours_row(H100, seen).status == "pass"
    others.append("2,048 MiB of GPU 3 held by python (pid 7)")
    row = neighbours_row(H100, seen)
    assert (row.status, row.found) == ("unknown", "2,048 MiB of GPU 3 held by python (pid 7)")


def test_users_that_nvml_cannot_name_are_unknown() -> None:
    def lost(devices: int) -> list[str]:
        raise MachineError("GPU 3 cannot be read: GPU is lost")

    seen = Neighbours(say=print, show=print, see_gpus=lost, sleep=lambda seconds: None)
    row = neighbours_row(H100, seen)
    assert (row.status, row.found) == ("unknown", "GPU 3 cannot be read: GPU is lost")


def test_lists_extensions(packages: Packages) -> None:
    row = extensions_row(command_of)
    assert (row.check, row.status, row.found) == ("extensions", "pass", "none installed")
    packages.install("perf-mine", MINE, frameworks="mine = perf_mine:Mine")
    packages.install("perf-k8s", PODS, launchers="k8s = perf_k8s:Pods")
    row = extensions_row(command_of)
    assert (row.status, row.found, row.advice) == ("pass", "mine of perf-mine, k8s of perf-k8s", None)


@pytest.fixture
def bad_extensions(packages: Packages) -> Row:
    """Return the row of extensions that clash, are misnamed, or cannot be imported."""
    packages.install("perf-ddp", MINE.replace('"mine"', '"ddp"'), frameworks="ddp = perf_ddp:Mine")
    packages.install("perf-x", MINE.replace('"mine"', '"x"'), frameworks="y = perf_x:Mine")
    packages.install("perf-three", "M = 3", metrics="m = perf_three:M")
    packages.install("perf-broken", "1 / 0", launchers="broken = perf_broken:M\nlocal = perf_broken:X")
    return extensions_row(command_of)


def test_bad_extensions_fail_with_advice(bad_extensions: Row) -> None:
    assert bad_extensions.status == "fail"
    assert bad_extensions.advice is not None


@pytest.mark.parametrize(
    "reason",
    [
        "used twice: by perfsuite itself, and by perf-ddp 1.5",
        "Mine.name is 'x': set it to",
        "it is 3",
        "used twice: by perfsuite itself, and by perf-broken 1.5",
        "cannot be imported: ZeroDivisionError",
        "pip uninstall perf-three",
    ],
)
def test_explains_each_bad_extension(bad_extensions: Row, reason: str) -> None:
    assert reason in bad_extensions.found
