"""The flow: launch a case, measure it, judge it, and launch again while in doubt. Read this first.

    case --case.json--> launcher --> one worker per rank --rank-N.json--> collect --> run.json --> judge

Driver side; imports neither torch nor pytest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import Case, CaseFile
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.health import sampler
from perfsuite.launch.local import OnProgress, launch, no_progress
from perfsuite.results.collect import collect
from perfsuite.results.metric import recorded
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir


def measure(
    case: Case,
    machine: Machine,
    directory: Path,
    verdict_on: Callable[[list[Run]], Verdict],
    *,
    runs: list[Run] | None = None,
    inject: str | None = None,
    on_launch: Callable[[int], None] = lambda launch: None,
    on_progress: OnProgress = no_progress,
) -> tuple[list[Run], Verdict]:
    """Launch `case` until `verdict_on` the runs so far is no longer undecided.

    Each run is appended to `runs`, an empty list: what an error or an interrupt leaves is there.
    """
    runs = [] if runs is None else runs
    while True:
        number = len(runs) + 1
        on_launch(number)
        launch_directory = RunDir.of_launch(directory, number).path
        runs.append(launch_once(case, machine, launch_directory, inject=inject, on_progress=on_progress))
        verdict = verdict_on(runs)
        if verdict.outcome != "undecided":
            return runs, verdict


def launch_once(
    case: Case,
    machine: Machine,
    directory: Path,
    *,
    inject: str | None = None,
    on_progress: OnProgress = no_progress,
) -> Run:
    """Launch `case` once in fresh processes and measure it. All its files are in `directory`."""
    framework_of(case).check(case)
    run_dir = RunDir(directory)
    if run_dir.case.exists():
        raise FileError(f"{directory} holds another launch: its reports would be taken for this one's")
    asked = CaseFile(
        case=case,
        device=machine.device,
        peak_flops=machine.peak_flops(case.precision),
        inject=inject,
        metrics=tuple(metric.name for metric in recorded()),
    )
    documents.write(run_dir.case, asked)
    started_at, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    health = sampler(machine, case.topology.processes_per_node)
    try:
        failure = launch(run_dir, case, device=machine.device, on_progress=on_progress, sampler=health)
        duration_s = time.monotonic() - began
    finally:
        seen = health.finish()
    measured = collect(
        run_dir,
        machine,
        started_at=started_at,
        duration_s=duration_s,
        failure=failure,
        health=seen,
    )
    documents.write(run_dir.run, measured)
    return measured
