"""`perfsuite slurm submit`: run a session as a job of Slurm."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from perfsuite.errors import CaseError
from perfsuite.inputs.ini import Ini, read_ini, split
from perfsuite.launch.slurm import ENVIRONMENT, PREFIX
from perfsuite.launch.slurm import submit as jobs
from perfsuite.report.console import console

app = typer.Typer(
    no_args_is_help=True,
    help="Sessions on the nodes of a Slurm cluster.",
)

OF_SBATCH = ("partition", "account", "qos", "nodes", "time", "exclude")  # removed settings for sbatch
_NO_NODES = re.compile(r"(?:^| )(?:--nodes[= ]|-N[= ]?)(-\S*)")


class _PytestBehindDashes(TyperCommand):
    """Separate options of sbatch, before `--`, from arguments of pytest, after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before = args[: args.index("--")] if "--" in args else args
        ctx.obj = args[len(before) + 1 :]
        return super().parse_args(ctx, before)


@app.command(
    cls=_PytestBehindDashes,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[OPTIONS OF SBATCH] -- [ARGUMENTS OF PYTEST]",
)
def submit(
    ctx: typer.Context,
    wait_start: Annotated[
        str | None,
        typer.Option(
            envvar=f"{ENVIRONMENT}WAIT_START",
            help="Seconds after which a job that has not started is cancelled (default: never).",
        ),
    ] = None,
) -> None:
    """Run pytest as one job of Slurm, follow its log, and end with its exit status.

    Options of sbatch, such as --partition=gpu --nodes=2, stand in the ini key perf_slurm_options, in the
    variable PERFSUITE_SLURM_OPTIONS and before the --; the later ones win. Ctrl-C cancels the job.
    """
    ini = read_ini(Path.cwd())
    pytest_arguments = ctx.obj
    options = _options(ini, ctx.args)
    wait_start_s = _wait_start_s(wait_start, ini)
    with jobs.interrupts() as came:
        store = jobs.store_of(ini, pytest_arguments)
        submitted = jobs.submit(options, pytest_arguments, directory=Path.cwd(), store=store)
        _say(f"job {submitted.id} is submitted, its log will be {submitted.log}")
        raise typer.Exit(jobs.follow(submitted, came, say=_say, show=_show, wait_start_s=wait_start_s))


def _options(ini: Ini, given: list[str]) -> list[str]:
    """Return the options of sbatch. Raises `CaseError` for removed settings, and negative node counts."""
    variable = f"{ENVIRONMENT}OPTIONS"
    for name in OF_SBATCH:
        for old, new in ((f"{ENVIRONMENT}{name.upper()}", variable), (PREFIX + name, f"{PREFIX}options")):
            if old in os.environ or ini.values.get(old):
                raise CaseError(f"there is no setting {old} any more: write --{name}=... into {new}")
    options = [*ini.words(f"{PREFIX}options"), *split(variable, os.environ.get(variable, "")), *given]
    if "--option" in {word.partition("=")[0] for word in options}:
        raise CaseError("there is no --option any more: write the options of sbatch themselves")
    match = _NO_NODES.search(" ".join(options))
    if match:  # Slurm would take it for 1
        raise CaseError(f"--nodes is {match[1]!r}, expected a number of nodes, or a range such as 2-4")
    return options


def _wait_start_s(given: str | None, ini: Ini) -> float | None:
    text = given or ini.text(f"{PREFIX}wait_start")
    if text is not None and not (text.isascii() and text.isdigit()):
        name = "--wait-start" if given else f"{PREFIX}wait_start"
        raise CaseError(f"{name} is {text!r}, expected a whole number of seconds")
    return None if text is None else float(text)


def _say(line: str) -> None:
    console(stderr=True).print(f"perfsuite slurm: {line}", style="dim")


def _show(text: bytes) -> None:
    """Print the output of the job. If the reader goes away, the job continues; its log has everything."""
    try:
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
