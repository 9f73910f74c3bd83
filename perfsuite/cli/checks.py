"""Print the rows of `perfsuite doctor` and `selftest`."""

from rich.text import Text

from perfsuite.doctor.rows import Row, Status
from perfsuite.report.console import console

STYLES: dict[Status, str] = {"pass": "green", "fail": "red", "unknown": "yellow"}


def show(row: Row, width: int) -> None:
    """Print a row with its advice below. The name of the check is padded to `width` characters."""
    style = STYLES[row.status]
    out = console()
    out.print(Text.assemble((f"{row.status:<9}", style), (f"{row.check:<{width}}", "bold"), row.found))
    if row.advice is not None:
        out.print(Text(f"{'':<{9 + width}}-> {row.advice}", style=style))
