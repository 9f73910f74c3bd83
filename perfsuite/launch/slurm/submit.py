"""Run a pytest session as one Slurm batch job, in this directory with this interpreter, and follow it.

`sbatch --wait` would return up to 32 s late, before all processes are gone, and with 1 for a killed job.
"""

import contextlib
import math
import shlex
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from perfsuite.errors import SlurmError
from perfsuite.inputs.ini import Ini
from perfsuite.launch.slurm import commands
from perfsuite.launch.slurm.commands import SlurmJob
from perfsuite.results.store import STORE

POLL_S = 2.0  # seconds between queries to Slurm's controller
TICK_S = 0.2  # seconds between checks of the job's log
CANCEL_S = 30  # seconds for which attempts to cancel a job may fail
SILENCE_S = 600  # seconds for which Slurm may fail to answer, for example while its controller restarts

Say = Callable[[str], None]
Show = Callable[[bytes], None]


class Submitted(NamedTuple):
    """A job that Slurm has accepted."""

    id: str
    log: Path  # the file with all of its output; it does not exist before the job starts


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Put the first SIGINT or SIGTERM of a `with` into a list. The second raises `KeyboardInterrupt`."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def store_of(ini: Ini, arguments: Sequence[str]) -> Path:
    """Return the local store of a session with these arguments of pytest."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--perf-store", nargs="?")
    given = parser.parse_known_args(arguments)[0].perf_store
    return ini.root / (given or ini.values.get("perf_store") or STORE)


def submit(options: Sequence[str], arguments: Sequence[str], *, directory: Path, store: Path) -> Submitted:
    """Submit a session with these arguments of pytest, to run in `directory`. Its log goes to the store.

    `options` are those of sbatch. The nodes are not shared, and a job that has lost one is not restarted.
    Raises `SlurmError` with Slurm's message if the job is refused.
    """
    logs = (store / "slurm").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    log = f"--output={str(logs).replace('%', '%%')}/%j.log"
    ours = ("--parsable", "--job-name=perfsuite", log, "--exclusive", "--no-requeue")
    told = commands.ask("sbatch", *ours, *options, f"--wrap={script(arguments, directory)}")
    job_id = told.strip().partition(";")[0]  # a semicolon separates it from the name of the cluster
    return Submitted(id=job_id, log=logs / f"{job_id}.log")


def script(arguments: Sequence[str], directory: Path) -> str:
    """Return the job's commands. They change directory: Slurm would run in /tmp if a node lacks it."""
    words = [sys.executable, "-m", "pytest", "--perf-launcher=slurm", *arguments]  # the last launcher wins
    enter = f"cd -- {shlex.quote(str(directory))} || exit 2"
    return f"{enter}; export PYTHONUNBUFFERED=1; exec {shlex.join(words)}"


def follow(
    submitted: Submitted, came: Sequence[int], *, say: Say, show: Show, wait_start_s: float | None = None
) -> int:
    """Follow a job to its end and return the exit status of pytest, or that of a signal in `came`.

    After the first signal the job is cancelled and waited for; after the second it is left alone. `say` gets
    lines about the job, `show` gets its output. Raises `SlurmError` if the job did not end with pytest, or if
    it is cancelled because it has not started after `wait_start_s` (None: it may wait forever).
    """
    follower = _Follower(submitted, say, show)
    try:
        job = follower.until_over(came, math.inf if wait_start_s is None else wait_start_s)
        if job is not None:
            say(f"job {submitted.id} ended")
            return _exit_status(job, submitted)
        say(f"cancelling job {submitted.id}; interrupt again to leave at once")
        follower.cancel()
        say(f"job {submitted.id} is cancelled and gone; what it wrote is in {submitted.log}")
    except KeyboardInterrupt:
        say(f"left job {submitted.id}, which may still be there: scancel {submitted.id}")
    return 128 + came[0]


class _Follower:
    def __init__(self, submitted: Submitted, say: Say, show: Show) -> None:
        self.id = submitted.id
        self._log = submitted.log
        self._say = say
        self._show = show
        self._shown_bytes = 0
        self._answered = time.monotonic()
        self._said: set[str] = set()

    def until_over(self, came: Sequence[int] = (), wait_start_s: float = math.inf) -> SlurmJob | None:
        """Return the job once all of its processes have ended and its log has been shown completely.

        Return None as soon as a signal `came`. If the job has not started after `wait_start_s`, cancel it and
        raise `SlurmError`.
        """
        began = time.monotonic()
        asked = -math.inf
        while not came:
            self._show_new()
            if time.monotonic() - asked >= POLL_S:
                asked = time.monotonic()
                job = self._ask()
                if job is not None and job.is_over and not job.is_completing:
                    self._show_new()
                    return job
                if job is not None and job.is_waiting and asked - began >= wait_start_s:
                    self.cancel()
                    raise SlurmError(
                        f"job {self.id} has not started in {wait_start_s:g} s (--wait-start) and is "
                        f"cancelled. Why it waited, as Slurm says: {job.reason or 'it did not say'}"
                    )
            time.sleep(TICK_S)
        return None

    def cancel(self) -> None:
        """Cancel the job and wait until it is gone. Raises `SlurmError` if Slurm does not cancel it."""
        commands.patiently(time.monotonic() + CANCEL_S, commands.cancel, self.id)
        self.until_over()

    def _ask(self) -> SlurmJob | None:
        """Query the job, and report its state; None if Slurm does not answer now.

        Raises `SlurmError` if Slurm has not answered for `SILENCE_S`.
        """
        try:
            job = commands.job(self.id)
        except SlurmError as error:
            if time.monotonic() - self._answered > SILENCE_S:
                raise SlurmError(
                    f"job {self.id} may still be there, but Slurm has not answered for {SILENCE_S} s: {error}"
                ) from error
            self._say_once(f"Slurm does not answer, asking again: {error}")
            return None
        self._answered = time.monotonic()
        if job.is_waiting and job.reason is not None:
            self._say_once(f"job {self.id} is queued: {job.reason}")
        if not job.is_waiting and job.nodes:
            self._say_once(f"job {self.id} runs on {', '.join(job.nodes)}")
        return job

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _show_new(self) -> None:
        """Show new output of the job. Its log may not exist yet, or be unreachable for a moment."""
        new = b""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._shown_bytes)
            new = file.read()
        self._shown_bytes += len(new)
        self._show(new)


def _exit_status(job: SlurmJob, submitted: Submitted) -> int:
    """Return the exit status of pytest. Raises `SlurmError` if the job ended in another way."""
    if job.state == "COMPLETED":
        return 0
    if job.state == "FAILED" and job.reason in (None, "NonZeroExitCode") and job.exit_status:
        return job.exit_status
    raise SlurmError(f"job {job.id} is over: {job.why_over}. What it wrote is in {submitted.log}")
