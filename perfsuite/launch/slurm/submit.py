"""Runs a pytest session as one batch job of Slurm, and follows it. Imports neither torch nor pytest.

The job runs `python -m pytest` on the first node of its allocation, in the current directory and by this
interpreter: both have to be on a file system that the nodes share.

Why not `sbatch --wait`: it ends with 1 for a job that a signal ended, as pytest does for a failed test, and
before all processes of the job are gone. Slurm would have to be asked all the same.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from perfsuite.errors import FileError, SlurmError
from perfsuite.launch.slurm import commands
from perfsuite.launch.slurm.commands import SlurmJob

LOGS = "slurm"
"""The folder of the local store that holds the logs of jobs."""
LAUNCHER = "--perf-launcher"
POLL_S = 2.0
"""Seconds between two questions to Slurm's controller."""
TICK_S = 0.2
"""Seconds between two looks at the job's log."""
CANCEL_S = 30
"""Seconds for which Slurm may fail to cancel a job."""
SILENCE_S = 600
"""Seconds for which Slurm may fail to answer, as while its controller is restarted."""

Say = Callable[[str], None]
"""Prints a line about the job."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that Slurm has accepted."""

    id: str
    log: Path
    """The file with all that it writes; it is not there before the job starts."""


class Interrupted(Exception):
    """The user wants the session to end."""


class Interrupts:
    """Inside a `with`: the first SIGINT or SIGTERM is remembered, the second raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that came first."""

    def __enter__(self) -> Interrupts:
        self._before = {each: signal.signal(each, self._handle) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    @property
    def exit_status(self) -> int:
        """The exit status of a command that ended for the signal."""
        return 128 + (self.number or signal.SIGINT)

    def check(self) -> None:
        """Raise `Interrupted` if a signal came."""
        if self.number is not None:
            raise Interrupted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number


def submit(options: Sequence[str], arguments: Sequence[str], *, directory: Path, store: Path) -> Submitted:
    """Submit a session with these arguments of pytest, to run in `directory`; its log goes to the store.

    `options` are those of sbatch. Nobody else runs on the nodes, and a job that lost one does not start anew.

    Raises `SlurmError` in Slurm's words if it is refused, `FileError` if the store cannot be written.
    """
    logs = (store / LOGS).resolve()
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{logs}, where logs of jobs go, cannot be made: {error.strerror}") from error
    told = commands.ask(
        "sbatch",
        "--parsable",
        "--job-name=perfsuite",
        f"--output={str(logs).replace('%', '%%')}/%j.log",
        "--exclusive",
        "--no-requeue",
        *options,
        f"--wrap={script(arguments, directory)}",
    )
    job_id = told.strip().partition(";")[0]  # behind a semicolon stands the name of the cluster
    return Submitted(id=job_id, log=logs / f"{job_id}.log")


def script(arguments: Sequence[str], directory: Path) -> str:
    """Return the job's commands. They change directory: Slurm would run in /tmp where a node lacks it."""
    chosen = any(argument.partition("=")[0] == LAUNCHER for argument in arguments)
    words = [sys.executable, "-m", "pytest", *([] if chosen else [f"{LAUNCHER}=slurm"]), *arguments]
    enter = f"cd -- {shlex.quote(str(directory))} || exit 2"
    return f"{enter}; export PYTHONUNBUFFERED=1; exec {shlex.join(words)}"


def follow(
    submitted: Submitted,
    interrupts: Interrupts,
    *,
    say: Say,
    show: Callable[[str], None],
    wait_start_s: float | None = None,
) -> int:
    """Follow a job to its end and return the exit status of pytest.

    `show` gets what the job writes. Raises `SlurmError` if the job ended otherwise than by pytest's end, or
    if it has not started after `wait_start_s` and is cancelled (None: it may queue for ever). Raises
    `Interrupted` when the user wanted the end, and the job is cancelled and gone.
    """
    follower = _Follower(submitted, say, show)
    try:
        job = follower.until_over(interrupts.check, math.inf if wait_start_s is None else wait_start_s)
    except Interrupted:
        say(f"cancelling job {submitted.id}; interrupt again to leave at once")
        follower.cancel()
        raise
    say(f"job {submitted.id} ended: queued {job.queued_s or 0:.0f} s, ran {job.ran_s or 0:.0f} s")
    return _exit_status(job, submitted)


class _Follower:
    """Asks Slurm about a job, and shows its log meanwhile."""

    def __init__(self, submitted: Submitted, say: Say, show: Callable[[str], None]) -> None:
        self.id, self._log, self._say, self._show = submitted.id, submitted.log, say, show
        self._read_bytes, self._decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")
        self._answers, self._answered = True, time.monotonic()
        self._reason: str | None = None
        self._has_started = False

    def until_over(self, check: Callable[[], None], wait_start_s: float = math.inf) -> SlurmJob:
        """Return the job when all of its processes have ended, and its log is shown to the end.

        `check` is called again and again, and may raise. Raises `SlurmError` if the job has not started after
        `wait_start_s`, and is cancelled.
        """
        began, asked = time.monotonic(), -math.inf
        while True:
            check()
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
                        f"cancelled. Why it waited, as Slurm says: {self._reason or 'it did not say'}"
                    )
            time.sleep(TICK_S)

    def cancel(self) -> None:
        """Cancel the job and wait until it is gone. Raises `SlurmError` if Slurm does not cancel it."""
        commands.patiently(time.monotonic() + CANCEL_S, commands.cancel, self.id)
        self.until_over(lambda: None)

    def _ask(self) -> SlurmJob | None:
        """Return the job, or None if Slurm does not answer now. Raises `SlurmError` if it never does."""
        try:
            job = commands.job(self.id)
        except SlurmError as error:
            if time.monotonic() - self._answered > SILENCE_S:
                raise SlurmError(
                    f"job {self.id} may still be there, but Slurm has not answered for {SILENCE_S} s: {error}"
                ) from error
            if self._answers:
                self._say(f"Slurm does not answer, asking again: {error}")
            self._answers = False
            return None
        self._answers, self._answered = True, time.monotonic()
        self._tell(job)
        return job

    def _tell(self, job: SlurmJob) -> None:
        """Say why the job waits, and where it runs."""
        if job.is_waiting and job.reason is not None and job.reason != self._reason:
            self._reason = job.reason
            self._say(f"job {self.id} is queued: {job.reason}")
        if not job.is_waiting and not self._has_started and job.nodes:
            self._has_started = True
            runs = "ran" if job.is_over else "runs"  # a short one may be over when Slurm is asked again
            self._say(f"job {self.id} {runs} on {', '.join(job.nodes)} (queued {job.queued_s or 0:.0f} s)")

    def _show_new(self) -> None:
        """Show what the job has written since; its log may be not there yet, or out of reach for a moment."""
        new = b""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        self._read_bytes += len(new)
        if text := self._decoder.decode(new):
            self._show(text)


def _exit_status(job: SlurmJob, submitted: Submitted) -> int:
    """Return that of pytest. Raises `SlurmError` if the job did not end by pytest's end."""
    failed_itself = job.state == "FAILED" and job.reason in (None, "NonZeroExitCode")
    if (job.state == "COMPLETED" or failed_itself) and job.exit_status is not None and not job.exit_signal:
        return job.exit_status
    by_signal = f", ended by signal {job.exit_signal}" if job.exit_signal else ""
    raise SlurmError(f"job {job.id} is over: {job.why_over}{by_signal}. What it wrote is in {submitted.log}")
