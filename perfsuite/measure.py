"""Launch a case until its verdict is decided. Read this module first.

    case --case.json--> agent --> one worker per rank --rank-N.json--> collect --> run.json --> judge
      ^                                                                                           |
      +------------------- undecided: one more launch, in fresh processes ------------------------+

Before the first launch, a session (`perfsuite.session`) looks for the baseline. If there is none, the session
records one afterwards.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from perfsuite import documents
from perfsuite.analysis.collect import collect, collect_profile
from perfsuite.analysis.health import is_shared, machine_problems
from perfsuite.case.case import Case, CaseFile
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError, ReportError
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.arm import HERE, Arm
from perfsuite.launch.base import Launcher
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.quiet import Neighbours
from perfsuite.results.metric import recorded
from perfsuite.results.outcome import Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.verdict.exact import check
from perfsuite.verdict.judge import judge
from perfsuite.verdict.overall import Reference

WhenShared = Literal["wait", "again", "stop"]
"""What to do after a launch during which others used the machine: `wait` until they are quiet, launch `again`
immediately, or `stop` and show the measurement."""


@dataclass(frozen=True, kw_only=True)
class Launching:
    """How to launch cases. None of this depends on the case."""

    # Starts the processes; by default on this machine.
    launcher: Launcher = field(default_factory=LocalLauncher)
    arm: Arm = HERE  # the environment of the processes
    inject: str | None = None  # a fault to inject
    counts: bool = True  # whether to count the work of a step
    counted_steps: int | None = None  # see `CaseFile`
    neighbours: Neighbours | None = None  # reports other users, and can wait until they are quiet
    when_shared: WhenShared = "again"
    # Returns whether there is time for another launch, given the case and the seconds of its longest launch.
    has_time: Callable[[Case, float], bool] = lambda case, longest_s: True
    # Called before each launch, with the case and the number of the launch (from 1).
    on_launch: Callable[[Case, int], None] = lambda case, number: None
    on_progress: OnProgress = no_progress


USUAL = Launching()


def measure(
    case: Case,
    machine: Machine,
    directory: Path,
    reference: Reference,
    how: Launching = USUAL,
    *,
    runs: list[Run] | None = None,
) -> tuple[list[Run], Verdict]:
    """Launch `case` until its verdict is decided. Returns the launches and the verdict (never `undecided`).

    If there is no time for another launch, the verdict is based on the launches so far.

    `runs` contains the launches that were made before the call. They are judged first. Each new launch is
    appended to this list, so the caller has all launches even if an error or an interrupt ends the function.
    """
    made: list[Run] = [] if runs is None else runs

    def launch() -> bool:
        number = len(made) + 1
        launch_directory = RunDir.of_launch(directory, number).path
        run, was_shared = launch_watched(case, machine, launch_directory, number, how)
        made.append(run)
        return was_shared

    def verdict_so_far(max_unhealthy: int = reference.policy.max_unhealthy) -> Verdict:
        policy = replace(reference.policy, max_unhealthy=max_unhealthy)
        if not how.has_time(case, max(run.duration_s for run in made)):
            policy = replace(policy, max_launches=len(made))
        return judge(made, reference.baseline, reference.noise, policy, reference.tonight)

    def is_machine_free() -> bool:
        return is_free(made[-1], how)

    verdict = verdict_so_far() if made else None
    if verdict is None or verdict.outcome == "undecided":
        verdict = until_decided(launch, verdict_so_far, is_machine_free)
    if needs_another(case, made, verdict, reference):
        verdict = until_decided(launch, verdict_so_far, is_machine_free)
    return made, verdict


def until_decided(
    launch: Callable[[], bool], judge: Callable[..., Verdict], is_free: Callable[[], bool]
) -> Verdict:
    """Launch until the verdict on all launches so far is decided. Return the verdict (never `undecided`).

    - `launch` makes one launch or a pair of launches, and returns whether others used the machine meanwhile.
    - `judge` judges all launches so far. It accepts `max_unhealthy`, which is explained in `Policy`.
    - `is_free` returns whether to launch again after others used the machine. It can first wait until they
      are quiet.
    """
    while True:
        was_shared = launch()
        verdict = judge()
        if verdict.outcome == "undecided" and was_shared and not is_free():
            # While others use the machine, more launches do not help, so one unhealthy launch can be enough
            # for the verdict `unhealthy`.
            verdict = judge(max_unhealthy=1)
        if verdict.outcome != "undecided":
            return verdict


def needs_another(case: Case, runs: list[Run], verdict: Verdict, reference: Reference) -> bool:
    """Return whether a second launch is needed because counts of a user's program differ from the baseline.

    A single launch does not show whether the program changed, because the program's data can vary between
    launches.
    """
    is_script = framework_of(case).plan(case).command is not None
    if not is_script or verdict.outcome == "failed" or len(runs) > 1 or reference.policy.most == 1:
        return False
    count_check = check(runs, reference.counts)
    return count_check is not None and count_check.outcome in ("regressed", "improved")


def launch_watched(
    case: Case, machine: Machine, directory: Path, number: int, how: Launching
) -> tuple[Run, bool]:
    """Launch `case` once, as launch `number`. Returns the run, and whether others used the machine.

    Other users are reported immediately, and in a note of the run. The caller can wait until they are quiet.
    """
    how.on_launch(case, number)
    if how.neighbours is not None:
        how.neighbours.launch_begins(machine)
    run = launch_once(case, machine, directory, how)
    if how.neighbours is None or run.failure is not None or not is_shared(run.health, machine):
        return run, False
    seen = how.neighbours.during_launch(run.machine, run.case.topology.processes_per_node)
    why = "; ".join(machine_problems(run.health, run.machine))
    how.neighbours.say(f"launch {number} of {run.case.id} is set aside: {why}; seen: {seen}")
    return run.replace(notes=(*run.notes, f"seen during launch {number}: {seen}")), True


def is_free(run: Run, how: Launching) -> bool:
    """Return whether to launch again after a disturbed launch. If `when_shared` is `wait`, first wait."""
    if how.when_shared == "wait" and how.neighbours is not None:
        return how.neighbours.wait(run.machine, run.case.topology.processes_per_node)
    return how.when_shared == "again"


def launch_once(case: Case, machine: Machine, directory: Path, how: Launching = USUAL) -> Run:
    """Launch `case` once in fresh processes, and collect the measurements of its ranks.

    All files of the launch are in `directory`. If a rank fails, no error is raised, and the failure is in the
    field `failure` of the run. Raises `CaseError` if the framework refuses the case, and `FileError` if
    `directory` already contains a launch.
    """
    extra = recorded()
    request = CaseFile(
        case=case,
        device=machine.device,
        peak_flops=machine.peak_flops(case.precision),
        inject=how.inject,
        counts=how.counts,
        counted_steps=how.counted_steps,
        metrics=tuple(metric.name for metric in extra.metrics),
    )
    run_dir = RunDir(directory)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    began = time.monotonic()
    failure = _launch(request, machine, run_dir, how)
    duration_s = time.monotonic() - began
    run = collect(run_dir, machine, started_at=started_at, duration_s=duration_s, failure=failure)
    run = run.replace(notes=(*run.notes, *extra.problems))
    try:
        documents.write(run_dir.run, run)
    except FileError as error:  # the measurement can still be shown
        run = run.replace(notes=(*run.notes, str(error)))
    return run


def profile_once(case: Case, machine: Machine, directory: Path, how: Launching = USUAL) -> TakenProfile:
    """Launch `case` once more to profile a few of its steps. The arguments are those of `launch_once`.

    The launch ends when these steps have been recorded, and is not judged. A failure is part of the result.
    """
    run_dir = RunDir(directory)
    request = CaseFile(case=case, device=machine.device, inject=how.inject, counts=False, profile=True)
    try:
        failure = _launch(request, machine, run_dir, replace(how, on_progress=no_progress))
        profile = collect_profile(run_dir, failure)
    except (FileError, ReportError) as error:
        return TakenProfile(why_none=str(error))
    traces = tuple(str(run_dir.trace(rank)) for rank in range(case.topology.world_size))
    return TakenProfile(profile=profile, traces=traces)


def _launch(request: CaseFile, machine: Machine, run_dir: RunDir, how: Launching) -> Failure | None:
    """Launch the case of `request`. Raises `CaseError` and `FileError` like `launch_once`."""
    framework_of(request.case).check(request.case)
    if run_dir.case.exists():
        raise FileError(
            f"{run_dir.path} contains another launch, whose reports would be mistaken for the new ones. "
            "Give an empty directory."
        )
    documents.write(run_dir.case, request)
    job = Job(
        run_dir=run_dir,
        case=request.case,
        machine=machine,
        python=how.arm.python,
        variables=how.arm.variables,
        directory=how.arm.directory,
    )
    try:
        return how.launcher.launch(job, how.on_progress)
    finally:
        shutil.rmtree(run_dir.checkpoints, ignore_errors=True)
