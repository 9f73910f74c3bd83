"""Reads how many processes the kernel has killed for want of memory. Imports neither torch nor pytest.

Linux counts them as `oom_kill` ("Control Group v2", memory.events; "Memory Resource Controller",
memory.oom_control; /proc/vmstat).
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from perfsuite.results.run import OomKills


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> OomKills:
    """Return the counters as they are now; 0 where there is none."""
    groups = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups.append(_counter(cgroups / path.lstrip("/") / "memory.events"))
            elif "memory" in controllers.split(","):
                groups.append(_counter(cgroups / "memory" / path.lstrip("/") / "memory.oom_control"))
    return OomKills(of_group=sum(groups), of_machine=_counter(proc / "vmstat"))


def oom_kills_since(before: OomKills) -> OomKills:
    """Return how many processes were killed since the counters were at `before`."""
    now = oom_kills()
    return OomKills(
        of_group=max(0, now.of_group - before.of_group), of_machine=max(0, now.of_machine - before.of_machine)
    )


def _counter(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
