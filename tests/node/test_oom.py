from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.node import oom
from perfsuite.node.oom import oom_kills, oom_kills_since
from perfsuite.results.run import OomKills


def machine(directory: Path, groups: str, files: dict[str, int], kills: int) -> tuple[Path, Path]:
    """Return stand-ins for /proc and /sys/fs/cgroup."""
    proc, cgroups = directory / "proc", directory / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    (proc / "vmstat").write_text(f"nr_free_pages 7\noom_kill {kills}\n")
    for name, count in files.items():
        (cgroups / name).parent.mkdir(parents=True)
        (cgroups / name).write_text(f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n")
    return proc, cgroups


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/user.slice/a:b.scope\n", "user.slice/a:b.scope/memory.events"),
        ("4:cpu,memory:/job\n1:cpu:/other\n0::/\n", "memory/job/memory.oom_control"),
    ],
    ids=["version 2", "version 1"],
)
def test_the_kernels_counters_are_those_of_our_control_group_and_of_the_machine(
    tmp_path: Path, groups: str, file: str
) -> None:
    assert oom_kills(*machine(tmp_path, groups, {file: 3}, 5)) == OomKills(of_group=3, of_machine=5)


def test_a_counter_that_is_missing_or_no_number_counts_nothing(tmp_path: Path) -> None:
    assert oom_kills(tmp_path, tmp_path) == OomKills()
    assert oom_kills(*machine(tmp_path / "odd", "no control groups\n", {}, 2)) == OomKills(of_machine=2)
    proc, cgroups = machine(tmp_path, "0::/\n", {}, 2)
    (proc / "vmstat").write_text("oom_kill many\n")
    assert oom_kills(proc, cgroups) == OomKills()


def test_what_was_killed_before_is_none_of_the_launchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "oom_kills", lambda: OomKills(of_group=3, of_machine=5))
    assert oom_kills_since(OomKills(of_group=2, of_machine=1)) == OomKills(of_group=1, of_machine=4)
