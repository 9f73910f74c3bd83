"""Imported by the fork server alone: loads once what every rank needs, and ties the server to the agent.

Its pipe is closed too late for that: the ranks, which die with the server, have it open, too.
"""

import contextlib
import importlib
import os

import torch  # noqa: F401  imported once here instead of once per rank, as is all below

import perfsuite.worker.main  # noqa: F401
from perfsuite.results.run_dir import MODEL_CODE
from perfsuite.worker.leash import die_with_parent

die_with_parent()
# A case's variables are set by now. Those that a rank changes later (accelerate's) nobody reads on import.
for name in os.environ.get(MODEL_CODE, "").split():
    with contextlib.suppress(Exception):  # a rank that needs it says what is wrong with it
        importlib.import_module(name)
