"""Find out why a launch failed, from the reports of its ranks, its launcher, its logs and its stacks."""

import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from perfsuite.analysis import hang
from perfsuite.case.case import Case
from perfsuite.errors import FileError
from perfsuite.inputs import files
from perfsuite.redaction import masked
from perfsuite.results.rank_report import Failure, FailureKind, RankReport
from perfsuite.results.run_dir import RunDir

# Messages of gloo, NCCL, and torch's store and launcher, which appear after another rank has died. They are
# never the cause of a failure.
PEERS_SAY = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "sigterm",
    "signalexception",
    "connection was likely closed",
    "remote process exited or there was a network error",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
    "nccl communicator was aborted",
)
WATCHDOG_SAYS = "watchdog caught collective operation timeout"
"""Message of NCCL's process group when a collective exceeds the group's timeout."""
KILLED = re.compile(r"SIGKILL|[Ss]ignal:? (9|Killed)|exit ?code:? -9")
"""Matches messages about a killed process. They come from perfsuite's agent, or from torch's launcher or
`DataLoader`."""
ERROR_LINE = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)(: |$)")
"""Matches the line of a traceback that names the error. It does not match the lines of frames, which are
indented, or the lines after the error, which are prose."""
LEAST_FREE_BYTES = 2**16  # with fewer free bytes on the disk, a report might not fit
LOG_TAIL_LINES = 60  # number of last lines of each log that a failure shows
LOG_TAIL_BYTES = 2**18  # number of bytes at the end of a log that are searched for these lines
LONGEST_SECRET = 2**12  # a secret can begin up to this many bytes before the part of a log that is shown
# The thread that writes a rank's collective calls. It is never where the training hangs.
OF_OUR_THREAD = re.compile(r'/perfsuite/worker/flight_recorder\.py", line \d+ in _serve\b')
STACK_LINES = 40  # maximum number of lines shown of one process's stacks
STACKS_SHOWN = 8  # maximum number of different stacks shown for one job; equal stacks are shown once


def first_cause(
    reports: Mapping[int, RankReport], ended: Sequence[Failure], run_dir: RunDir, case: Case
) -> Failure | None:
    """Return the cause of a failed launch: its earliest failure that is not a result of another rank's death.

    `ended` has the failures of processes that the agents reported. Returns None if nothing failed.
    """
    by_ranks = [report.failure for report in reports.values() if report.failure is not None]
    missing = [rank for rank in range(case.topology.world_size) if rank not in reports]
    silent = [failure for failure in ended if failure.rank in missing or (failure.rank is None and missing)]
    lines = [(failure.at, _watchdog_line(_text(failure))) for failure in by_ranks]
    hung = {at: line for at, line in lines if line is not None}
    causes = [cause for cause in by_ranks if not is_peer(cause)]
    for failure in silent:  # the watchdog aborts the process from a thread, so there is a log, but no report
        # If a command such as torchrun started the ranks, their output is in the log of their agent.
        logs = run_dir.all_agent_logs() if failure.rank is None else [run_dir.rank_log(failure.rank)]
        written = "\n".join([_text(failure), *map(_end, logs)])
        line = _watchdog_line(written)
        if line is not None:
            hung[failure.at] = line
        elif not is_peer(failure):
            causes.append(failure)
    if causes:
        return min(causes, key=lambda failure: failure.at)
    behind = _behind(reports, case)
    if behind is not None:
        return behind
    if hung:
        at = min(hung)
        return Failure(kind="timeout", message=f"NCCL's watchdog ended a hang: {hung[at]}", at=at)
    if not missing:
        return min(by_ranks, key=lambda failure: failure.at, default=None)
    return _missing_ranks(missing, by_ranks, run_dir, case)


def _behind(reports: Mapping[int, RankReport], case: Case) -> Failure | None:
    """Return the failure of a rank that had not taken all its steps, if another rank had taken all."""
    total = case.total_steps
    ahead = [rank for rank, report in reports.items() if len(report.step_s) == total]
    for rank, report in sorted(reports.items()) if ahead else ():
        if report.failure is not None and report.steps is not None and report.steps < total:
            behind = f"rank {rank} had taken {report.steps} of {total} optimizer steps when rank {ahead[0]}"
            why = f"Does rank {rank} replace its optimizer during training, or does it have less data?"
            message = f"{behind} had taken all. {why} The error of rank {rank}: {report.failure.message}"
            return report.failure.replace(message=message)
    return None


def with_oom_kills(failure: Failure, kills: int) -> Failure:
    """Return the failure of a process: `out_of_memory` if it was killed while the OOM killer was active.

    `kills` is the number of kills in the agents' control groups, on the process's node or on all nodes.
    """
    if not kills or failure.kind not in ("crash", "error") or KILLED.search(_text(failure)) is None:
        return failure
    why = f"the kernel killed it, because memory had run out (oom_kill of its control group rose by {kills})"
    return failure.replace(kind="out_of_memory", message=f"{failure.message}: {why}")


