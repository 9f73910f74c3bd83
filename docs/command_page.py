"""Generate `commands.md` from the commands: run `python docs/command_page.py`, or `make samples`."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from typer.main import get_command

from perfsuite.cli.shared import sentence
from perfsuite.session.option_table import BY_NAME

PAGE = Path(__file__).with_name("commands.md")
HEAD = """# Commands

<!-- Generated from the commands by `python docs/command_page.py`. -->

The exit status of a command of `perfsuite` shows the result:

- 0: all is well
- 1: the command found a problem: a regression, a check that failed, or a case that was not accepted
- 2: there was an error, which a message explains
- 3: the command cannot decide

The option `--help` of a command explains the command in full. An option with a value can be given only once,
except `--baseline` of `judge`.

All commands share these options, before or after the name of the command. `perfsuite --json report` and
`perfsuite report --json` are the same. A command refuses an option that it does not use.

- `--cases`, `--store`, `--baselines`: the directories of the cases, of the local results and of the reviewed
  baselines. The defaults come from pytest's ini keys `perf_cases`, `perf_store` and `perf_baselines`. If
  these keys are not set, the defaults are `bench_cases`, `.perfsuite` and `baselines`
- `--json`: print JSON, and nothing else on standard output. `compare`, `dry-run` and `report` print the
  [document of a session](reference.md), or a list of such documents. `bisect` and `judge` print their steps,
  and `history trend` prints the changes that it found. All other commands print an object with
  `schema_version` and `rows`

Several commands have these options:

{common}
- {as_pytest}:
  these are [options of pytest](options.md) without the prefix `--perf-`. For example, `--against` means the
  same as `--perf-against`
- `--history`: the directory of the history. The default is `.perfsuite/history`, or `history` for
  `history pull` and `history push`

The fields of a row of `--json` depend on the command:

- `night --plan`: `case`, `outcome`, `day`, `expected_s`, `gpu_hours`, `reached_after_s`
- `night --plan --find`: `case`, `launches`, `finds`, `reached`, `canary_launches`, `most_s`, `most_gpu_hours`
- `history list`: `hardware_class`, `case`, `sessions`, `first`, `last`, `step_s_p50`, `peak_memory_bytes`,
  `verdicts`
- `history failures`: `hardware_class`, `case`, `night`, `verdict`, `taken_back`
- `baseline list`: `hardware_class`, `case`, `tokens_per_s` or `samples_per_s`, `peak_memory_bytes`,
  `launches`, `day`, `accepted_by`
- `baseline list`, for baselines of counts: `counts_on`, `case`, `collective_bytes`, `flop`, `kernel_calls`,
  `peak_live_bytes`, `launches`, `day`, `accepted_by`
- `baseline show`: `file`, `baseline`
- `baseline diff`: `file`, `before`, `now`
- `doctor`, `selftest`: `check`, `status`, `found`, `advice`
- `first-night`: `step`, `check`, `status`, `found`, `advice`
- `first-night --plan`: `step`, `expected_min`, `most_min`, `state`, `question`
- `releases`: `title`, `same`, `rows`, `lines`, `unknown`
"""
IN_HEAD = {"--cases", "--store", "--baselines", "--history", "--json"}
"""Options that most commands have. The sections of the commands do not list them."""
OF_PYTEST = {f"--{name}": sentence(option.help_with_default) for name, option in BY_NAME.items()}
FOR_WORKFLOWS = """## For workflows

Workflows call these commands. `perfsuite --help` does not list them.
"""


def commands() -> dict[str, Any]:
    """Return every command of `perfsuite`, by name, such as `baseline accept`."""
    (script,) = entry_points(group="console_scripts", name="perfsuite")
    found: dict[str, Any] = {}
    for name, command in get_command(script.load()).commands.items():  # type: ignore[attr-defined]
        for sub, each in (getattr(command, "commands", None) or {"": command}).items():
            each.hidden = each.hidden or command.hidden
            found[f"{name} {sub}".strip()] = each
    return found


def written() -> str:
    """Return the current page, which begins with the options that several commands have."""
    known = commands()
    told = [each for command in known.values() for each in options(command)]
    as_pytest = sorted({each.opts[0] for each in told if is_of_pytest(each)})
    times = Counter(line(each) for each in told if not is_of_pytest(each))
    common = sorted(text for text, number in times.items() if number > 1)
    head = HEAD.format(common="\n".join(common), as_pytest=", ".join(f"`{name}`" for name in as_pytest))
    sections = {name: section(name, command, set(common)) for name, command in known.items()}
    plain = [text for name, text in sections.items() if not known[name].hidden]
    of_workflows = [text for name, text in sections.items() if known[name].hidden]
    return "\n".join([head, *plain, FOR_WORKFLOWS, *of_workflows])


def is_of_pytest(option: Any) -> bool:
    """Return whether an option of a command is also a pytest option with the same meaning."""
    return bool(option.help and OF_PYTEST.get(option.opts[0]) == option.help)


def options(command: Any) -> list[Any]:
    """Return the options of a command, except the options that most commands have."""
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    return [each for each in options if each.opts[0] not in IN_HEAD]


def section(name: str, command: Any, common: set[str]) -> str:
    """Return the section of a command. Options that the head of the page explains are only named."""
    in_head = [each for each in options(command) if line(each) in common or is_of_pytest(each)]
    own = [line(each) for each in options(command) if each not in in_head]
    also = [f"`{each.opts[0]}`" for each in in_head]
    last = [f"- also {', '.join(also)}"] if also else []
    listed = [*own, *last, ""] if own or last else []
    return "\n".join([f"## `{name}`", "", in_short(command.help), "", *listed])


def line(option: Any) -> str:
    """Return the list item of an option, with its default and its help text. Flags have no default."""
    meaning = said(option.help).removesuffix(".")
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = "" if option.is_flag or option.default in (None, (), "", "*") else f" (`{option.default}`)"
    is_name = any(letter.isupper() for letter in meaning.split()[0][1:])  # URL, TensorBoard
    return f"- {names}{default}: {meaning if is_name else meaning[0].lower() + meaning[1:]}"


def in_short(text: str | None) -> str:
    """Return the first sentence of a help text."""
    return re.split(r"(?<=[.?]) (?=[A-Z])", said(text))[0]


def said(text: str | None) -> str:
    """Return a help text in one line. Remove the backslashes that escape brackets for rich."""
    return " ".join((text or "").replace("\\[", "[").split())


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
