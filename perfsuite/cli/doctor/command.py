"""`perfsuite doctor`: check the machine, and show a table or JSON. The last checks are some launches."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.case.hardware import Machine, hardware_error
from perfsuite.cli.cases import RowsAsJson
from perfsuite.cli.checks import EXIT, Row, show, worst
from perfsuite.cli.doctor import gpus, machine, torch
from perfsuite.cli.doctor.launches import launch_rows
from perfsuite.errors import CaseError
from perfsuite.launch.lock import machine_lock
from perfsuite.node.machine import detect, detect_cpu
from perfsuite.report.console import console, print_json


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="look at the machine only: no training, some seconds")
    ] = False,
    expect: Annotated[
        str | None, typer.Option(help="a marker, such as h100: exit status 2 unless it selects cases here")
    ] = None,
    as_json: RowsAsJson = False,
) -> None:
    """What machine is this, and does it measure truly? Run it before the first night here.

    Names the hardware class and the markers that select cases here. Looks at torch, driver, permissions and
    other processes; trains a small model to compare clocks and memory counters; then makes some launches on
    every device for their noise. Exit status 1 if a check fails; 3 if one cannot tell, as while others use
    the machine.
    """
    expected = _expected(expect)
    err = console(stderr=True)
    with contextlib.nullcontext() if quick else machine_lock(err.print):
        rows = examine(expected, quick=quick, say=lambda text: err.print(f"perfsuite doctor: {text} ..."))
    if as_json:
        print_json([documents.plain(row) for row in rows])
    else:
        width = max(len(row.check) for row in rows) + 2
        for row in rows:
            show(row, width)
        count = Counter(row.status for row in rows)
        console().print(f"{count['pass']} passed, {count['fail']} failed, {count['unknown']} unknown")
    raise typer.Exit(EXIT[worst(rows)])


def _expected(marker: str | None) -> Machine:
    if marker is None:
        return detect()
    error = hardware_error(marker)
    if error is not None:
        raise CaseError(f"--expect {marker}: {error}")
    found = detect_cpu("not looked at: --expect cpu") if marker == "cpu" else detect()
    reason = machine.why_not(found, marker)
    if reason is not None:
        raise CaseError(f"no {marker} here: {reason}" + (f"; {found.note}" if found.note else ""))
    return found


def examine(found: Machine, *, quick: bool, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Run all checks of a machine, which can take minutes. `say` is called to report progress."""
    rows = [
        *machine.machine_rows(found),
        *machine.system_rows(found),
        *gpus.gpu_rows(found),
        machine.neighbours_row(found),
        machine.extensions_row(),
    ]
    say("importing torch" if quick else "training a small model in one process, bare and under the clock")
    probed = torch.probe(found, quick=quick)
    if isinstance(probed, Row):
        return [*rows, probed]
    rows += torch.torch_rows(probed, found)
    if probed.memory is not None and probed.clock is not None:
        rows += [torch.memory_row(probed.memory, probed.expected_peak), *torch.clock_rows(probed.clock)]
    broken = {row.check for row in rows if row.status == "fail"}
    if not quick and not broken & {"torch and GPUs", "extensions"}:  # these failures prevent launches
        rows += launch_rows(found, say)
    return rows
