"""Run steps one after another, even after a failed step, unless the failure makes launches impossible."""

import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from perfsuite import documents
from perfsuite.doctor.rows import Row, failed
from perfsuite.errors import MachineError, PerfsuiteError, error_text
from perfsuite.features.first_night.night import FOLDER, LOST_ADVICE, NOT_REACHED, Night, changed, not_run
from perfsuite.features.first_night.page import is_not_run
from perfsuite.features.first_night.record import FirstNight, StepResult
from perfsuite.features.first_night.steps import Step

BLOCKING = ("NVML", "torch", "torch and GPUs", "extensions")
"""Checks of the step `machine`. If one of these checks fails, launches are impossible."""
LEAST_S = 30.0  # a step does not begin if less time is left
ENDED_BY = (signal.SIGTERM, signal.SIGHUP)  # sent when a scheduler ends a job, or a connection ends


class TimeUp(BaseException):
    """Ends a step when its time is over. Like `KeyboardInterrupt`, it is not an `Exception`.

    So `except Exception` does not catch it.
    """


@dataclass(frozen=True, kw_only=True)
class Running:
    """How to run steps: the functions to call with each row and with each new record, and the clock."""

    save: Callable[[FirstNight], None]
    show: Callable[[Step, Row], None]
    until: float = float("inf")  # the time on `clock` at which the first night must end
    clock: Callable[[], float] = time.monotonic
    problem: Callable[[Night, Step], Row | None] = lambda night, step: machine_problem(night, step)


def run_steps(night: Night, record: FirstNight, steps: Sequence[Step], how: Running) -> FirstNight:
    """Run steps, and save the record after each row, so that no row is lost if this process is killed."""
    for step in steps:
        record = _run(night, record, step, how)
    return record


def _run(night: Night, record: FirstNight, step: Step, how: Running) -> FirstNight:
    rows: list[Row] = []
    began = how.clock()
    is_complete = False

    def saved() -> FirstNight:
        seconds = how.clock() - began
        result = StepResult(step=step.name, seconds=seconds, is_complete=is_complete, rows=tuple(rows))
        with_this = record.with_result(result)
        how.save(with_this)
        return with_this

    def add(row: Row) -> None:
        if step.replaces_rows:
            rows[:] = [earlier for earlier in rows if earlier.check != row.check]
        rows.append(row)
        how.show(step, row)
        saved()

    refusal = _refusal(night, record, step, how)
    if refusal is not None and _has_result(record, step):
        how.show(step, refusal)
        return record
    if refusal is not None:
        add(refusal)
        return saved()
    limit_s = min(60 * step.minutes[night.size][1], how.until - how.clock())
    end = how.clock() + limit_s
    earlier = record.of(step.name)
    is_continued = earlier is None or not earlier.is_complete
    step_night = replace(night, left_s=lambda: end - how.clock(), is_continued=is_continued)
    try:
        with time_limit(limit_s):
            for row in step.run(step_night):
                add(row)
        is_complete = not (_broken(rows) or any(row.found.startswith(NOT_REACHED) for row in rows))
    except TimeUp:
        add(not_run("the rest", f"the step was stopped after its limit of {limit_s / 60:.0f} min"))
    except PerfsuiteError as error:
        add(failed(step.name, str(error)))
    except Exception as error:
        file = night.out / FOLDER / f"{step.name}-traceback.txt"
        documents.write_text(file, traceback.format_exc())
        add(failed(step.name, error_text(error), f"its traceback is in {file}"))
    except BaseException:  # Ctrl-C, or the end of the job
        add(not_run("the rest", "the step was interrupted", "run the same command again to continue with it"))
        raise
    return saved()


def _has_result(record: FirstNight, step: Step) -> bool:
    """Return whether any check of a step ran earlier."""
    earlier = record.of(step.name)
    return earlier is not None and not all(map(is_not_run, earlier.rows))


def _refusal(night: Night, record: FirstNight, step: Step, how: Running) -> Row | None:
    """Return a row with the reason why a step cannot run now, or None.

    The function can take time, because it waits for other users of the GPUs.
    """
    used_up = not_run(
        step.name, "the time is used up", "run the same command again to continue with this step"
    )
    left_s = how.until - how.clock()
    if left_s < LEAST_S:
        return used_up
    machine = record.of("machine")
    if step.name != "machine" and machine is not None:
        broken = _broken(machine.rows)
        if broken:
            advice = "repair it, then run the same command again to continue"
            return not_run(step.name, f"the check {broken[0]!r} failed in the step `machine`", advice)
    problem = how.problem(replace(night, wait_quiet_s=min(night.wait_quiet_s, left_s)), step)
    if problem is not None:
        return problem
    return used_up if how.until - how.clock() < LEAST_S else None


def _broken(rows: Sequence[Row]) -> list[str]:
    """Return those failed checks of the step `machine` that make launches impossible."""
    return [row.check for row in rows if row.check in BLOCKING and row.status == "fail"]


def machine_problem(night: Night, step: Step) -> Row | None:
    """Return a row if GPUs are lost, or if other users of the GPUs do not stop in time, else None."""
    if night.machine.device == "cpu":
        return None
    try:
        return _gpu_problem(night, step)
    except MachineError as error:
        return not_run(step.name, str(error))


def _gpu_problem(night: Night, step: Step) -> Row | None:
    machine = night.machine
    reason = changed(night)
    if reason is not None:
        return not_run(step.name, reason, LOST_ADVICE)
    if not step.needs_quiet:
        return None
    neighbours = night.neighbours()
    users = neighbours.look(machine, machine.devices)
    if not users or (night.wait_quiet_s and neighbours.wait(machine, machine.devices)):
        return None
    users = neighbours.look(machine, machine.devices) or users
    return not_run(step.name, "; ".join(users), _instead(users, machine.devices))


def _instead(users: Sequence[str], devices: int) -> str:
    """Return the advice to end other processes, or to use only the idle GPUs."""
    busy = {int(number) for number in re.findall(r"of GPU (\d+) ", " ".join(users))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [*map(str, range(devices))] if visible is None else [name.strip() for name in visible.split(",")]
    idle = [name for number, name in enumerate(names[:devices]) if number not in busy]
    advice = (
        "end these processes or wait until they end, then run the same command again to continue with this "
        "step"
    )
    if not idle:
        return advice
    return (
        f"{advice}. To use only the idle GPUs, set CUDA_VISIBLE_DEVICES={','.join(idle)} and give "
        "another --out, because the present --out has results from a different number of GPUs"
    )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in the block after this many seconds. Works only in the main thread."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0 if seconds == float("inf") else max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ends_with_results() -> Iterator[None]:
    """Turn the signals that end a job into exceptions in the block, so that the results are written.

    A signal that is ignored stays ignored. For example, `nohup` ignores SIGHUP, so that a job survives the
    end of its connection.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heeded = [number for number in ENDED_BY if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
