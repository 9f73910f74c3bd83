"""Measures as one rank of a job: `python -m perfsuite.worker RUNDIR` under any torchrun."""

import sys

from perfsuite.worker.main import main

main(sys.argv[1])
