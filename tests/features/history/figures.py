"""Measures how long commands take with a long history.

The history has 1,000 commits, 2 hardware classes, and 100 benchmarks with 4 sets of parameters each.
"""

import itertools
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perfsuite.case.case import Case, Topology
from perfsuite.features.history.asv.export import export, publish
from perfsuite.features.history.trend import trend
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.fsdp2 import FSDP2
from tests.features.history.nights import Level, write_history
from tests.samples import make_case
from tests.synthetic import make_repository

COMMITS = 1000
GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
MODELS = [f"model-{letter}" for letter in "abcdefghij"]
TOPOLOGIES = [Topology(nodes=nodes, processes_per_node=8) for nodes in (1, 2, 4, 8, 16)]


def cases() -> list[Case]:
    """Return the cases: 10 models x 5 topologies x 2 precisions, each with 2 frameworks and 2
    micro-batches."""
    tiny = make_case(hardware=("h100", "h200")).model
    return [
        make_case(
            model=tiny.replace(name=name),
            topology=topology,
            precision=precision,
            framework=framework,
            micro_batch=micro_batch,
            hardware=("h100", "h200"),
        )
        for name, topology, precision, framework, micro_batch in itertools.product(
            MODELS, TOPOLOGIES, ("bf16", "bf16-mixed"), (DDP(), FSDP2()), (1, 2)
        )
    ]


def levels(case: int, night: int) -> Level:
    """Return the level of a case on a night. Every tenth case becomes slower, faster or larger once."""
    if case % 10 or night < 2 * case + 200:
        return Level()
    return (Level(step_s=1.05), Level(step_s=0.95), Level(memory=1.02))[case // 10 % 3]


@contextmanager
def timed(what: str, seconds: dict[str, float]) -> Iterator[None]:
    """Print the wall time and the CPU time of a command, and keep the CPU time."""
    began = time.perf_counter()
    used = cpu_s()
    yield
    seconds[what] = cpu_s() - used
    print(f"{what}: {time.perf_counter() - began:.1f} s, {seconds[what]:.1f} s of CPU", flush=True)


def cpu_s() -> float:
    """Return the CPU seconds of this process and its ended children."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(root: Path) -> None:
    """Make the history, and time each command."""
    seconds: dict[str, float] = {}
    history = root / "history"
    out = root / "out"
    repo = root / "repo"
    commits = make_repository(repo, COMMITS)
    with timed("making the history", seconds):
        write_history(history, commits, cases(), levels, gpus=GPUS, launches=2)
    with timed("export", seconds):
        exported = export(history, repo, out)
    print(f"  {len(exported.commits)} commits, {len(exported.unplaced)} left out")
    with timed("trend", seconds):
        result = trend(history, repo=repo)
    print(
        f"  {result.series} series in {result.sessions} sessions, {len(result.findings)} changes in 90 days"
    )
    with timed("asv publish", seconds):
        publish(out, commits=exported.commits)
    print(f"export / asv publish, CPU: {seconds['export'] / seconds['asv publish']:.2f} (bound 0.25)")
    for directory in (history, out / "results", out / "html"):
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        print(f"{directory.relative_to(root)}: {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory))
