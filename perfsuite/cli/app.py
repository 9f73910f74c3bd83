"""The `perfsuite` command: puts its commands together."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from perfsuite.cli import history, slurm
from perfsuite.cli.baseline import commands as baseline
from perfsuite.cli.bisect import bisect
from perfsuite.cli.cases import compare, dry_run
from perfsuite.cli.doctor.command import doctor
from perfsuite.cli.github_issue import issue
from perfsuite.cli.judge import judge
from perfsuite.cli.report import export, report
from perfsuite.cli.selftest import selftest
from perfsuite.errors import PerfsuiteError
from perfsuite.ini import read_ini
from perfsuite.report.terminal import console


class _Commands(TyperGroup):
    """All commands. A `PerfsuiteError` becomes a line on standard error and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PerfsuiteError as error:
            console(stderr=True).print(f"perfsuite {ctx.invoked_subcommand}: {error}", style="red")
        raise typer.Exit(2)


app = typer.Typer(
    help="Performance regression tests for distributed training.\n\nExit status: 0, or 1 for a finding (a "
    "worsening, a fault that was not caught, a check that failed), or 2 for an error; compare, bisect, "
    "doctor and selftest end with 3 where they cannot tell.",
    no_args_is_help=True,
    cls=_Commands,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"perfsuite {version('perfsuite')}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take defaults of --store and --baselines from pytest's ini file, as pytest itself does."""
    known = read_ini(Path.cwd()).directories()

    def below(command: Any) -> dict[str, Any]:
        names = getattr(command, "commands", {})
        return {**known, **{name: below(each) for name, each in names.items()}}

    ctx.default_map = below(ctx.command)


app.add_typer(baseline.app, name="baseline", no_args_is_help=True)
app.add_typer(history.app, name="history", no_args_is_help=True)
app.add_typer(slurm.app, name="slurm", no_args_is_help=True)
for command in (selftest, doctor, compare, bisect, dry_run, report, export, judge):
    app.command()(command)
app.command("github-issue")(issue)
