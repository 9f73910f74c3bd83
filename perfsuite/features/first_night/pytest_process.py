"""Run pytest in another process, and read its results while it runs."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from perfsuite.results.session_file import SessionFile, readable
from perfsuite.results.store import Store
from perfsuite.session.jobs import interruptible

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
    command = [sys.executable, "-m", "pytest", *words, f"--perf-json={results}"]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with log.open("w") as output, interruptible(command, stdout=output, **streams) as session:
        while is_running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                session.wait(look_s)
                is_running = False
            for file in (*store.results(), results):
                if file in earlier or not file.exists() or file.stat().st_mtime_ns == read.get(file):
                    continue
                read[file] = file.stat().st_mtime_ns
                yield from readable([file])
