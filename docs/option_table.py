"""Writes pytest's options into `options.md`: `python docs/option_table.py`."""

from __future__ import annotations

from pathlib import Path

from perfsuite.session.option_table import OPTIONS, Option

PAGE = Path(__file__).with_name("options.md")
BEGIN, END = "<!-- options: made by docs/option_table.py -->\n", "<!-- options end -->\n"


def entry(option: Option) -> str:
    """What the page says of an option."""
    value = f" {option.metavar}" if option.metavar and "|" not in option.metavar else ""
    spelled = [f"`{option.spelled}{value or (f'={option.metavar}' if option.metavar else '')}`"]
    key = [f"`{option.key}`"] if option.ini else []
    default = option.default_told or (option.default and f"`{option.default}`")
    meaning = f"{option.help[0].upper()}{option.help[1:]}" + (f". {option.page}" if option.page else "")
    return f"- {', '.join([*spelled, *key])}{f' ({default})' if default else ''}: {meaning}"


def entries() -> str:
    """All options that people use."""
    return "\n".join([*map(entry, OPTIONS), ""])


def written(page: str) -> str:
    """The page with the options as they are now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{entries()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
