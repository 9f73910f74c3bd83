"""Run pytest in another process, and read its results while it runs."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from perfsuite.results.session_file import SessionFile, readable
from perfsuite.results.store import Store
from perfsuite.worker import leash

END_S = 20.0  # an interrupted pytest is killed if it has not ended its launches after this many seconds
LOOK_S = 1.0  # seconds between two readings of a running session's results


def measured(
    words: Sequence[str], log: Path, store: Store, *, look_s: float = LOOK_S
) -> Iterator[SessionFile]:
    """Run pytest, and yield its results whenever they change. The output of pytest is kept in `log`.

    The results are read every `look_s` seconds.
    """
    results = log.with_suffix(".json")  # written when pytest ends, even if it measured nothing
    earlier = {*store.results()}
    read: dict[Path, int] = {}  # file -> the modification time at which it was last read
    is_running = True
    with _pytest([*words, f"--perf-json={results}"], log) as session:
        while is_running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                session.wait(look_s)
                is_running = False
            for file in (*store.results(), results):
                if file in earlier or not file.exists() or file.stat().st_mtime_ns == read.get(file):
                    continue
                read[file] = file.stat().st_mtime_ns
                yield from readable([file])


@contextlib.contextmanager
def _pytest(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start pytest. If the `with` block ends first, interrupt pytest as Ctrl-C would, to end its launches."""
    command = [sys.executable, "-m", "pytest", *words]
    with log.open("w") as output:
        # In a separate process group, pytest gets Ctrl-C only once: from this process, not from the terminal.
        # If this process is killed, the kernel interrupts pytest, which would otherwise measure at the same
        # time as the next first night.
        session = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=partial(leash.die_with_parent, signal.SIGINT),
        )
        try:
            yield session
        finally:
            if session.poll() is None:
                session.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    session.wait(END_S)
                session.kill()
