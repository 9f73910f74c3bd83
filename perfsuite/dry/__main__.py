"""`python -m perfsuite.dry RUNDIR --rank R`: run one rank dry. Imports torch only after the guard."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.case.hardware import Machine
from perfsuite.dry import guard
from perfsuite.dry.machine import pretended_cpu, pretended_gpu
from perfsuite.errors import DryRunError
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash


def main() -> None:
    """Run the rank that the arguments name. Then exit."""
    parser = argparse.ArgumentParser(prog="python -m perfsuite.dry")
    parser.add_argument("run_dir", type=Path, help="directory that contains case.json")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--gpu", help="GPU to simulate, from perfsuite.case.hardware (default: a CPU)")
    given = parser.parse_args()
    leash.die_with_parent()
    run_rank(RunDir(given.run_dir), given.rank, given.gpu)
    sys.stdout.flush()
    # Exit at once: autograd's thread for the simulated device never ends.
    os._exit(0)


def count(request: CaseFile, report: RankReport, machine: Machine, directory: Path) -> RankReport:
    """Train for some steps as one rank, and return `report` with the counts of these steps. Imports torch."""
    from perfsuite.dry.rank import DryRank
    from perfsuite.dry.script import DryScript
    from perfsuite.frameworks.base import framework_of

    kind = DryRank if framework_of(request.case).plan(request.case).command is None else DryScript
    return kind(request.case, report, machine, directory, request.counted_steps or 1).counted()


def run_rank(
    run_dir: RunDir,
    rank: int,
    gpu: str | None,
    *,
    load_guard: Callable[[], None] = guard.load,
    refuse_driver: Callable[[], None] = guard.refuse_driver,
    count: Callable[[CaseFile, RankReport, Machine, Path], RankReport] = count,
) -> None:
    """Run one rank and write its report. An error is written into the report, and is raised.

    If `gpu` is given, `load_guard` fakes CUDA before torch is loaded, and `refuse_driver` raises an error if
    `count` has loaded NVIDIA's driver.
    """
    request = documents.read(run_dir.case, CaseFile)
    topology = request.case.topology
    machine = pretended_gpu(gpu, topology) if gpu else pretended_cpu(topology)
    refused = None
    if gpu:
        try:
            load_guard()
        except DryRunError as error:
            # The error is raised below, because its report needs torch, which must not be imported before the
            # guard.
            refused = error
    from perfsuite.worker.rank import empty_report, failure_of, write_failure

    report = empty_report(rank, topology.world_size)
    try:
        if refused is not None:
            raise refused
        counted = count(request, report, machine, run_dir.path)
        if gpu:
            refuse_driver()
        documents.write(run_dir.rank(rank), counted)
    except BaseException as error:
        write_failure(run_dir, report, failure_of(error, rank))
        raise


if __name__ == "__main__":
    main()
