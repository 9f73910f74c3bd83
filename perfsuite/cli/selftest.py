"""`perfsuite selftest`: check that the gate catches every fault.

Faults that change the work of a step must be found in its counts.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.cli.checks import show
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.doctor.injected import inject_all, small_case
from perfsuite.doctor.injected_counts import inject_structural
from perfsuite.doctor.rows import EXIT, Row, worst
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.lock import machine_lock
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.node.machine import detect
from perfsuite.report.console import console, print_json

WIDTH = 40  # width of the column with the names of faults
ANSWERS = {
    "pass": ("every fault was caught, and a clean run passed", "green"),
    "fail": ("the gate missed a fault or failed a clean run: do not trust its verdicts here", "red"),
    "unknown": ("part of the gate could not be tested: see the reasons above", "yellow"),
}


@shares("as_json")
def selftest(
    *,
    framework: Annotated[
        str,
        typer.Option(
            help="Framework of the case: `ddp` trains for real; `fake` only simulates training, and is fast."
        ),
    ] = "ddp",
    shared: Shared,
) -> None:
    """Inject each fault into a small case; check that every fault is caught, and that a clean run passes.

    If the framework trains for real, such as `ddp`, faults that change the work of a step are injected as
    well, each in one launch. These faults must be found in the counts of the step.

    The exit status is 1 if a check fails. It is 3 if part of the gate could not be tested, because the
    machine was too unhealthy or something is missing.
    """
    machine = detect()
    case = small_case(machine).replace(framework=framework)
    refuse_unrunnable(case, machine)
    with machine_lock(console(stderr=True).print):
        status = report(chain(*injections(case, machine)), as_json=shared.as_json)
    raise typer.Exit(status)


def refuse_unrunnable(case: Case, machine: Machine) -> None:
    """Raise `CaseError` if the case of the self-test cannot run on this machine."""
    reason = unsupported(case, machine) or wrong_torch(case, machine)
    if reason is not None:
        raise CaseError(f"the self-test cannot run here: {reason}")


def injections(case: Case, machine: Machine) -> list[Iterator[Row]]:
    """Return the rows of the faults of a case. A fault is injected when its row is read."""
    injected = [inject_all(case, machine)]
    if framework_of(case).plan(case).needs_torch:
        injected.append(inject_structural(machine))
    return injected


def report(rows: Iterable[Row], *, as_json: bool) -> int:
    """Print each row as soon as it is known, and then the answer. Return the exit status of the command.

    As JSON, all rows are printed at the end, without an answer.
    """
    known = []
    for row in rows:
        known.append(row)
        if not as_json:
            show(row, WIDTH)
    if as_json:
        print_json([documents.plain(row) for row in known])
    else:
        answer, style = ANSWERS[worst(known)]
        console().print(answer, style=style)
    return EXIT[worst(known)]
