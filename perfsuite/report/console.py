"""Print text, tables and data of commands verbatim: to a terminal, a file or another program."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from perfsuite.report.safe_text import printable

PIPED = 200  # width of a table that is written to a file or piped to another program


class PlainConsole(Console):
    """A console that prints text verbatim.

    By default, rich treats `[data]` and `:data:` as markup, and terminals obey escape codes in the text.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text in which control characters are made visible, because a terminal would obey them."""
        return super().render_str(printable(text), **options)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text verbatim."""
    made = PlainConsole(stderr=stderr, soft_wrap=True)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPED  # rich would assume 80 columns
    return made


def say(text: str) -> None:
    """Print a line of progress to standard error, separate from the result."""
    print(printable(text), file=sys.stderr)


def plain_table(headings: Iterable[str] = ()) -> RichTable:
    """Return a table without lines between its cells. Text that is too wide for the terminal is wrapped."""
    made = RichTable(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def print_rows(rows: Sequence[Mapping[str, object]], grid: RichTable, *, as_json: bool) -> None:
    """Print a table, or its data as JSON."""
    if as_json:
        print_json(rows)
    else:
        console().print(grid)


def print_json(rows: Sequence[object]) -> None:
    """Print a JSON object with these `rows`. docs/commands.md documents the fields of the rows."""
    print(json.dumps({"schema_version": 1, "rows": rows}, indent=1))
