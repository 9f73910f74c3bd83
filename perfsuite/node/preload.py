"""Load the modules that every rank needs, once in the fork server. Only the fork server imports this module.

This module also makes the server end with the agent. The server's pipe does not close early enough for that,
because the ranks hold the pipe open as well, and they only end with the server.

The clock of the ranks' start-up begins here. It is paused while perfsuite is imported and ranks are forked.
"""

import contextlib
import importlib
import os

from perfsuite.worker.clock import startup_clock

startup_clock.begin(startup_clock.PERFSUITE)

import torch  # noqa: E402, F401  imported once here instead of once per rank, like all modules below

startup_clock.pause()

import perfsuite.worker.main  # noqa: E402, F401
from perfsuite.results.run_dir import MODEL_CODE  # noqa: E402
from perfsuite.worker.leash import die_with_parent  # noqa: E402

die_with_parent()
startup_clock.go_on()
# The case's variables are already set. Imports do not read the variables that a rank changes later
# (accelerate's).
for name in os.environ.get(MODEL_CODE, "").split():
    with contextlib.suppress(Exception):  # a rank that needs the module will report the error
        importlib.import_module(name)
startup_clock.pause()  # each rank resumes it
