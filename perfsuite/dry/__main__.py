"""`python -m perfsuite.dry RUNDIR --rank R`: one rank of a dry run, as `perfsuite.dry.driver` starts it.

Imports torch late: whoever asks torch first decides whether there is CUDA.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.dry import guard
from perfsuite.dry.machine import pretended_cpu, pretended_gpu
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash


def main() -> None:
    """Pretend CUDA before torch is loaded, if the machine has it; then count."""
    parser = argparse.ArgumentParser(prog="python -m perfsuite.dry")
    parser.add_argument("run_dir", type=Path, help="holds case.json")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--gpu", help="the product that is pretended (perfsuite.case.hardware); else a CPU")
    given = parser.parse_args()
    leash.die_with_parent()
    run_dir = RunDir(given.run_dir)
    topology = documents.read(run_dir.case, CaseFile).case.topology
    machine = pretended_gpu(given.gpu, topology) if given.gpu else pretended_cpu(topology)
    if given.gpu:
        guard.load()
    from perfsuite.dry import rank

    rank.main(run_dir, given.rank, machine)
    sys.stdout.flush()
    os._exit(0)  # autograd's thread of a device that is not there does not end


if __name__ == "__main__":
    main()
