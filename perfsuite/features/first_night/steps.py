"""The steps of a first night, in their order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.cli.app import command_of
from perfsuite.doctor.examination import examine
from perfsuite.doctor.injected import inject_all, small_case
from perfsuite.doctor.injected_counts import inject_structural
from perfsuite.doctor.rows import Row
from perfsuite.features.first_night.cases import Size, spread_case
from perfsuite.features.first_night.environments import container_rows, core_rows
from perfsuite.features.first_night.faults import fault_rows
from perfsuite.features.first_night.frameworks import framework_rows
from perfsuite.features.first_night.night import Night, not_run, why_not
from perfsuite.features.first_night.sessions import CASE_MIN, case_rows
from perfsuite.features.first_night.spread import spread_rows
from perfsuite.features.first_night.topology import nccl_rows, topology_rows
from perfsuite.launch.lock import machine_lock

SIMULATED_MIN = (0.5, 10.0)
SIMULATED_HANG_MIN = (1.0, 10.0)  # with a simulated hang, which only ends at its deadline


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a first night."""

    name: str
    question: str
    # Size -> the estimated minutes on eight GPUs, and the minutes after which the step is stopped. With
    # `inf`, the step is stopped only when the time of the whole night is over.
    minutes: Mapping[Size, tuple[float, float]]
    run: Callable[[Night], Iterator[Row]]
    needs_quiet: bool = True  # whether the step measures, so that nobody else may use the GPUs
    replaces_rows: bool = False  # whether a row replaces an earlier row of the same check


def machine_rows(night: Night, *, examine: Callable[..., list[Row]] = examine) -> Iterator[Row]:
    """Examine the machine: its links, the doctor's checks, and the rate of an all-reduce."""
    directory = night.new_directory("machine")
    yield from topology_rows(night, directory)
    is_quick = night.size == "simulated"
    with machine_lock(night.say):
        rows = examine(night.machine, quick=is_quick, load_command=command_of, say=night.say)
        yield from rows
        yield from nccl_rows(night, directory, row_of(rows, "all_reduce_gb_s"))


def row_of(rows: Sequence[Row], check: str) -> Row | None:
    """Return the row of a check, or None if there is no such row."""
    return next((row for row in rows if row.check == check), None)


def selftest_rows(
    night: Night,
    *,
    inject_all: Callable[[Case, Machine], Iterator[Row]] = inject_all,
    inject_structural: Callable[[Machine], Iterator[Row]] = inject_structural,
) -> Iterator[Row]:
    """Inject every fault into a small case."""
    case = small_case(night.machine)
    if night.size == "simulated":
        case = spread_case(night.machine, night.size)
    reason = why_not(case, night)
    if reason is not None:
        yield not_run("selftest", reason)
        return
    with machine_lock(night.say):
        yield from inject_all(case, night.machine)
        if night.size != "simulated":
            yield from inject_structural(night.machine)


def usual_minutes(full: tuple[float, float], tiny: tuple[float, float]) -> Mapping[Size, tuple[float, float]]:
    """Return the expected minutes and the limit for each size, for a step without a simulated hang."""
    return {"full": full, "tiny": tiny, "simulated": SIMULATED_MIN}


STEPS = (
    Step(
        name="machine",
        question="Are the GPUs, their links and the software healthy and alike?",
        minutes=usual_minutes((6, 12), (3, 12)),
        run=machine_rows,
        needs_quiet=False,
    ),
    Step(
        name="selftest",
        question="Does the gate catch every injected fault?",
        minutes={"full": (14, 20), "tiny": (8, 25), "simulated": SIMULATED_HANG_MIN},
        run=selftest_rows,
    ),
    Step(
        name="spread",
        question="How noisy are the launches of one case, and are its counts steady?",
        minutes=usual_minutes((7, 14), (2, 10)),
        run=spread_rows,
    ),
    Step(
        name="faults",
        question="Does a report name a rank that hangs, crashes or stops? Is the memory free afterwards?",
        minutes={"full": (12, 20), "tiny": (6, 15), "simulated": SIMULATED_HANG_MIN},
        run=fault_rows,
    ),
    Step(
        name="frameworks",
        question="Does each framework train with each kind of parallelism?",
        minutes=usual_minutes((16, 25), (8, 20)),
        run=framework_rows,
    ),
    Step(
        name="container",
        question="Does training work with a container's /dev/shm, and in an image?",
        minutes=usual_minutes((3, 8), (2, 8)),
        run=container_rows,
    ),
    Step(
        name="cores",
        question="How much speed is lost on one socket, or with one thread for each rank?",
        minutes=usual_minutes((7, 14), (3, 10)),
        run=core_rows,
    ),
    Step(
        name="cases",
        question="Which of your cases are steady enough for a baseline?",
        # The user's cases train for real even if the size of the other steps is smaller. `--plan` counts
        # them.
        minutes={size: (minutes, float("inf")) for size, minutes in CASE_MIN.items()},
        run=case_rows,
        replaces_rows=True,
    ),
)
NAMES = tuple(step.name for step in STEPS)
