"""`python -m perfsuite.dry RUNDIR --rank R`: run one rank dry. Imports torch only after the guard."""

import argparse
import os
import sys
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.dry import guard
from perfsuite.dry.machine import pretended_cpu, pretended_gpu
from perfsuite.errors import DryRunError
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash


def main() -> None:
    """Fake CUDA before torch is loaded, if a GPU is requested. Then run the rank and write its report."""
    parser = argparse.ArgumentParser(prog="python -m perfsuite.dry")
    parser.add_argument("run_dir", type=Path, help="directory that contains case.json")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--gpu", help="GPU to simulate, from perfsuite.case.hardware (default: a CPU)")
    given = parser.parse_args()
    leash.die_with_parent()
    run_dir = RunDir(given.run_dir)
    request = documents.read(run_dir.case, CaseFile)
    case = request.case
    machine = pretended_gpu(given.gpu, case.topology) if given.gpu else pretended_cpu(case.topology)
    refused = None
    if given.gpu:
        try:
            guard.load()
        except DryRunError as error:
            refused = error  # torch can be imported now, which the report needs
    from perfsuite.worker.rank import empty_report, failure_of, write_failure

    report = empty_report(given.rank, case.topology.world_size)
    try:
        if refused is not None:
            raise refused
        from perfsuite.dry.rank import DryRank
        from perfsuite.dry.script import DryScript
        from perfsuite.frameworks.base import framework_of

        kind = DryRank if framework_of(case).plan(case).command is None else DryScript
        rank = kind(case, report, machine, run_dir.path, request.counted_steps or 1)
        counted = rank.counted()
        if given.gpu:
            guard.refuse_driver()
        documents.write(run_dir.rank(given.rank), counted)
    except BaseException as error:
        write_failure(run_dir, report, failure_of(error, given.rank))
        raise
    sys.stdout.flush()
    # Exit at once: autograd's thread for the simulated device never ends.
    os._exit(0)


if __name__ == "__main__":
    main()
