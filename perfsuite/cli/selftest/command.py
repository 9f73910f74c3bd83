"""`perfsuite selftest`: checks that the gate catches every fault. Nightly jobs run it first."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from perfsuite.cli.checks import Row, end, show, worst
from perfsuite.cli.selftest.faults import inject_all, small_case
from perfsuite.cli.selftest.structure import inject_structural
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.lock import machine_lock
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.node.machine import detect
from perfsuite.report.terminal import console

WIDTH = 40
"""Columns of the name of a fault."""
ANSWERS = {
    "pass": ("every fault was caught, and a clean run was not", "green"),
    "fail": ("the gate does not catch what it must: do not trust its verdicts here", "red"),
    "unknown": ("part of the gate could not be tried: see the reasons above", "yellow"),
}


def selftest(
    framework: Annotated[
        str, typer.Option(help="What to inject the faults into: ddp trains for real, fake takes a moment.")
    ] = "ddp",
) -> None:
    """Inject every fault into a small case and see that each is caught, and a clean run is not.

    Faults that change what a step does are found by its counts, in one launch each: with `--framework=ddp`
    and others that train.

    Exit status 1 if it is otherwise; 3 if some of it could not be tried: the machine was too unhealthy, or
    something is missing.
    """
    machine, out = detect(), console()
    case = small_case(machine).replace(framework=framework)
    if (reason := unsupported(case, machine) or wrong_torch(case, machine)) is not None:
        raise CaseError(f"the self-test cannot run here: {reason}")
    rows: list[Row] = []
    with machine_lock(out.print):
        tried = [inject_all(case, machine)]
        if framework_of(case).plan(case).needs_torch:
            tried.append(inject_structural(machine))
        for row in chain(*tried):
            show(row, WIDTH)
            rows.append(row)
    answer, style = ANSWERS[worst(rows)]
    out.print(answer, style=style)
    end(rows)
