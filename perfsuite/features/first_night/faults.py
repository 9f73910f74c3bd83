"""Inject faults into one case. Check that each is reported, and that all memory is free afterwards."""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from perfsuite.case.case import Case
from perfsuite.doctor.injected import EXPECTED, SIMULATED_HANG_S, fault_not_reached
from perfsuite.doctor.rows import Row, checked, failed, unknown
from perfsuite.errors import MachineError
from perfsuite.features.first_night.cases import Size, spread_case
from perfsuite.features.first_night.night import LOST_ADVICE, Night, changed, not_run, why_not
from perfsuite.launch.lock import machine_lock
from perfsuite.node.processes import wait_until
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir

FAULTS = ("hang", "crash", "exit", "oom", "missing-rank")
STOPPED = "stop one rank"
STOP_AT_STEP = 5  # the step after which a rank is stopped
# Number of steps of the launch in which a rank is stopped. It is large, so that the launch does not end
# before the rank is stopped.
ENDLESS_STEPS = 2000
FREE_S = 5.0  # seconds after a failed launch within which the GPUs' memory must be free
FAULT_TIMEOUT_S: Mapping[Size, float] = {"full": 300, "tiny": 120, "simulated": 120}
"""Deadline of a launch with a fault. Most faults end the launch much earlier."""


def fault_rows(night: Night) -> Iterator[Row]:
    """Inject several faults, one after the other, into one case.

    Check the reports, the stacks, and that memory is free afterwards.
    """
    directory = night.new_directory("faults")
    case = spread_case(night.machine, night.size)
    reason = why_not(case, night)
    if reason is not None:
        yield not_run("faults", reason)
        return
    case = case.replace(timeout_s=FAULT_TIMEOUT_S[night.size])
    with machine_lock(night.say):
        for fault in FAULTS:
            night.say(f"injecting {fault}")
            launch = RunDir(directory / fault)
            is_simulated_hang = fault == "hang" and night.size == "simulated"
            limited = case.replace(timeout_s=SIMULATED_HANG_S) if is_simulated_hang else case
            launching = replace(night.launching(), inject=fault)
            run = night.launch(limited, night.machine, launch.path, launching)
            # Simulated ranks do not wait for each other, so nobody can tell which one hangs.
            rank = None if is_simulated_hang else case.topology.world_size - 1
            yield _fault_row(
                f"inject {fault}", run, _kind_of(fault), rank, is_reached=launch.injected.exists()
            )
            if fault == "hang" and night.size != "simulated":  # simulated ranks do not wait for each other
                yield stacks_row(launch, case.topology.world_size)
                yield collective_row(run)
            yield from memory_rows(f"memory after {fault}", night)
        if night.size == "simulated":
            yield not_run(STOPPED, "simulated training ends too soon")
            return
        yield from _stopped_rows(case, night, RunDir(directory / "stopped"))


def _kind_of(fault: str) -> str:
    """Return the kind of failure that the self-test expects for a fault."""
    return next(str(expected.failure) for expected in EXPECTED if expected.inject == fault)


def _fault_row(check: str, run: Run, kind: str, rank: int | None, *, is_reached: bool) -> Row:
    """Check that a launch failed as expected, and that the report names the rank that is to blame.

    If the launch ended before the fault occurred, the result is unknown.
    """
    observed = "no failure was noticed"
    if run.failure is not None:
        observed = f"{run.failure.kind}: {run.failure.message}"
    if not is_reached:
        return fault_not_reached(check, observed)
    expected = kind if rank is None else f"{kind} of rank {rank}"
    if run.failure is None:
        return failed(check, observed, f"expected {expected}")
    is_named = rank is None or _names(run.failure, rank)
    return checked(check, observed, ok=run.failure.kind == kind and is_named, advice=f"expected {expected}")


def _names(failure: Failure, rank: int) -> bool:
    """Return whether a failure belongs to this rank, or has a message that names this rank."""
    return failure.rank == rank or re.search(rf"\brank {rank}\b", failure.message) is not None


def collective_row(run: Run) -> Row:
    """Check that the report of a hang names the collective that a rank has not called."""
    said = "" if run.failure is None else run.failure.message
    named = re.search(r"has not called [^;]*?(?=, in which|$)", said)
    observed = "the report names none" if named is None else named[0]
    advice = "without the collective, a hang is hard to explain: does torch's flight recorder work here?"
    return checked("collective of the hang", observed, ok=named is not None, advice=advice)


def stacks_row(launch: RunDir, ranks: int) -> Row:
    """Check that all ranks wrote their stacks when a launch hung."""
    written = {rank for rank, _, file in launch.all_stacks() if rank is not None and file.stat().st_size}
    observed = f"{len(written)} of {ranks} ranks wrote their stack"
    advice = f"it is unknown where the other ranks hang: see {launch.path}"
    return checked("stacks of the hang", observed, ok=len(written) == ranks, advice=advice)


def memory_rows(check: str, night: Night, *, free_s: float = FREE_S) -> Iterator[Row]:
    """Check that the memory of the GPUs is free within `free_s` seconds after a failed launch."""
    if night.machine.device == "cpu":
        return
    users: list[str] = []

    def is_free() -> bool:
        users[:] = night.see_gpus(night.machine.devices)
        return not users

    try:
        is_clean = wait_until(is_free, free_s)
        loss = changed(night)
    except MachineError as error:
        yield unknown(check, str(error))
        return
    if loss is not None:
        yield failed(check, loss, LOST_ADVICE)
        return
    observed = "; ".join(users) or f"free within {free_s:.0f} s"
    yield checked(check, observed, ok=is_clean, advice="these processes would disturb the next launch")


def _stopped_rows(case: Case, night: Night, launch: RunDir) -> Iterator[Row]:
    """Stop the last rank with SIGSTOP while it trains.

    The launch must be reported as a hang, and must leave no process on the GPUs.
    """
    night.say(STOPPED)
    last = case.topology.world_size - 1
    stopped: list[int] = []

    def stop(steps: int, tokens: int) -> None:
        pids = [pid for rank, pid, _ in launch.all_stacks() if rank == last]
        if steps >= STOP_AT_STEP and pids and not stopped:
            with suppress(ProcessLookupError):
                os.kill(pids[-1], signal.SIGSTOP)
                stopped.append(pids[-1])

    launching = replace(night.launching(), on_progress=stop)
    run = night.launch(case.replace(steps=ENDLESS_STEPS), night.machine, launch.path, launching)
    if not stopped:
        why = run.failure.message if run.failure else "the launch ended first"
        yield not_run(STOPPED, f"no rank could be stopped: {why}")
        return
    yield _fault_row(STOPPED, run, "timeout", last, is_reached=True)
    yield from memory_rows("memory after the stop", night)
