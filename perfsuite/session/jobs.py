"""Run pytest and perfsuite's commands as separate processes in this environment."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from perfsuite.dry.cases import NO_TESTS_COLLECTED
from perfsuite.errors import readable
from perfsuite.node.processes import captured
from perfsuite.report.console import say
from perfsuite.worker import leash

MOST_SAID = 2000  # maximum length of pytest's message, in characters
# Exit status of doctor and selftest if a check has no result, for example because the machine is busy. A
# measurement is still possible, because it can wait until the machine is quiet.
CANNOT_TELL = 3


END_S = 20.0  # an interrupted process is killed if it has not ended its launches after this many seconds


def run(module: str, *arguments: str, variables: Mapping[str, str] = os.environ) -> int:
    """Run a module of this environment in a separate process and return its exit status.

    `variables` are the environment variables of the process.

    Ctrl-C and SIGTERM interrupt the module, which then ends its launches and writes its results. After that,
    this process ends with `KeyboardInterrupt` or `SystemExit`.
    """
    say(f"$ {module} {' '.join(arguments)}")
    before = signal.signal(signal.SIGTERM, end_by_signal)
    try:
        with interruptible([sys.executable, "-m", module, *arguments], env=variables) as process:
            return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def end_by_signal(number: int, frame: FrameType | None) -> None:
    """End this process with an exception, so that its results are written. This is a handler of signals."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def interruptible(
    command: Sequence[str], *, end_s: float = END_S, **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process. If the `with` block ends first, interrupt the process as Ctrl-C would.

    A process that has not ended `end_s` seconds later is killed. `streams` are arguments of `Popen`.
    """
    # In a separate process group, the new process gets Ctrl-C only once: from this process, not from the
    # terminal. If this process is killed, the kernel interrupts the new process. Without this, the new
    # process would still measure when the next night begins.
    process = subprocess.Popen(
        command,
        **streams,
        process_group=0,
        preexec_fn=partial(leash.die_with_parent, signal.SIGINT),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(end_s)
            finally:  # a second Ctrl-C ends the wait
                process.kill()
                process.wait()


def refused(*arguments: str) -> str | None:
    """Return why pytest would measure nothing with these arguments, or None. No test is run."""
    done = captured([sys.executable, "-m", "pytest", *arguments, "--collect-only", "--quiet", "--color=no"])
    if done.returncode == 0:
        return None
    if done.returncode == NO_TESTS_COLLECTED:
        return f"pytest selects no case: {shlex.join(arguments)}"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    said = "\n".join(errors) or (done.stdout.strip() + "\n" + done.stderr.strip()).strip()
    return f"pytest cannot collect the cases: {readable(said)[-MOST_SAID:]}"
