"""`perfsuite doctor`: check the machine, and show a table or JSON."""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.case.hardware import Machine, hardware_error
from perfsuite.cli.app import command_of
from perfsuite.cli.checks import show
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.doctor.examination import examine
from perfsuite.doctor.machine import why_not
from perfsuite.doctor.rows import EXIT, Row, worst
from perfsuite.errors import CaseError
from perfsuite.launch.lock import machine_lock
from perfsuite.node.machine import detect, detect_cpu
from perfsuite.report.console import console, print_json


@shares("as_json")
def doctor(
    *,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check only the machine, without training. This takes a few seconds."),
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option(
            help="Exit with status 2 if this hardware marker, such as h100, does not select cases here."
        ),
    ] = None,
    shared: Shared,
) -> None:
    """Check whether this machine measures reliably. Run this before the first nightly run on the machine.

    The doctor names the hardware class and the markers that select cases here. It checks torch, the driver,
    permissions and other processes. It trains a small model to compare clocks and memory counters. It
    launches a small case on every device a few times to estimate the noise. The exit status is 1 if a check
    fails. It is 3 if a check has no result, for example while other jobs use the machine.
    """
    machine = expected_machine(expect)
    err = console(stderr=True)
    with contextlib.nullcontext() if quick else machine_lock(err.print):
        rows = examine(
            machine,
            quick=quick,
            load_command=command_of,
            say=lambda text: err.print(f"perfsuite doctor: {text} ..."),
        )
    raise typer.Exit(report(rows, as_json=shared.as_json))


def report(rows: Sequence[Row], *, as_json: bool) -> int:
    """Print rows as a table or as JSON. Return the exit status of the command."""
    if as_json:
        print_json([documents.plain(row) for row in rows])
    else:
        width = max(len(row.check) for row in rows) + 2
        for row in rows:
            show(row, width)
        count = Counter(row.status for row in rows)
        console().print(f"{count['pass']} passed, {count['fail']} failed, {count['unknown']} unknown")
    return EXIT[worst(rows)]


def expected_machine(marker: str | None, *, detect: Callable[[], Machine] = detect) -> Machine:
    """Return this machine. Raises `CaseError` if a marker is given that does not select cases here."""
    if marker is None:
        return detect()
    error = hardware_error(marker)
    if error is not None:
        raise CaseError(f"--expect {marker}: {error}")
    detected = detect_cpu("not checked: --expect cpu") if marker == "cpu" else detect()
    if why_not(detected, marker) is not None:
        note = f"; {detected.note}" if detected.note else ""
        raise CaseError(f"--expect {marker}: this machine is {detected.hardware_class}{note}")
    return detected