def _missing_ranks(missing: list[int], by_ranks: Sequence[Failure], run_dir: RunDir, case: Case) -> Failure:
    """Return the failure of ranks without a report. `by_ranks` has failures caused by the loss of a rank."""
    ranks = f"rank {', '.join(map(str, missing))} of {case.topology.world_size}"
    nodes = sorted({rank // case.topology.processes_per_node for rank in missing})
    dead = [node for node in nodes if not run_dir.launch(node).exists()]
    kind: FailureKind = "missing_report"
    message = f"no report from {ranks}: see {run_dir.path}"
    if shutil.disk_usage(run_dir.path).free < LEAST_FREE_BYTES:
        full = f"no space is left on the disk of {run_dir.path}. Free some space there."
        kind = "error"
        message = f"no report from {ranks}: {full}"
    elif dead:
        who = "the agent" if case.topology.nodes == 1 else f"the agent of node {', '.join(map(str, dead))}"
        said = _last_error(run_dir.agent_log(dead[0]))
        why = f"was it killed? See {run_dir.path}"
        if said:
            why = f"{said} See {run_dir.agent_log(dead[0])}"
        message = f"{who} died before {ranks} had reported: {why}"
    elif by_ranks:
        said = f"rank {by_ranks[0].rank} then reported: {by_ranks[0].message}"
        kind = "crash"
        message = f"{ranks} died without a report; {said}"
    return Failure(kind=kind, rank=missing[0], message=message)


def _last_error(log: Path) -> str:
    """Return the last line of the traceback that ends a log, as a sentence; empty without a traceback."""
    text = _end(log).rstrip()
    _, traceback, rest = text.rpartition("Traceback (most recent call last):")
    lines = rest.splitlines()
    return f"{lines[-1].rstrip('.')}." if traceback and lines and ERROR_LINE.match(lines[-1]) else ""


def is_peer(failure: Failure) -> bool:
    """Return whether a failure only says that another rank died."""
    text = _text(failure).lower()
    return any(phrase in text for phrase in PEERS_SAY)


def _text(failure: Failure) -> str:
    return f"{failure.message}\n{failure.traceback}"


def _watchdog_line(text: str) -> str | None:
    return next((line.strip() for line in text.splitlines() if WATCHDOG_SAYS in line.lower()), None)


def with_explanation(failure: Failure, run_dir: RunDir, case: Case) -> Failure:
    """Return the failure of a killed job with the reason why its ranks waited, if their calls show it."""
    why = hang.explain(hang.calls_of(run_dir, case.topology.world_size))
    return failure if why is None else failure.replace(message=f"{failure.message}: {why}")


def with_log(failure: Failure, run_dir: RunDir) -> Failure:
    """Add stacks and the ends of logs to a failure without a traceback.

    Of the ranks' logs, only that of the failed rank is added, or all of them if it is unknown which rank
    failed. A `mismatch` needs no stacks and logs, because its message says what to change in the case.
    """
    if failure.kind == "mismatch" or (failure.traceback and "\n" in failure.traceback):
        return failure
    logs = run_dir.all_rank_logs() if failure.rank is None else [run_dir.rank_log(failure.rank)]
    written = [read_stacks(run_dir)]
    for log in [*logs, *run_dir.all_agent_logs(), run_dir.scheduler_log]:
        lines = _end(log).splitlines()[-LOG_TAIL_LINES:]
        if lines:
            written.append("\n".join([f"last lines of {log.name}:", *lines]))
    return failure.replace(traceback="\n".join(filter(None, written)) or "no process wrote anything")


def _end(path: Path) -> str:
    """Return the end of a log with secrets masked, because a script can print a password or an access token.

    If the file cannot be read, the error is returned instead.
    """
    try:
        with files.open_file(path, sys.maxsize) as file:
            # A secret is recognised by its beginning. So read `LONGEST_SECRET` bytes more than are returned.
            most = LOG_TAIL_BYTES + LONGEST_SECRET
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            text = file.read(most)
    except FileNotFoundError:
        return ""
    except (OSError, FileError) as error:
        return f"({error})"
    shown = masked(text.decode(errors="replace"))
    return shown[-LOG_TAIL_BYTES:]


def read_stacks(run_dir: RunDir) -> str:
    """Return all stacks as one text; empty if no process wrote stacks.

    Stacks are sorted by their number of ranks, the lowest first. Of stacks with the same number of ranks,
    those outside torch come first, because ranks inside torch usually wait for the others in a collective.
    Processes without a rank come last.
    """
    places = defaultdict[str, list[tuple[int | None, int]]](list)
    for rank, pid, file in run_dir.all_stacks():
        text = _end(file).strip()
        if text:
            threads = re.sub(r"(?i)thread 0x[0-9a-f]+", "thread", text).split("\n\n")
            threads = [thread for thread in threads if OF_OUR_THREAD.search(thread) is None]
            # A dump lists the main thread last. Show it first.
            places["\n".join(reversed(threads))].append((rank, pid))

    def telling(place: str) -> tuple[bool, int, bool]:
        where = places[place]
        # pragma: no mutate 1:2 to 0:2: the first line of a stack names no file
        innermost = place.splitlines()[1:2]
        return where[0][0] is None, len(where), any("/torch/" in line for line in innermost)

    shown = []
    ordered = sorted(places, key=telling)
    for place in ordered[:STACKS_SHOWN]:
        who = [f"process {pid}" if rank is None else f"rank {rank}" for rank, pid in places[place]]
        lines = place.splitlines()
        cut = lines[:STACK_LINES] + ["  ..."] * (len(lines) > STACK_LINES)
        shown.append("\n".join([f"{', '.join(who)} stopped at:", *cut]))
    if len(ordered) > STACKS_SHOWN:
        shown.append(f"and {len(ordered) - STACKS_SHOWN} more places: see {run_dir.path}")
    return "\n".join(shown)
