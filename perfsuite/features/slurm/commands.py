"""Query jobs with Slurm's commands, and parse the output. All queries can raise `SlurmError`.

Slurm's accounting is not needed: the controller knows a job while it runs, and for some minutes afterwards
(Slurm's MinJobAge). Fields that a version of Slurm does not print are None.
"""

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from perfsuite.errors import ToolError
from perfsuite.node.processes import captured

POLL_S = 0.2  # seconds to wait before a query is repeated
ANSWER_S = 60  # seconds to wait for the answer of a command
FORGOTTEN = "FORGOTTEN"  # the state of a job that Slurm does not know, or no longer knows
ENDED = frozenset(
    [
        *("COMPLETED", "BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PREEMPTED", "REVOKED", "TIMEOUT", FORGOTTEN),
    ]
)
NOTHING = ("", "(null)", "N/A", "None", "Unknown")  # printed by Slurm for missing values
T = TypeVar("T")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=(.*?)(?=\s+[A-Za-z][\w:/]*=|\s*$)")
_UNKNOWN_JOB = "Invalid job id"
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


class SlurmError(ToolError):
    """A command of Slurm failed. The text has the command and Slurm's message."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Slurm's data about a job."""

    id: str
    state: str  # the state as one word: PENDING, RUNNING, TIMEOUT
    state_words: str  # the state as Slurm prints it: `CANCELLED by 0`
    reason: str | None = None
    nodes: tuple[str, ...] = ()  # the nodes, in Slurm's order; empty while the job is waiting
    left_s: int | None = None  # seconds until the time limit; None if there is no limit
    # Whether GPUs were requested in another way than per node. A step then does not get all GPUs.
    spreads_gpus: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the job's allocation can no longer be used. Its processes might still be ending."""
        return self.state in ENDED or self.is_completing

    @property
    def is_completing(self) -> bool:
        """Whether the processes of the job are ending."""
        return "COMPLETING" in self.state_words

    @property
    def why_over(self) -> str | None:
        """Slurm's reason why the allocation is over. None while it can be used."""
        if not self.is_over:
            return None
        return self.state_words if self.reason is None else f"{self.state_words} ({self.reason})"


def ask(*words: str, answer_s: float = ANSWER_S, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a Slurm command. It runs in its own process session, so Ctrl-C does not end it."""
    command = shlex.join(words)
    try:
        done = captured(words, timeout=answer_s, start_new_session=True, env=environment)
    except OSError as error:
        raise SlurmError(f"{words[0]}, a command of Slurm, cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command}: no answer within {answer_s:g} s. Check Slurm's controller with `scontrol ping`"
        ) from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise SlurmError(f"{command}: {said}")
    return done.stdout


def _ask_unless(refusal: str, *words: str) -> str | None:
    """Return the output of a Slurm command. None if it fails with a message that matches `refusal`."""
    try:
        return ask(*words)
    except SlurmError as error:
        if re.search(refusal, str(error)):
            return None
        raise


def patiently(
    until: float,
    ask: Callable[[str], T],
    about: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return Slurm's answer. If a query fails, repeat it until the time `until`.

    Queries can fail because Slurm's controller is busy.
    """
    while True:
        try:
            return ask(about)
        except SlurmError as error:
            if time.monotonic() > until or isinstance(error.__cause__, OSError):  # Slurm is not installed
                raise
            sleep(POLL_S)


def job(job_id: str) -> SlurmJob:
    """Return Slurm's data about a job. The state is `FORGOTTEN` if Slurm does not know the job."""
    printed = _ask_unless(_UNKNOWN_JOB, "scontrol", "show", "job", job_id, "--oneliner")
    if printed is None:
        return SlurmJob(id=job_id, state=FORGOTTEN, state_words="no longer known to Slurm")
    job_fields = fields(printed)
    nodes = ask("scontrol", "show", "hostnames", job_fields["NodeList"]) if "NodeList" in job_fields else ""
    return parse_job(job_id, job_fields, tuple(nodes.split()))


def parse_job(job_id: str, job_fields: Mapping[str, str], nodes: tuple[str, ...]) -> SlurmJob:
    """Return a job from the fields of `scontrol show job` and the names of its nodes."""
    words = job_fields.get("JobState", "UNKNOWN")
    states = re.findall(r"[A-Z_]+", words.upper()) or ["UNKNOWN"]
    limit_s, run_s = (parse_duration_s(job_fields.get(name, "")) for name in ("TimeLimit", "RunTime"))
    return SlurmJob(
        id=job_id,
        # If the job has ended, the state must show how it ended.
        state=next((state for state in states if state in ENDED), states[0]),
        state_words=words,
        reason=job_fields.get("Reason"),
        nodes=nodes,
        left_s=None if limit_s is None or run_s is None else limit_s - run_s,
        spreads_gpus=any("gpu" in job_fields.get(f"TresPer{unit}", "") for unit in ("Job", "Task", "Socket")),
    )


def fields(line: str) -> dict[str, str]:
    """Return the non-empty fields of a line of `scontrol --oneliner`, by name.

    If a name appears several times, its first value is used.
    """
    values: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        values.setdefault(name, value.strip())
    return {name: value for name, value in values.items() if value not in NOTHING}


def parse_duration_s(text: str) -> int | None:
    """Return the seconds of a time such as `1-02:03:04` or `3:04`. None for words such as UNLIMITED."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def steps(job_id: str, name: str) -> list[str]:
    """Return the ids of a job's running steps with this name."""
    options = ("--noheader", "--steps", f"--jobs={job_id}", "--format=%i %j")
    printed = _ask_unless(_UNKNOWN_JOB, "squeue", *options) or ""
    pairs = [line.strip().partition(" ") for line in printed.splitlines()]
    return [step_id for step_id, _, step_name in pairs if step_name.strip() == name]


def cancel(id_: str, *options: str) -> None:
    """Cancel a job or a step, unless it has already ended. `options` are options of scancel."""
    _ask_unless(f"already completing or completed|{_UNKNOWN_JOB}", "scancel", *options, id_)
