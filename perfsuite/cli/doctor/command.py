"""`perfsuite doctor`: checks the machine, and shows a table or JSON. The last checks are some launches."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.case.hardware import Machine, hardware_error
from perfsuite.cli.cases import RowsAsJson
from perfsuite.cli.checks import EXIT, Row, checked, failed, passed, show, unknown, worst
from perfsuite.cli.doctor import gpus, machine, torch
from perfsuite.cli.doctor.gpus import device_rows
from perfsuite.cli.selftest import small_case
from perfsuite.errors import CaseError
from perfsuite.launch.lock import machine_lock
from perfsuite.measure import Launching, measure
from perfsuite.node.machine import detect, detect_cpu
from perfsuite.report.terminal import console, print_json
from perfsuite.report.text import plural
from perfsuite.results import baseline
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import Run
from perfsuite.results.run_dir import launches_in
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.overall import Reference
from perfsuite.verdict.sequential import Noise, minimum_detectable_drop


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
    found, err = _expected(expect), console(stderr=True)
    with contextlib.nullcontext() if quick else machine_lock(err.print):
        rows = examine(found, quick=quick, say=lambda text: err.print(f"perfsuite doctor: {text} ..."))
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
    if (error := hardware_error(marker)) is not None:
        raise CaseError(f"--expect {marker}: {error}")
    found = detect_cpu("not looked at: --expect cpu") if marker == "cpu" else detect()
    if (reason := machine.why_not(found, marker)) is not None:
        raise CaseError(f"no {marker} here: {reason}" + (f"; {found.note}" if found.note else ""))
    return found


def examine(found: Machine, *, quick: bool, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Run all checks of a machine. `say` is called with what is being done now: it may take minutes."""
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
    if not quick and not broken & {"torch and GPUs", "extensions"}:  # with these, no launch is measured
        rows += launch_rows(found, say)
    return rows


LAUNCHES = 5  # launches from which the noise is estimated
REVIEWED_LAUNCHES, REVIEWED_DEGREES = 10, 30
"""Launches of a usual reviewed baseline, and degrees of freedom of the noise that a few of them give."""


def launch_rows(machine: Machine, say: Callable[[str], None]) -> list[Row]:
    """Launch a small case on every device a few times: rates, health, noise, and what the gate can find."""
    case = small_case(machine)
    reference = Reference(policy=Policy(record_launches=LAUNCHES))
    launching = Launching(on_launch=lambda case, number: say(f"launch {number} of {case.id}"))
    with tempfile.TemporaryDirectory(prefix="perfsuite-doctor-") as directory:
        runs, verdict = measure(case, machine, Path(directory), reference, launching)
        files = [file for launch in launches_in(Path(directory)) for file in launch.all_ranks()]
        reports = [documents.read(file, RankReport) for file in files]
    rows = device_rows(reports, machine)
    return [*rows, well_row(runs, verdict), noise_row(runs, verdict, machine)]


def well_row(runs: Sequence[Run], verdict: Verdict) -> Row:
    """Check that all launches were measured, on a healthy machine."""
    if verdict.outcome == "recorded" and not verdict.unhealthy_launches:
        return passed("launches", f"{len(runs)} measured, the machine was well")
    advice = "see to it before the night: such launches are set aside, and verdicts need others"
    return failed("launches", "; ".join(verdict.reasons) or verdict.outcome, advice)


def noise_row(runs: Sequence[Run], verdict: Verdict, machine: Machine) -> Row:
    """Estimate the noise between launches: does the gate find drops of the usual tolerance with it?"""
    healthy = [run for run in verdict.healthy(runs) if run.failure is None]
    known = class_noise([baseline.from_runs(healthy)]).of(TOKENS_PER_S) if len(healthy) > 2 else None
    if known is None:
        found = f"{plural(len(healthy), 'healthy launch')} cannot tell it"
        return unknown("noise", found, "look again when it is quiet")
    now = minimum_detectable_drop(noise=known, baseline_launches=len(healthy))
    reviewed = Noise(sigma=known.sigma, degrees_of_freedom=REVIEWED_DEGREES)
    later = minimum_detectable_drop(noise=reviewed, baseline_launches=REVIEWED_LAUNCHES)
    allowed = TOKENS_PER_S.tolerance(machine.device)
    by = [f"{TOKENS_PER_S.bound(of_cost):.1%}" for of_cost in (now, later, allowed)]
    found = (
        f"{known.sigma:.2%} between launches, so drops of tokens/s by {by[0]} are found now and by {by[1]} "
        f"with reviewed baselines of {REVIEWED_LAUNCHES} launches; {by[2]} are allowed"
    )
    advice = (
        f"verdicts here are called blind to drops below {by[1]}: lock the clocks, keep others off, or take "
        "longer steps"
    )
    return checked("noise", found, ok=later <= allowed, advice=advice)
