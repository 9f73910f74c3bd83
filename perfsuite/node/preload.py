"""Imported only by the fork server: load once what every rank needs, and tie the server to the agent.

The server's pipe is closed too late for that, because the ranks, which die with the server, hold it open as
well.

The clock of the ranks' start-up begins here. It is paused while perfsuite is imported and ranks are forked.
"""

import contextlib
import importlib
import os

from perfsuite.worker.clock import startup_clock

startup_clock.begin(startup_clock.PERFSUITE)

import torch  # noqa: E402, F401  imported once here instead of once per rank, as is all below

startup_clock.pause()

import perfsuite.worker.main  # noqa: E402, F401
from perfsuite.results.run_dir import MODEL_CODE  # noqa: E402
from perfsuite.worker.leash import die_with_parent  # noqa: E402

die_with_parent()
startup_clock.go_on()
# A case's variables are set by now. No import reads those that a rank changes later (accelerate's).
for name in os.environ.get(MODEL_CODE, "").split():
    with contextlib.suppress(Exception):  # a rank that needs the module reports what is wrong with it
        importlib.import_module(name)
startup_clock.pause()  # each rank resumes it
