"""From the files of a launch to one `Run`. Driver side; imports neither torch nor pytest."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from perfsuite import documents
from perfsuite.case.case import Case, CaseFile
from perfsuite.case.framework import LossRule
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError, ReportError
from perfsuite.results import agreement, stacks
from perfsuite.results.figures import (
    _in_tf32,
    _slowest_probe,
    _unsettled,
    extra_figures,
    figures_of,
    job_steps,
)
from perfsuite.results.health import gpu_setup
from perfsuite.results.metric import find
from perfsuite.results.rank_report import Failure, Observed, RankReport
from perfsuite.results.run import Health, LaunchFile, Run
from perfsuite.results.run_dir import FLIGHT_RECORDER_FILE, RunDir
from perfsuite.results.window import find_window

WALL_CLOCK_AGREES = 0.05
PEERS_SAY = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "sigterm",
    "signalexception",
    "remote process exited or there was a network error",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
    "nccl communicator was aborted",
)
"""What a healthy rank says when another one died, by gloo, torch elastic or NCCL: never the cause."""
WATCHDOG_SAYS = "watchdog caught collective operation timeout"
"""Of NCCL's process group: a collective hung for as long as that group allows."""
ELASTIC_SAYS = re.compile(r"[A-Z]\d{4} [\d:.]+ \d+ torch/(distributed/elastic|multiprocessing)/")
"""How a line begins in which torch's launcher tells that a rank has ended."""
LOG_TAIL_LINES = 60
LOG_TAIL_BYTES = 2**18
NO_TF32_PEAK = "no MFU: matrix products in fp32 ran in TF32 here, and the peak that is known is that of fp32"
LOSS_STEPS = 3
"""Or a tenth of all, if that is more: whether a loss falls is told by the means of the first and of the last.
Of 48 runs of 12 steps (the tiny models, learning rates 1e-3 and 1e-4) it falls in all; by the first step and
the last alone, it did not in 2."""
LOSS_NOT_OBSERVED = (
    "loss not observed, as the case asks for: training that no longer learns would not be seen"
)


def collect(
    run_dir: RunDir,
    machine: Machine,
    *,
    started_at: str,
    duration_s: float,
    failure: Failure | None,
    health: Health | None = None,
) -> Run:
    """One run out of the rank reports. What went wrong is in its `failure`; this does not raise for it.

    `failure` is why the job was killed, if it was: no matter where every rank had reported a measurement.
    """
    asked = documents.read(run_dir.case, CaseFile)
    bare = Run(
        case=asked.case,
        machine=machine,
        started_at=started_at,
        duration_s=round(duration_s, 3),
        inject=asked.inject,
        health=health,
    )
    try:
        reports = _reports(run_dir, asked.case)
        ended = documents.read(run_dir.launch, LaunchFile).failures if run_dir.launch.exists() else ()
    except FileError as error:
        unread = Failure(kind="missing_report", message=str(error))
        return bare.replace(failure=unread if failure is None else _with_log(failure, run_dir))
    cause = _first_failure(reports, ended, run_dir, asked.case)
    if cause is not None:
        told = [report.failure for report in reports.values() if report.failure is not None]
        if failure is not None and (cause not in told or _is_peer(cause)):
            cause = failure  # a job that was killed, for all that its ranks say, was killed for what was seen
        return bare.replace(failure=_with_log(cause, run_dir))
    try:
        ranks = [reports[rank] for rank in sorted(reports)]
        run = _measured(bare, ranks, asked.peak_flops)
        metrics = [metric for name in asked.metrics if (metric := find(name)) is not None]
        run = run.replace(figures=run.figures.replace(extra=extra_figures(run, ranks, metrics)))
    except ReportError as error:
        return bare.replace(failure=Failure(kind="ranks_disagree", message=str(error)))
    notes = run.notes
    if ended:  # every report is complete: the measurement stands, but it must not go unsaid
        who = ", ".join(
            crash.message if crash.rank is None else f"rank {crash.rank}: {crash.message}" for crash in ended
        )
        notes = (*notes, f"died after its report was written: {who}")
    if failure is not None:
        notes = (*notes, f"every rank had reported, but the job did not end: {failure.message}")
    unlike = agreement.trained_apart(ranks, asked.case) or agreement.tokens_differ(ranks, asked.case)
    if unlike is not None:
        return run.replace(notes=notes, failure=Failure(kind="mismatch", message=unlike))
    if (rule := asked.case.framework.asks_of_loss) is None:
        return run.replace(notes=(*notes, LOSS_NOT_OBSERVED))
    return run.replace(notes=notes, failure=_bad_loss(run.loss, rule, asked.case))


