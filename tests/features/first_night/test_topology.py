"""Tests of the rows about links between GPUs. nvidia-smi and nccl-tests are fake."""

import os
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.doctor.rows import Row, passed
from perfsuite.features.first_night.topology import links, nccl_rows, reduced_gb_s, topology_rows
from tests.features.first_night.nights import by_check, make_night
from tests.processes import executable
from tests.samples import make_gpu_machine, make_machine

ALL_ALIKE = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tNV18\tPIX\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-47\t0
GPU2\tNV18\tNV18\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X
Legend:
"""
REDUCED = """\
# nThread 1 nGpus 8
#       size         count      type   redop    root     time   algbw   busbw #wrong
    67108864      16777216     float     sum      -1   372.40  180.21  315.36      0
"""
GPUS = make_gpu_machine()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory for fake programs. PATH has only this directory and /bin, which has the shell."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return directory


def rows(machine: object = GPUS, **how: Any) -> dict[str, Row]:
    night = make_night(machine=machine)
    return by_check(topology_rows(night, night.new_directory("machine"), **how))


def reduced(ours: Row | None = None, machine: object = GPUS) -> Row:
    night = make_night(machine=machine)
    (row,) = nccl_rows(night, night.new_directory("machine"), ours)
    return row


def test_summarizes_the_links_and_keeps_the_report(tools: Path) -> None:
    (tools / "topo").write_text(ALL_ALIKE)
    executable(tools / "nvidia-smi", f'[ "$1" = topo ] && exec cat {tools}/topo', "echo everything")
    seen = rows()
    assert seen["topology"] == passed("topology", "NV18 between all 3 pairs of GPUs")
    assert Path("night/steps/machine/nvidia-smi.txt").read_text() == "everything\n"
    assert links(ALL_ALIKE.replace("GPU2\tNV18\tNV18", "GPU2\tNV18\tSYS")) == (
        "NV18 between 2 of 3 pairs, SYS between 1 of 3 pairs"
    )
    assert links("GPU0\t X \n") == "one GPU, so there are no links between GPUs"
    assert links("GPU0\t X \tNV18\nGPU1\tNV18\t X \n") == "NV18 between the two GPUs"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), "not run: nvidia-smi is not in PATH"),
        (("echo GPU 3 is lost; exit 15",), "not run: nvidia-smi topo -m: GPU 3 is lost"),
        (("sleep 60",), "not run: nvidia-smi topo -m: no answer in 1 s"),
    ],
)
def test_a_missing_or_silent_tool_is_unknown(tools: Path, lines: tuple[str, ...], said: str) -> None:
    if lines:
        executable(tools / "nvidia-smi", *lines)
    row = rows(deadline_s=1)["topology"]
    assert (row.status, row.found) == ("unknown", said)


def test_gpus_without_nvml_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without the driver's library must not look like a healthy machine without GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    processor = make_machine(note="NVML found no GPU: Library Not Found")
    assert rows(processor, root=tmp_path)["topology"].found == "not run: there is no GPU"
    for number in range(8):
        device = tmp_path / f"sys/bus/pci/devices/{number}"
        documents.write_text(device / "vendor", "0x10de\n")
        documents.write_text(device / "class", "0x030200\n")
    row = rows(processor, root=tmp_path)["topology"]
    assert (row.status, row.found) == (
        "fail",
        "8 NVIDIA GPUs on the PCI bus, but NVML found no GPU: Library Not Found",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rows(processor, root=tmp_path)["topology"].status == "unknown"


@pytest.mark.parametrize(
    ("ours", "status", "said"),
    [
        ("171.2 to 175 over 8 GPUs", "pass", "of 64M at 180.2 GB/s; perfsuite's own all-reduce reaches 95%"),
        ("90 to 175 over 8 GPUs", "unknown", "perfsuite's own all-reduce reaches 50% of this rate"),
        (None, "unknown", "the doctor measured no all_reduce_gb_s"),
    ],
)  # fmt: skip
def test_compares_the_all_reduce(tools: Path, ours: str | None, status: str, said: str) -> None:
    (tools / "output").write_text(REDUCED)
    executable(tools / "all_reduce_perf", f'[ "$*" = "-b 64M -e 64M -g 8" ] && exec cat {tools}/output')
    row = reduced(None if ours is None else passed("all_reduce_gb_s", ours))
    assert row.status == status
    assert said in row.found


def test_no_comparison_without_nccl_tests(tools: Path) -> None:
    assert reduced().found == "not run: all_reduce_perf is not in PATH"
    executable(tools / "all_reduce_perf", "echo NCCL failure; exit 3")
    assert reduced().found == "not run: all_reduce_perf failed: see night/steps/machine/nccl-tests.txt"
    assert reduced(machine=make_gpu_machine(count=1)).found == "not run: it needs two GPUs"
    assert reduced_gb_s("# no table") is None


def test_finds_the_rate_by_its_header() -> None:
    """Older versions of nccl-tests have no column `root`. Without a header, the columns are unknown."""
    older = REDUCED.replace("  root", "").replace("      -1", "")
    assert "-1" not in older
    assert reduced_gb_s(older) == reduced_gb_s(REDUCED) == 180.21
    assert reduced_gb_s(REDUCED.replace("180.21", "N/A")) is None
    assert reduced_gb_s(REDUCED.splitlines()[-1]) is None
