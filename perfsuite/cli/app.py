"""The `perfsuite` command, assembled from its subcommands."""

import contextlib
import errno
import io
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from typer.core import TyperGroup

from perfsuite import extensions
from perfsuite.cli.shared_options import SHARED, Shared, shares
from perfsuite.errors import ExtensionError, FileError, PerfsuiteError
from perfsuite.extensions import COMMANDS, Extension
from perfsuite.inputs.ini import read_ini
from perfsuite.report.console import console
from perfsuite.report.safe_text import printable

PANELS = {  # the groups of perfsuite's own commands in --help
    "Begin": ("init", "doctor", "selftest", "first-night"),
    "Measure": ("night", "baseline"),
    "Compare": ("compare", "bisect", "releases", "dry-run"),
    "Show": ("report", "history", "judge", "export", "github"),
}
OTHERS = "Commands of other packages"
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class _LazyCommands(Mapping[str, Any]):
    """The commands that packages declare as entry points. Each is imported when it is used."""

    def __iter__(self) -> Iterator[str]:
        place = {name: number for number, name in enumerate(_PANEL_OF)}
        return iter(sorted(extensions.names(COMMANDS), key=lambda name: place.get(name, len(place))))

    def __len__(self) -> int:
        return len(extensions.names(COMMANDS))

    def __getitem__(self, name: str) -> Any:
        try:
            extension = extensions.find(COMMANDS, name)
            command = None if extension is None else command_of(extension)
        except ExtensionError as error:
            command = _unusable(error)
        if command is None:
            raise KeyError(name)
        command.name = name
        _prepare(command)
        command.rich_help_panel = _PANEL_OF.get(name, OTHERS)
        return command


def _prepare(command: Any) -> None:
    """Change how a command, and each command below it, shows its help and reads its options."""
    _join_lines(command)
    _name_values(command)
    _refuse_repeats(command)
    if not hasattr(command, "commands"):
        _refuse_unused(command)
    for below in getattr(command, "commands", {}).values():
        _prepare(below)


def _join_lines(command: Any) -> None:
    """Join the lines of each paragraph of a help text, because typer wraps paragraphs itself."""
    command.help = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n")) or None


def _name_values(command: Any) -> None:
    """Show arguments in capital letters, and hide the type of a flag, because a flag takes no value."""
    parameters_of = command.get_params

    def get_params(ctx: Any) -> Any:
        parameters = parameters_of(ctx)
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                parameter.metavar = parameter.metavar or parameter.name.upper()
            elif parameter.is_flag:
                parameter.metavar = ""
        return parameters

    command.get_params = get_params


