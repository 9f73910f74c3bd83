"""Run pytest and perfsuite's commands as separate processes in this environment."""

import shlex
import subprocess
import sys

from perfsuite.dry.cases import NO_TESTS_COLLECTED
from perfsuite.errors import readable
from perfsuite.node.processes import captured
from perfsuite.report.console import say

MOST_SAID = 2000  # maximum length of pytest's message, in characters
# Exit status of doctor and selftest if a check has no result, for example because the machine is busy. A
# measurement is still possible, because it can wait until the machine is quiet.
CANNOT_TELL = 3


def run(module: str, *arguments: str) -> int:
    """Run a module of this environment in a separate process and return its exit status."""
    say(f"$ {module} {' '.join(arguments)}")
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


def refused(*arguments: str) -> str | None:
    """Return why pytest would measure nothing with these arguments, or None. No test is run."""
    done = captured([sys.executable, "-m", "pytest", *arguments, "--collect-only", "--quiet"])
    if done.returncode == 0:
        return None
    if done.returncode == NO_TESTS_COLLECTED:
        return f"pytest selects no case: {shlex.join(arguments)}"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    said = "\n".join(errors) or (done.stdout.strip() + "\n" + done.stderr.strip()).strip()
    return f"pytest cannot collect the cases: {readable(said)[-MOST_SAID:]}"
