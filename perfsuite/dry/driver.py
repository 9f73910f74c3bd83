"""Run a case dry, each rank in a separate process, and combine the counts into a `Run`. Nothing is timed."""

import os
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

from perfsuite import documents
from perfsuite.analysis.agreement import hidden_in_ranks, tokens_given
from perfsuite.analysis.cause import with_log
from perfsuite.analysis.figures import is_in_tf32
from perfsuite.analysis.step_time.expected import expected
from perfsuite.case.case import Case, CaseFile
from perfsuite.case.hardware import Machine
from perfsuite.dry.fit import facts_of
from perfsuite.dry.machine import (
    OF_ONE_DEVICE,
    RANKS_MEET,
    Device,
    pretended,
    pretended_gpu,
    telling_ranks,
    why_not_dry,
)
from perfsuite.errors import CaseError, DryRunError, FileError, PredictionError
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.arm import HERE, Arm, ask
from perfsuite.node.processes import KILL_S, has_ended, wait_for, wait_until
from perfsuite.node.ranks import moved_variables, rank_variables, without_rank
from perfsuite.results import device_log_file
from perfsuite.results.counts import merged
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.rank_report import Failure, FailureKind, RankReport, summed_dtypes
from perfsuite.results.run import Figures, Run
from perfsuite.results.run_dir import ANCESTOR_PID, NODE, RunDir

NO_TF32_ROOFLINE = (
    "the maximum speed is unknown: this case multiplies fp32 matrices in TF32, "
    "and only the peak for fp32 is known"
)
NO_BF16_ROOFLINE = (
    "the maximum speed is unknown: this GPU emulates bf16, and no datasheet gives the peak of this emulation"
)
TIMEOUT_S = 3600  # seconds after which a rank's process is killed


