"""Writes `commands.md` from the commands themselves: `python docs/command_page.py`, or `make samples`."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from typer.main import get_command

PAGE = Path(__file__).with_name("commands.md")
HEAD = """# Commands

<!-- Made by `python docs/command_page.py` from the commands themselves. -->

A command ends with exit status 0, with 1 for a finding (a worsening, a check that failed, a case that was
not accepted), or with 2 and a message for an error. `compare`, `bisect`, `releases`, `doctor` and `selftest`
end with 3 if they cannot tell. pytest's ini keys `perf_store`, `perf_baselines` and `perf_cases` are the
defaults of `--store`, `--baselines` and `--cases`. `--help` says more.

`--json` prints for machines, and nothing else on standard output: `compare`, `dry-run` and `report` the
[document of a session](reference.md), or a list of several; `history trend` its findings; `bisect` and
`judge` their steps; others an object with `schema_version` and `rows` with these fields:

- `plan`: `case`, `outcome`, `day`, `expected_s`, `gpu_hours`, `reached_after_s`
- `history list`: `hardware_class`, `case`, `sessions`, `first`, `last`, `step_s_p50`, `peak_memory_bytes`,
  `verdicts`
- `history failures`: `hardware_class`, `case`, `night`, `verdict`, `taken_back`
- `baseline list`: `hardware_class`, `case`, `tokens_per_s` or `samples_per_s`, `peak_memory_bytes`,
  `launches`, `day`, `accepted_by`; of counts `counts_on`, `case`, `collective_bytes`, `flop`, `kernel_calls`,
  `peak_live_bytes`, and the last three
- `baseline show`: `file`, `baseline`; `baseline diff`: `file`, `before`, `now`
- `doctor`, `selftest`: `check`, `status`, `found`, `advice`
- `releases`: `title`, `same`, `rows`, `lines`, `unknown`
"""


def commands() -> dict[str, Any]:
    """Return every command of `perfsuite` by its name, such as `baseline accept`."""
    (script,) = entry_points(group="console_scripts", name="perfsuite")
    found: dict[str, Any] = {}
    for name, command in get_command(script.load()).commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", None)
        found |= {f"{name} {sub}": each for sub, each in below.items()} if below else {name: command}
    return found


def written() -> str:
    """Return the page as it is now: first the options that several commands have."""
    shown = {name: command for name, command in commands().items() if not command.hidden}
    times = Counter(line(option) for command in shown.values() for option in options(command))
    common = sorted(told for told, number in times.items() if number > 1)
    head = [HEAD, "## Options of several commands", "", *common, ""]
    return "\n".join([*head, *(section(name, command, set(common)) for name, command in shown.items())])


def options(command: Any) -> list[Any]:
    """Return the options of a command, `--help` left out."""
    return [each for each in command.params if each.param_type_name == "option" and each.name != "help"]


def section(name: str, command: Any, common: set[str]) -> str:
    """Return what a command does, its options, and the names of those that other commands have, too."""
    own = [line(each) for each in options(command) if line(each) not in common]
    also = [f"`{each.opts[0]}`" for each in options(command) if line(each) in common]
    last = [f"- also {', '.join(also)}"] if also else []
    listed = [*own, *last, ""] if own or last else []
    return "\n".join([f"## `perfsuite {name}`", "", in_short(command.help), "", *listed])


def line(option: Any) -> str:
    """Return an option with its default and its meaning; a flag has no default."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = "" if option.is_flag or option.default in (None, (), "", "*") else f" (`{option.default}`)"
    return f"- {names}{default}: {said(option.help).removesuffix('.')}"


def in_short(text: str | None) -> str:
    """Return the first sentence of a help text, and what it says of the exit status."""
    first, *rest = re.split(r"(?<=[.?]) (?=[A-Z])", said(text))
    return " ".join([first, *(sentence for sentence in rest if sentence.startswith("Exit status"))])


def said(text: str | None) -> str:
    """Return a help text in one line."""
    return " ".join((text or "").split())


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
