"""`perfsuite slurm submit`: runs a session as a job of Slurm. Imports neither torch nor pytest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from perfsuite.errors import CaseError
from perfsuite.launch.slurm import submit as jobs
from perfsuite.launch.slurm.settings import ENVIRONMENT, PREFIX, Ini, read_ini
from perfsuite.launch.slurm.submit import Interrupted, Interrupts, Request, Submitted
from perfsuite.report.terminal import console

app = typer.Typer(help="Sessions on the nodes of a Slurm cluster.")

Partition = Annotated[
    str | None, typer.Option(envvar=f"{ENVIRONMENT}PARTITION", help="The partition to queue in.")
]
Account = Annotated[str | None, typer.Option(envvar=f"{ENVIRONMENT}ACCOUNT", help="The account to charge.")]
Qos = Annotated[str | None, typer.Option(envvar=f"{ENVIRONMENT}QOS", help="The quality of service.")]
Nodes = Annotated[str | None, typer.Option(envvar=f"{ENVIRONMENT}NODES", help="Nodes of the job.")]
Time = Annotated[
    str | None,
    typer.Option(envvar=f"{ENVIRONMENT}TIME", help="The job's time limit as Slurm reads it: 90, or 1:30:00."),
]
Exclude = Annotated[
    str | None, typer.Option(envvar=f"{ENVIRONMENT}EXCLUDE", help="Nodes not to use, such as n[1-2,7].")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        envvar=f"{ENVIRONMENT}OPTIONS",
        help="Any other option of sbatch, such as --option=--constraint=h100; may be repeated.",
    ),
]
WaitStart = Annotated[
    str | None,
    typer.Option(
        envvar=f"{ENVIRONMENT}WAIT_START",
        help="Seconds after which a job that has not started is cancelled (default: it may queue for ever).",
    ),
]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of pytest, behind --.")]


@app.command()
def submit(
    arguments: Arguments = None,
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    nodes: Nodes = None,
    time: Time = None,
    exclude: Exclude = None,
    option: Options = None,
    wait_start: WaitStart = None,
) -> None:
    """Run pytest as one job of Slurm, follow its log, and end with its exit status.

    What is not given here is taken from the environment, then from the ini keys perf_slurm_*. Ctrl-C cancels
    the job.
    """
    words = arguments or []
    ini = read_ini(Path.cwd())
    request = Request(
        partition=partition or ini.text("partition"),
        account=account or ini.text("account"),
        qos=qos or ini.text("qos"),
        nodes=_nodes(nodes, ini),
        time=time or ini.text("time"),
        exclude=exclude or ini.text("exclude"),
        options=tuple(option or ini.words("options")),
    )
    wait_start_s = _wait_start_s(wait_start, ini)
    with Interrupts() as interrupts:
        submitted = jobs.submit(request, words, directory=Path.cwd(), store=ini.store(words))
        _say(f"job {submitted.id} is submitted, its log will be {submitted.log}")
        raise typer.Exit(_follow(submitted, interrupts, wait_start_s))


def _follow(submitted: Submitted, interrupts: Interrupts, wait_start_s: float | None) -> int:
    """Return the exit status of the job, or that of an interrupt."""
    try:
        return jobs.follow(submitted, interrupts, say=_say, show=_show, wait_start_s=wait_start_s)
    except Interrupted:
        _say(f"job {submitted.id} is cancelled and gone; what it wrote is in {submitted.log}")
    except KeyboardInterrupt:
        _say(f"left job {submitted.id}, which may still be there: scancel {submitted.id}")
    return interrupts.exit_status


def _nodes(given: str | None, ini: Ini) -> str | None:
    """Return the nodes to ask for. Raises `CaseError` for a negative number, which Slurm takes for 1."""
    text = given or ini.text("nodes")
    if text is None or not text.startswith("-"):
        return text
    name = "--nodes" if given else f"{PREFIX}nodes"
    raise CaseError(f"{name} is {text!r}, expected a number of nodes, or a range such as 2-4")


def _wait_start_s(given: str | None, ini: Ini) -> float | None:
    """Return the seconds of --wait-start. Raises `CaseError` for what is no number of seconds."""
    text = given or ini.text("wait_start")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        name = "--wait-start" if given else f"{PREFIX}wait_start"
        raise CaseError(f"{name} is {text!r}, expected a whole number of seconds")
    return float(text)


def _say(line: str) -> None:
    console(stderr=True).print(f"perfsuite slurm: {line}", style="dim")


def _show(text: str) -> None:
    """Print what the job writes. When nobody reads it any more the job goes on; its log has all of it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