def dry_run(
    case: Case,
    directory: Path,
    *,
    ranks: Sequence[int] | None = None,
    device: Device | None = None,
    gpu: str | None = None,
    arm: Arm = HERE,
    stop: Event | None = None,
    counted_steps: int = 1,
    interconnect: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Run:
    """Run the given ranks of `case` dry, one after another, each in its own process.

    By default, `ranks` are the first rank and, if ranks differ by design, the last (`telling_ranks`). `gpu`
    is the product to simulate, by default the one that the case is meant for. `arm` is the environment of the
    processes. Setting `stop` kills the running process. `counted_steps` consecutive steps are counted.
    `interconnect` is the network of the machines (`Machine.interconnect`), if it is known. `directory` has
    the same layout as for a launch. If a process fails, the failure is in `Run.failure`. A process that takes
    longer than `timeout_s` is killed.

    Raises `DryRunError` if the case cannot be run dry, and `CaseError` if its framework refuses the case.
    """
    machine, instead = pretended(case, device if gpu is None else "cuda")
    if gpu is not None:
        machine = pretended_gpu(gpu, case.topology)
    machine = machine.replace(interconnect=interconnect)
    _check(case, ranks or (), machine)
    chosen = telling_ranks(case) if ranks is None else tuple(ranks)
    run_dir = RunDir(directory)
    documents.write(run_dir.case, CaseFile(case=case, device=machine.device, counted_steps=counted_steps))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    began = time.monotonic()
    reports = [_report(run_dir, case, machine, rank, arm, stop or Event(), timeout_s) for rank in chosen]
    hidden = hidden_in_ranks(reports)
    counts = {report.rank: report.counts for report in reports if report.counts is not None}
    run = Run(
        case=case,
        machine=machine,
        dry=True,
        started_at=started_at,
        duration_s=round(time.monotonic() - began, 3),
        flops=reports[0].flops,
        observed=reports[0].observed,
        dtypes=summed_dtypes(report.dtypes for report in reports),
        figures=Figures(tokens_given=tokens_given(reports, case)),
        counts=() if hidden else merged(counts),
        hidden=hidden,
        dry_facts=_with_expected(facts_of(reports, case, machine), reports, run_dir, case, machine),
        notes=tuple(dict.fromkeys(filter(None, (instead, *(n for report in reports for n in report.notes))))),
        failure=next((report.failure for report in reports if report.failure is not None), None),
    )
    run = _without_unknown_speeds(run)
    documents.write(run_dir.run, run)
    return run


def _check(case: Case, ranks: Sequence[int], machine: Machine) -> None:
    """Raise an error if one of the ranks does not exist, or if the case cannot run dry."""
    last = case.topology.world_size - 1
    for rank in ranks:
        if not 0 <= rank <= last:
            has = f"ranks 0 to {last}" if last else "only rank 0"
            raise DryRunError(f"rank {rank} does not exist: {case.id} has {has}")
    reason = why_not_dry(case, machine)
    if reason is not None:
        raise DryRunError(f"{case.id}: {reason}")
    framework_of(case).check(case)


def _without_unknown_speeds(run: Run) -> Run:
    """Remove predictions that would need an unknown peak speed, and add a note about each reason."""
    if run.dry_facts is not None and is_in_tf32(run):
        unknown = run.dry_facts.replace(roofline=None, expected=None, no_expected=NO_TF32_ROOFLINE)
        run = run.replace(dry_facts=unknown, notes=(*run.notes, NO_TF32_ROOFLINE))
    if run.machine.emulates(run.case.precision):
        run = run.replace(notes=(*run.notes, NO_BF16_ROOFLINE))
    return run


def _with_expected(
    facts: DryFacts, reports: Sequence[RankReport], run_dir: RunDir, case: Case, machine: Machine
) -> DryFacts:
    """Add the expected time of the slowest rank, or the reason why it is unknown."""
    if machine.device == "cpu":
        return facts
    try:
        of_ranks = []
        for report in reports:
            if report.counts is not None:
                log = device_log_file.read(run_dir.device_log(report.rank))
                of_ranks.append(expected(log, report.counts, case, machine, report.tokens_per_step))
    except (PredictionError, FileError) as error:
        return facts.replace(no_expected=str(error))
    return facts.replace(expected=max(of_ranks, key=lambda of_rank: of_rank.step_s, default=None))


def why_no_cuda(arm: Arm) -> str | None:
    """Return why CUDA cannot be faked for the torch of `arm`, or None. Runs the arm's interpreter."""
    try:
        said = ask(arm, "from perfsuite.dry import guard; print(guard.why_not() or 'it can be')")
    except CaseError as error:
        return str(error)
    return None if said == "it can be" else said


def _report(
    run_dir: RunDir, case: Case, machine: Machine, rank: int, arm: Arm, stop: Event, timeout_s: float
) -> RankReport:
    """Run one rank and return its report. If the rank wrote no report, return one with the failure."""
    command = [arm.python, "-m", "perfsuite.dry", str(run_dir.path.resolve()), "--rank", str(rank)]
    command += ["--gpu", machine.device_name] if machine.device == "cuda" else []
    with run_dir.rank_log(rank).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**_environment(case, rank, arm), **arm.variables},
            cwd=arm.directory,
            start_new_session=True,
        )
        try:
            wait_until(lambda: has_ended(process) or stop.is_set(), timeout_s)
            code = process.returncode if has_ended(process) else None
        finally:
            process.kill()
            wait_for(process, KILL_S)
    try:
        return documents.read(run_dir.rank(rank), RankReport)
    except FileError:
        kind: FailureKind = "crash"
        ended = f"the process ended with exit code {code}"
        if code is None and stop.is_set():
            kind = "cancelled"
            ended = "the dry run was stopped"
        elif code is None:
            kind = "timeout"
            ended = f"killed after {timeout_s} s"
        failure = with_log(Failure(kind=kind, message=f"no report: {ended}", rank=rank), run_dir)
    world_size = case.topology.world_size
    return RankReport(rank=rank, world_size=world_size, host="", clock="none", failure=failure)


def _environment(case: Case, rank: int, arm: Arm) -> dict[str, str]:
    """Return the environment of a rank. A script gets the same launcher variables as in a launch."""
    topology = case.topology
    plan = framework_of(case).plan(case)
    variables = {**rank_variables(topology, rank), **RANKS_MEET, **OF_ONE_DEVICE}
    if plan.command is not None and plan.command.starts_ranks:
        variables = RANKS_MEET if topology.nodes > 1 else {}
    elif plan.command is not None and topology.world_size == 1:
        variables = {}
    return {
        **without_rank(os.environ),
        ANCESTOR_PID: str(os.getpid()),
        NODE: str(rank // topology.processes_per_node),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
        **moved_variables(plan.environment, arm.variables),
    }
