"""The options that have the same meaning in every command: directories, and the choice of JSON.

This module is imported for every command, so it imports little.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perfsuite.inputs.ini import BASELINES, CASES, STORE

PANEL = "Options of several commands"
"""The heading of the shared options in `--help`."""


def _path(name: str, text: str) -> Any:
    return Annotated[Path, typer.Option(f"--{name}", help=text, rich_help_panel=PANEL)]


Name = Literal["cases", "store", "baselines", "as_json"]
SHARED: Mapping[Name, tuple[Any, object]] = {
    "cases": (_path("cases", "Directory of the cases."), CASES),
    "store": (_path("store", "Directory of the local results."), STORE),
    "baselines": (_path("baselines", "Directory of the reviewed baselines."), BASELINES),
    "as_json": (
        Annotated[
            bool,
            typer.Option("--json", help="Print only JSON on standard output.", rich_help_panel=PANEL),
        ],
        False,
    ),
}
"""The type and the default of each option that commands declare with `shares`.

These options can also be given before the name of the command.
"""


class Shared:
    """The values of the shared options that a command has declared."""

    cases: Path
    store: Path
    baselines: Path
    as_json: bool

    def __init__(self, **values: object) -> None:
        vars(self).update(values)


def shares(*names: Name) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add these shared options to a command, which gets their values as its argument `shared`."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            shared = Shared(**{name: values.pop(name) for name in names})
            function(**values, shared=shared)

        own = inspect.signature(function, eval_str=True)
        parameters = {name: parameter for name, parameter in own.parameters.items() if name != "shared"}
        for name in names:
            kind, default = SHARED[name]
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters[name] = inspect.Parameter(name, keyword, default=default, annotation=kind)
        command.__signature__ = own.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
        command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return command

    return decorated