def _refuse_repeats(command: Any) -> None:
    """Make a command refuse an option that is given twice. click would silently use the last value."""
    parse = command.parse_args

    def parse_args(ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # a shell completes the line, which need not be valid yet
            return parse(ctx, args)
        _, _, order = command.make_parser(ctx).parse_args(args=[*args])
        for parameter, times in Counter(order).items():
            is_value = parameter.param_type_name == "option" and not (parameter.is_flag or parameter.multiple)
            if is_value and times > 1:
                name = parameter.opts[0]
                why = f"it is given {times} times, but takes one value. Give {name} once"
                raise typer.BadParameter(why, ctx=ctx, param=parameter)
        return parse(ctx, args)

    command.parse_args = parse_args


def _refuse_unused(command: Any) -> None:
    """Make a command refuse a shared option in front of the command's name if the command lacks it."""
    parse = command.parse_args

    def parse_args(ctx: Any, args: list[str]) -> Any:
        rest = parse(ctx, args)
        own = {parameter.name for parameter in command.params}
        for parameter in ctx.find_root().command.params:
            if parameter.name in _given(ctx.find_root()) and parameter.name not in own:
                why = f"{ctx.command_path} does not use it. Leave it out"
                raise typer.BadParameter(why, ctx=ctx, param=parameter)
        return rest

    command.parse_args = parse_args


def _given(root: Any) -> dict[str, object]:
    """Return the values of the shared options that stand in front of a command's name."""
    return {
        name: root.params[name]
        for name in SHARED
        if name in root.params and root.get_parameter_source(name).name == "COMMANDLINE"
    }


def command_of(extension: Extension) -> Any:
    """Import a command. Raises `ExtensionError` if it cannot be imported or is not a command."""
    loaded = extension.load()
    if not callable(loaded):
        raise extension.error(f"it is {loaded!r}: name a function, or a typer.Typer for several commands")
    try:
        if isinstance(loaded, typer.Typer):
            return typer.main.get_group(loaded)
        alone = typer.Typer(add_completion=False)
        alone.command()(loaded)
        return typer.main.get_command(alone)
    except Exception as error:
        problem = f"typer cannot turn it into a command ({type(error).__name__}: {error}): fix it"
        raise extension.error(problem) from error


def _unusable(error: ExtensionError) -> Any:
    """Return a command that replaces an unusable one. Its help text and each of its runs report the error."""
    alone = typer.Typer(add_completion=False)
    any_words = {"allow_extra_args": True, "ignore_unknown_options": True}

    @alone.command(help=f"Cannot be used: {escape(printable(str(error)))}", context_settings=any_words)
    def raise_error() -> None:
        raise error

    return typer.main.get_command(alone)


COMMANDS_BY_NAME = _LazyCommands()


class _Commands(TyperGroup):
    """All commands. A `PerfsuiteError` becomes a line on standard error and exit status 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = cast("MutableMapping[str, Any]", COMMANDS_BY_NAME)
        _name_values(self)
        _refuse_repeats(self)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, without importing any."""
        return list(self.commands)

    def main(self, *words: Any, **options: Any) -> Any:
        """Run a command. Characters that standard output cannot encode (as in the C locale) are escaped."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            try:
                return super().main(*words, **options)
            except PerfsuiteError as error:  # raised while the commands are listed
                console(stderr=True).print(f"perfsuite: {error}", style="red")
                raise SystemExit(2) from None
            finally:
                sys.stdout.flush()  # errors of a later flush would not be caught
        except OSError as error:
            sys.stdout = io.StringIO()  # keeps Python from repeating the failed write at exit
            if error.errno == errno.EPIPE:  # the reader of the output is gone: exit as typer does
                raise SystemExit(1) from None
            where = "" if error.filename is None else f"{error.filename}: "
            with contextlib.suppress(OSError):
                message = f"perfsuite: {where}{error.strerror or error}"
                console(stderr=True).print(message, style="red")
            raise SystemExit(2) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:  # typer parses values with pydantic, which adds this prefix
            error.message = error.message.replace("Value error, ", "")
            raise
        except PerfsuiteError as error:
            console(stderr=True).print(f"perfsuite {ctx.invoked_subcommand}: {error}", style="red")
            raise typer.Exit(2) from None


app = typer.Typer(
    help="Performance regression tests for distributed training.\n\nExit status: 0; 1 for a finding (a "
    "regression, a fault that was not caught, a failed check); 2 for an error; 3 if a "
    "command cannot decide.",
    no_args_is_help=True,
    cls=_Commands,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"perfsuite {version('perfsuite')}")
        raise typer.Exit


@app.callback()
@shares("cases", "store", "baselines", "as_json")
def _options(
    ctx: typer.Context,
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    shared: Shared,
) -> None:
    """Pass the shared options on to the command.

    Their defaults come from pytest's ini file, as they do for pytest.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise FileError(
            f"the current directory: {error.strerror}. Change to a directory that exists"
        ) from None
    defaults = {**read_ini(here).directories(), **_given(ctx)}

    def below(command: Any) -> dict[str, Any]:
        names = getattr(command, "commands", {})
        return {**defaults, **{name: below(subcommand) for name, subcommand in names.items()}}

    name = ctx.invoked_subcommand
    if name is not None:
        ctx.default_map = {name: below(COMMANDS_BY_NAME.get(name))}
