"""The `perfsuite` command. Imports neither torch nor pytest."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from perfsuite.case import torch_build
from perfsuite.case.hardware import ACCELERATORS, Machine, hardware_error
from perfsuite.cli import baseline, github_issue, history
from perfsuite.cli import doctor as doctor_cli
from perfsuite.cli import judge as traces
from perfsuite.cli import power as power_cli
from perfsuite.cli import report as report_cli
from perfsuite.cli import selftest as selftest_run
from perfsuite.errors import CaseError, PerfsuiteError
from perfsuite.launch.lock import machine_lock
from perfsuite.launch.machine import detect
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.report.terminal import console

UNTRIED = 3
"""Exit status of a self-test that an unhealthy machine did not let judge: nothing speaks against the gate."""


class _Commands(TyperGroup):
    """All commands: what they raise on purpose becomes a line on standard error, and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PerfsuiteError as error:
            told = f"perfsuite {ctx.invoked_subcommand}: {error}"
            console(stderr=True).print(told, style="red")
            raise typer.Exit(2) from None


app = typer.Typer(
    help="Performance regression tests for distributed training.\n\nExit status: 0, or 1 for a finding (a "
    "worsening, a fault that was not caught, a case that was not accepted), or 2 for an error.",
    no_args_is_help=True,
    cls=_Commands,
)

app.add_typer(baseline.app, name="baseline", no_args_is_help=True)
app.add_typer(history.app, name="history", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"perfsuite {version('perfsuite')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def hardware(
    expect: Annotated[
        str | None, typer.Option(help="A marker, such as h100: exit status 2 unless it selects cases here.")
    ] = None,
) -> None:
    """What machine this is, its hardware class, and which markers select cases here, or why not.

    Exit status 2 if the installed torch cannot use the machine's GPUs.
    """
    if expect is not None and (error := hardware_error(expect)) is not None:
        raise CaseError(f"--expect {expect}: {error}")
    machine = detect()
    out = console()
    for heading, value in _facts(machine):
        out.print(Text.assemble((f"{heading:<16}", "bold"), value))
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("marker", "here", "why not"):
        grid.add_column(heading)
    for name in ACCELERATORS:
        reason = _why_not(machine, name)
        grid.add_row(f"-m {name}", "no" if reason else "yes", reason or "")
    out.print()
    out.print(grid)
    if expect is not None and (reason := _why_not(machine, expect)) is not None:
        note = f"; {machine.note}" if machine.note else ""
        raise CaseError(f"no {expect} here: {reason}{note}")
    if expect != "cpu" and (problem := torch_build.wrong_build(machine)) is not None:
        raise CaseError(problem)


def _why_not(machine: Machine, hardware: str) -> str | None:
    """A machine with GPUs is a CPU machine, too, for a case meant for that."""
    return None if hardware == "cpu" else machine.why_not(hardware)


@app.command()
def selftest(
    framework: Annotated[
        str, typer.Option(help="What to inject the faults into: ddp trains for real, fake takes a moment.")
    ] = "ddp",
) -> None:
    """Inject every fault into a small case and see that each is caught, and a clean run is not.

    Exit status 1 if it is otherwise; 3 if the machine was too unhealthy for some of it to be tried.
    """
    machine, out = detect(), console()
    case = selftest_run.small_case(machine).replace(framework=framework)
    if (reason := unsupported(case, machine) or wrong_torch(case, machine)) is not None:
        raise CaseError(f"the self-test cannot run here: {reason}")
    with machine_lock(out.print):
        answer = selftest_run.selftest(case, machine, out.print)
    if answer == "missed":
        out.print("the gate does not catch what it must: do not trust its verdicts here", style="red")
        raise typer.Exit(1)
    if answer == "untried":
        out.print(
            "the machine was unhealthy, so that part of the gate could not be tried: see the reasons above",
            style="yellow",
        )
        raise typer.Exit(UNTRIED)
    out.print("every fault was caught, and a clean run was not")


app.command()(doctor_cli.doctor)
app.command()(power_cli.power)
app.command()(report_cli.report)
app.command()(traces.judge)
app.command("github-issue")(github_issue.issue)


def _facts(machine: Machine) -> list[tuple[str, str]]:
    devices = f"{machine.devices} GPUs" if machine.device == "cuda" else f"{machine.devices} cores"
    peak = machine.peak_flops("bf16")
    if machine.device == "cpu":
        mfu = "not given on a CPU"
    elif peak is None or machine.product is None:
        mfu = "unknown peak, no MFU"
    else:
        mfu = f"{peak / 1e12:g} TFLOP/s dense at 16 bit ({machine.product.source})"
    return [
        ("machine", f"{devices}, {machine.device_name}, {machine.memory_bytes / 2**30:.0f} GiB"),
        ("hardware class", machine.hardware_class),
        ("driver", machine.driver or "none"),
        ("torch", torch_build.summary()),
        ("peak FLOP/s", mfu),
        ("note", machine.note or "none"),
    ]
