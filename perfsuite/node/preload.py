"""Load the modules that every rank needs, once in the fork server. Only the fork server imports this module.

This module also makes the fork server end when the agent ends. Otherwise, the server would only end when
its pipe closes. But the ranks hold this pipe open too, and they end only with the server.

The clock of the ranks' start-up begins here. It is paused while perfsuite is imported and ranks are forked.
"""

import contextlib
import importlib
import os

from perfsuite.worker.clock import startup_clock

startup_clock.begin(startup_clock.PERFSUITE)

import torch  # noqa: E402, F401  all modules in this file are imported once, instead of once per rank

startup_clock.pause()

import perfsuite.worker.main  # noqa: E402, F401
from perfsuite.results.run_dir import MODEL_CODE  # noqa: E402
from perfsuite.worker.leash import die_with_parent  # noqa: E402

die_with_parent()
startup_clock.go_on()
# The variables of the case are already set, so the imports below can read them. Later, a rank changes only
# accelerate's variables, and no import reads these.
for name in os.environ.get(MODEL_CODE, "").split():
    with contextlib.suppress(Exception):  # a rank that needs the module will report the error
        importlib.import_module(name)
startup_clock.pause()  # each rank resumes its copy of the clock
