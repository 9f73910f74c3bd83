"""The `perfsuite` command: puts its commands together."""

import contextlib
import errno
import io
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from perfsuite.cli import github, history, slurm
from perfsuite.cli.baseline import commands as baseline
from perfsuite.cli.bisect import bisect
from perfsuite.cli.cases import compare, dry_run, plan
from perfsuite.cli.doctor.command import doctor
from perfsuite.cli.init import init
from perfsuite.cli.judge import judge
from perfsuite.cli.night import night, refresh
from perfsuite.cli.releases import releases
from perfsuite.cli.report import export, report
from perfsuite.cli.selftest import selftest
from perfsuite.errors import FileError, PerfsuiteError
from perfsuite.inputs.ini import read_ini
from perfsuite.report.terminal import console

GONE = {  # commands and options that were, and what is in their place
    "compare --a": "write --against",
    "compare --b": "write --arm",
    "report --html": "write --report DIR",
    "report --markdown": "write --report DIR, which has a summary.md",
    "hardware": "perfsuite doctor --quick says what machine this is; --expect MARKER is its option",
    "github-issue": "write github issue",
    "power": "each report states the smallest change that the gate of a case can find",
    "history export-asv": "write history publish, which makes asv's pages, too",
    "report --comparison": "python -m bench_cases.published shows published comparisons",
    "report --published": "python -m bench_cases.published shows published comparisons",
}


class _Commands(TyperGroup):
    """All commands. A `PerfsuiteError` becomes a line on standard error and exit status 2."""

    def main(self, *words: Any, **options: Any) -> Any:
        """Run a command; what the encoding of standard output lacks, as in the locale C, is escaped."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            try:
                return super().main(*words, **options)
            finally:
                sys.stdout.flush()  # later, nobody would catch what it raises
        except OSError as error:
            sys.stdout = io.StringIO()  # what cannot be written is not tried again when Python ends
            if error.errno == errno.EPIPE:  # who read the output wants no more of it: as typer ends then
                raise SystemExit(1) from None
            where = "" if error.filename is None else f"{error.filename}: "
            with contextlib.suppress(OSError):
                told = f"perfsuite: {where}{error.strerror or error}"
                console(stderr=True).print(told, style="red")
            raise SystemExit(2) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        given = [word.partition("=")[0] for word in args]
        for gone, instead in GONE.items():
            command, *options = gone.split()
            if given[0] == command and set(options) <= set(given):
                ctx.fail(f"there is no `perfsuite {gone}` any more: {instead}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:  # typer reads values with pydantic, which puts this before
            error.message = error.message.replace("Value error, ", "")
            raise
        except PerfsuiteError as error:
            console(stderr=True).print(f"perfsuite {ctx.invoked_subcommand}: {error}", style="red")
            raise typer.Exit(2) from None


app = typer.Typer(
    help="Performance regression tests for distributed training.\n\nExit status: 0, or 1 for a finding (a "
    "worsening, a fault that was not caught, a check that failed), or 2 for an error; compare, bisect, "
    "releases, doctor, judge (of logs) and selftest end with 3 where they cannot tell.",
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
    """Take defaults of --store, --baselines and --cases from pytest's ini file, as pytest itself does."""
    try:
        here = Path.cwd()
    except OSError as error:
        raise FileError(f"the current directory: {error.strerror}. Change to one that exists") from None
    known = read_ini(here).directories()

    def below(command: Any) -> dict[str, Any]:
        names = getattr(command, "commands", {})
        return {**known, **{name: below(each) for name, each in names.items()}}

    ctx.default_map = below(ctx.command)


app.add_typer(baseline.app, name="baseline", no_args_is_help=True)
app.add_typer(history.app, name="history", no_args_is_help=True)
app.add_typer(github.app, name="github", no_args_is_help=True)
app.add_typer(slurm.app, name="slurm", no_args_is_help=True)
for command in (
    *(init, night, plan, refresh, selftest, doctor),
    *(compare, bisect, releases, dry_run, report, export, judge),
):
    app.command()(command)
