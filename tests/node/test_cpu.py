import os
import subprocess
from pathlib import Path

import psutil
import pytest

from perfsuite.node.cpu import Cpu, bind, read_cpu


def stat(*cores: tuple[int, ...]) -> str:
    """Return the text of /proc/stat.

    The columns are user, nice, system, idle, iowait, irq, softirq, steal, and two for guests.
    """
    lines = [f"cpu{index} {' '.join(map(str, (*ticks, 0, 0)))}" for index, ticks in enumerate(cores)]
    return "\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "intr 9 9 9", "cpufake 1", ""])


@pytest.fixture(autouse=True)
def _ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.__getitem__)


def test_cpu_columns_count_for_job_cores(tmp_path: Path) -> None:
    """Core 1 is offline in the second file."""
    file = tmp_path / "stat"
    file.write_text(stat((100, 200, 400, 800, 1600, 3200, 6400, 12800)))
    assert read_cpu(file, {0}) == Cpu(processes_s=7, steal_s=128, total_s=255)
    cores = [(100 * 2**index, *[0] * 7) for index in range(4)]
    file.write_text("\n".join(line for line in stat(*cores).splitlines() if not line.startswith("cpu1")))
    assert read_cpu(file, {2}) == Cpu(processes_s=4, steal_s=0, total_s=4)
    assert read_cpu(file, {0, 3}) == Cpu(processes_s=9, steal_s=0, total_s=9)


@pytest.mark.parametrize("content", [None, "cpu0 1 2", "cpu0 a b c d e f g h"])
def test_an_unreadable_stat_file_is_unknown(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert read_cpu(tmp_path / "stat", {0}) is None


def test_this_machine_is_read_as_psutil_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = psutil.cpu_times()
    cpu = read_cpu(Path("/proc/stat"), set(range(psutil.cpu_count() or 1)))
    after = psutil.cpu_times()
    assert cpu is not None
    rounding_s = 0.01 * 8 * (psutil.cpu_count() or 1)
    busy = [times.user + times.nice + times.system for times in (before, after)]
    assert busy[0] - rounding_s <= cpu.processes_s <= busy[1] + rounding_s
    assert before.steal - rounding_s <= cpu.steal_s <= after.steal + rounding_s


def bound(cores: set[int], *, allowed: set[int], ranks: int = 1) -> set[int]:
    """Return the cores of a process after another process has bound it. `allowed` are the other's cores."""
    mask: set[int] = set(allowed)
    all_cores = max(cores | allowed) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: all_cores)
        patch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
        patch.setattr(os, "sched_setaffinity", lambda pid, near: mask.intersection_update(near))
        bind(1, frozenset(cores), ranks)
    return mask


@pytest.mark.parametrize("reserved", [0, 2])
def test_keeps_a_process_on_cores_near_its_gpu(reserved: int) -> None:
    """Slurm and Kubernetes can reserve some cores of a machine for themselves."""
    socket = set(range(96))
    machine = set(range(reserved, 192))
    assert bound(socket, allowed=machine, ranks=4) == socket & machine


@pytest.mark.parametrize(
    ("near", "ranks"),
    [
        (set[int](), 1),  # the near cores are unknown
        (set(range(96, 192)), 1),  # the user has bound the job to the other socket
        (set(range(48)), 1),  # the user has bound the job to this socket
        (set(range(3)), 4),  # the job may use only few cores of this socket
    ],
)
def test_leaves_a_process_that_would_lack_cores(near: set[int], ranks: int) -> None:
    allowed = set(range(48))
    assert bound(near, allowed=allowed, ranks=ranks) == allowed


def test_binds_a_real_process_unless_it_has_ended() -> None:
    first = min(os.sched_getaffinity(0))
    with subprocess.Popen(["sleep", "60"]) as process:
        bind(process.pid, frozenset({first, 1_000_000}))
        actual = os.sched_getaffinity(process.pid)
        process.kill()
        process.wait()
        bind(process.pid, frozenset({first}))
    assert actual == {first}
