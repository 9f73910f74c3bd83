"""Write the table of pytest options into `options.md`: `python docs/option_table.py`."""

from __future__ import annotations

from pathlib import Path

from perfsuite.extensions import LAUNCHERS, own
from perfsuite.inputs.setting import Setting
from perfsuite.launch.launchers import load
from perfsuite.session.option_table import OPTIONS

PAGE = Path(__file__).with_name("options.md")
BEGIN = "<!-- options: made by docs/option_table.py -->\n"
END = "<!-- options end -->\n"


def row(option: Setting) -> str:
    """Return the table row of an option."""
    value = option.metavar.replace("|", "\\|")
    spelled = option.spelled + (f"={value}" if "|" in value else f" {value}" if value else "")
    default = f"`{option.default}`" if option.default else ""
    meaning = f"{option.help[0].upper()}{option.help[1:]}" + (f". {option.page}" if option.page else "")
    key = f"`{option.key}`" if option.ini else ""
    return f"| `{spelled}` | {meaning} | {default} | {key} |"


def table() -> str:
    """Return the table of all public options. The options of perfsuite's own launchers come last."""
    of_launchers = [setting for extension in own(LAUNCHERS).values() for setting in load(extension).settings]
    rows = [row(option) for option in (*OPTIONS, *of_launchers)]
    return "\n".join(["| option | meaning | default | ini key |", "| --- | --- | --- | --- |", *rows, ""])


def written(page: str) -> str:
    """Return the page with the current table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