def _reports(run_dir: RunDir, case: Case) -> dict[int, RankReport]:
    paths = [(rank, run_dir.rank(rank)) for rank in range(case.topology.world_size)]
    return {rank: documents.read(path, RankReport) for rank, path in paths if path.exists()}


def _first_failure(
    reports: dict[int, RankReport], ended: Sequence[Failure], run_dir: RunDir, case: Case
) -> Failure | None:
    """The cause: the earliest failure that is not merely a peer's death noticed by another rank."""
    told = [report.failure for report in reports.values() if report.failure is not None]
    missing = [rank for rank in range(case.topology.world_size) if rank not in reports]
    silent = [failure for failure in ended if failure.rank in missing or (failure.rank is None and missing)]
    hung = {failure.at: said for failure in told if (said := _watchdog_said(_text(failure))) is not None}
    by_watchdog = []
    for failure in silent:  # it ends a process from within a thread, which leaves no report, only a log
        if (said := _watchdog_said(f"{_text(failure)}\n{_end(_log(failure, run_dir))}")) is not None:
            by_watchdog.append(failure)
            hung[failure.at] = said
    causes = [failure for failure in told + silent if failure not in by_watchdog and not _is_peer(failure)]
    if causes:
        return min(causes, key=lambda failure: failure.at)
    if hung:
        at = min(hung)
        return Failure(kind="timeout", message=f"NCCL's watchdog ended a hang: {hung[at]}", at=at)
    if not missing:
        return min(told, key=lambda failure: failure.at, default=None)
    ranks = f"rank {', '.join(map(str, missing))} of {case.topology.world_size}"
    if told:  # only that a peer was gone, and here is who was
        message = f"{ranks} died without a report; rank {told[0].rank} then said: {told[0].message}"
        return Failure(kind="crash", rank=missing[0], message=message)
    return Failure(
        kind="missing_report", rank=missing[0], message=f"no report from {ranks}: see {run_dir.path}"
    )


def _is_peer(failure: Failure) -> bool:
    said = _text(failure).lower()
    return any(phrase in said for phrase in PEERS_SAY)


def _text(failure: Failure) -> str:
    return f"{failure.message}\n{failure.traceback}"


def _log(failure: Failure, run_dir: RunDir) -> Path:
    """Of the rank that failed; the ranks of a command write to the launcher's."""
    return run_dir.launcher_log if failure.rank is None else run_dir.rank_log(failure.rank)


def _watchdog_said(text: str) -> str | None:
    return next((line.strip() for line in text.splitlines() if WATCHDOG_SAYS in line.lower()), None)


def _with_log(failure: Failure, run_dir: RunDir) -> Failure:
    """Where there is no traceback, the stacks of a job that hung, and what the rank wrote last; of an
    unknown rank, what all of them did."""
    if failure.traceback and "\n" in failure.traceback:
        return failure
    logs = (
        sorted(run_dir.path.glob("rank-*.log")) if failure.rank is None else [run_dir.rank_log(failure.rank)]
    )
    tails = [(log.name, _tail(log)) for log in logs]
    by_launcher = _tail(run_dir.launcher_log)
    if any(tail for _, tail in tails):  # a rank has told why: that a process ended tells nothing new
        kept = [line for line in by_launcher.splitlines() if ELASTIC_SAYS.match(line) is None]
        by_launcher = "\n".join(kept).strip()
    tails.append((run_dir.launcher_log.name, by_launcher))
    written = [f"last lines of {name}:\n{tail}" for name, tail in tails if tail]
    if where := stacks.read_stacks(run_dir):
        written.insert(0, where)
    return failure.replace(traceback="\n".join(written) or "no process wrote anything")


def _tail(path: Path) -> str:
    return "\n".join(_end(path).splitlines()[-LOG_TAIL_LINES:])


