"""Options and arguments of several commands. Each is defined once, and means the same everywhere."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from perfsuite.errors import CaseError
from perfsuite.inputs.ini import read_ini
from perfsuite.launch import launchers
from perfsuite.launch.base import Launcher as AnyLauncher
from perfsuite.launch.download import Consent
from perfsuite.report.console import say
from perfsuite.session import option_table
from perfsuite.session.option_table import BY_NAME, options_of
from perfsuite.session.setup import Options


def option(name: str) -> Any:
    """Return a pytest option as an option of a command."""
    row = BY_NAME[name]
    return typer.Option(f"--{name}", help=sentence(row.help_with_default), metavar=row.metavar or None)


def sentence(text: str) -> str:
    """Return text as a sentence, with a capital letter and a full stop."""
    return text[:1].upper() + text[1:].removesuffix(".") + "."


def launcher_of(name: str | None) -> AnyLauncher:
    """Return the launcher that `--launcher` names, or the default. Report launchers that cannot be used."""
    for problem in launchers.installed(BY_NAME).problems.values():
        say(problem)
    return launchers.launcher(read("launcher", name))


def tolerance(text: str) -> float:
    """Parse a tolerance in the same way as pytest's option. Raises `typer.BadParameter` if it is wrong."""
    try:
        return option_table.tolerance(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}, expected {error}") from None


Ids = Annotated[list[str] | None, typer.Argument(metavar="CASE", help="Case ids.")]
Expression = Annotated[
    str | None, typer.Option("-k", help="Select the cases with a pytest -k expression instead of ids.")
]
Hardware = Annotated[str, typer.Option(help="Hardware marker of the cases, such as h100.")]
PytestOptions = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- PYTEST OPTIONS", help="More pytest options, which override those of this command."
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        parser=tolerance,
        metavar="SHARE",
        help="Largest allowed increase in the time per token, such as 3% (default: as for baselines).",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Directory of the report.")]
Reason = Annotated[str, typer.Option(help="Reason for accepting worse results, such as 'torch 2.14'.")]
Launcher = Annotated[str | None, option("launcher")]
WaitQuiet = Annotated[str | None, option("wait-quiet")]
MaxPairs = Annotated[str | None, option("max-pairs")]
Yes = Annotated[bool, typer.Option("--yes", help="Download more than 1 GB of packages without asking.")]
DryWay = Annotated[
    bool, typer.Option("--dry", help="Compare the work of a step, in one dry run of each arm.")
]
Interconnect = Annotated[str | None, option("interconnect")]
CountsWay = Annotated[
    bool, typer.Option("--counts", help="Compare the work of a step, in one launch of each arm.")
]


def check_way(*, dry: bool, counts: bool, of_times: Mapping[str, object]) -> None:
    """Raise `CaseError` if `dry` and `counts` are given, or one of them and an option in `of_times`."""
    if dry and counts:
        raise CaseError("--dry excludes --counts: leave one of them out")
    for name, value in of_times.items():
        if (dry or counts) and value is not None:
            raise CaseError(f"--{name} only applies to times, and counts are compared exactly: leave it out")


def read(name: str, value: str | None) -> Any:
    """Parse the value of a pytest option. Raises `CaseError` if it is invalid or empty."""
    if value == "":  # for example, because a shell variable is not set
        raise CaseError(f"--{name} is empty: give a value, or leave the option out")
    return BY_NAME[name].read(f"--{name}", value)


def report_directory(out: Path | None) -> Path | None:
    """Return the directory of a report. Raises `CaseError` if no report can be written there."""
    directory: Path | None = BY_NAME["report"].read("--out", None if out is None else str(out))
    return directory


def options(**given: Path | str | float | None) -> Options:
    """Return the options of a session in this directory. `given` maps names of options to their values.

    An option without a value gets the value of pytest's ini file, if there is one. The ini file cannot set
    the report: a command writes a report only if its own option names the directory. The number of counted
    steps comes from the ini file even if the command has no option for it.
    """
    ini = read_ini(Path.cwd()).values
    values = {}
    for keyword, value in {"counted_steps": None, **given}.items():
        option = BY_NAME[keyword.replace("_", "-")]
        if value is None and option.ini and option.name != "report":
            values[option.name] = option.read(option.key, ini.get(option.key))
        else:
            values[option.name] = read(option.name, None if value is None else str(value))
    return options_of(Path.cwd(), values)


def asks(*, yes: bool) -> Consent:
    """Return a function that announces pip's downloads and, on a terminal, asks before a large one."""

    def consent(text: str, is_large: bool) -> bool:
        is_allowed = yes or not is_large
        if not is_allowed and not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False  # nobody can answer; the caller raises an error that states the size
        say(text)
        return is_allowed or typer.confirm("Download that much?", err=True)

    return consent