def _end(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")


def _measured(bare: Run, reports: list[RankReport], peak_flops: float | None) -> Run:
    case = bare.case
    _check_agreement(reports, case)
    series = job_steps([report.step_s for report in reports])
    window = find_window(series, case.max_warmup_steps)
    slowest = Counter(
        max(range(len(reports)), key=lambda rank: reports[rank].step_s[step])
        for step in range(window.start, window.stop)
    ).most_common(1)[0][0]
    run = bare.replace(
        step_s=tuple(series),
        probe_s=tuple(max(probes) for probes in zip(*(report.probe_s for report in reports), strict=True)),
        loss=tuple(fmean(losses) for losses in zip(*(report.loss for report in reports), strict=True)),
        window=(window.start, window.stop),
        slowest_rank=slowest,
        memory=tuple(report.memory for report in reports if report.memory is not None),
        flops=reports[0].flops,
        observed=_with_machine(reports[0].observed, bare),
        device_probe=_slowest_probe(reports),
        notes=(
            *_notes(reports, steady=window.steady),
            *_rank_notes(reports),
            *agreement.token_notes(reports, case),
        ),
    )
    if _in_tf32(run):
        run, peak_flops = run.replace(notes=(*run.notes, NO_TF32_PEAK)), None
    run = run.replace(figures=figures_of(run, reports, peak_flops))
    return run.replace(notes=(*run.notes, *_unsettled(run)))


def _rank_notes(reports: list[RankReport]) -> list[str]:
    """What the ranks have to say, each thing once."""
    return list(dict.fromkeys(note for report in reports for note in report.notes))


def _with_machine(observed: Observed | None, run: Run) -> Observed | None:
    """With what a worker does not know: the driver, and how its GPUs are set up. Without what every launch
    has anew: a directory."""
    if observed is None:
        return None
    kept = {name: value for name, value in observed.environment.items() if name != FLIGHT_RECORDER_FILE}
    driver = {"driver": run.machine.driver} if run.machine.driver is not None else {}
    return observed.replace(environment={**kept, **driver, **gpu_setup(run.health)})


def _check_agreement(reports: list[RankReport], case: Case) -> None:
    told: dict[str, Sequence[object]] = {
        "the number of steps": [len(report.step_s) for report in reports],
        "the number of losses": [len(report.loss) for report in reports],
        "the number of probes": [len(report.probe_s) for report in reports],
        "tokens per step": [report.tokens_per_step for report in reports],
        "the world size": [report.world_size for report in reports],
        "the clock": [report.clock for report in reports],
    }
    for what, values in told.items():
        if len(set(values)) > 1:
            each = ", ".join(f"rank {r.rank}: {value}" for r, value in zip(reports, values, strict=True))
            raise ReportError(f"ranks disagree on {what} ({each})")
    world = case.topology.world_size
    if reports[0].world_size != world:
        raise ReportError(f"a world size of {world} was asked for, {reports[0].world_size} ran")
    if (ranks := [report.rank for report in reports]) != list(range(world)):
        raise ReportError(f"the files of ranks 0 to {world - 1} hold the reports of {ranks}")
    for report in reports:
        if bad := [seconds for seconds in report.step_s if not 0 < seconds < math.inf]:
            raise ReportError(f"rank {report.rank}: a step cannot take {bad[0]} s")
    if reports[0].loss and len(reports[0].loss) != case.total_steps:
        raise ReportError(f"{case.total_steps} losses were asked for, {len(reports[0].loss)} were recorded")
    if len(reports[0].step_s) != case.total_steps:
        raise ReportError(f"{case.total_steps} steps were asked for, {len(reports[0].step_s)} were made")


def _notes(reports: list[RankReport], *, steady: bool) -> list[str]:
    notes = []
    if not steady:
        notes.append("step times were still drifting at the end: raise max_warmup_steps or steps")
    for report in reports:
        summed = sum(report.step_s)
        if abs(report.wall_s - summed) > WALL_CLOCK_AGREES * report.wall_s:
            wall = f"{report.wall_s:.3f} s"
            notes.append(f"rank {report.rank}: the steps sum to {summed:.3f} s, the wall clock says {wall}")
    retries = max((report.memory.alloc_retries or 0 for report in reports if report.memory), default=0)
    if retries:
        notes.append(f"{retries} allocator retries: memory is nearly full, which slows steps down")
    if all(report.memory is not None and report.memory.peak == 0 for report in reports):
        notes.append(
            "a peak memory of 0 bytes cannot be compared: what was trained stayed within the slack of the "
            "level before it was built; take a larger model or micro_batch"
        )
    return notes


def _bad_loss(loss: Sequence[float], rule: LossRule, case: Case) -> Failure | None:
    """A loss that is no number is no training; one that does not fall is none where it has to."""
    if not loss:
        return Failure(kind="loss", message="no loss was recorded")
    bad = [step for step, value in enumerate(loss) if not math.isfinite(value)]
    if bad:
        return Failure(kind="loss", message=f"the loss is {loss[bad[0]]} at step {bad[0]}")
    count = max(LOSS_STEPS, len(loss) // 10)
    first, last = fmean(loss[:count]), fmean(loss[-count:])
    if rule == "finite" or last < first:
        return None
    advice = "give more steps or another learning_rate"
    if not case.framework.builds_model:
        advice = 'say loss="finite" where it need not (random data, a learning rate that warms up, a GAN)'
    return Failure(
        kind="loss",
        message=f"the loss does not fall: {first:.4f} is the mean of the first {count} steps, "
        f"{last:.4f} that of the last {count}: {advice}",
    )
