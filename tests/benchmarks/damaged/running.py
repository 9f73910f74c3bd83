"""Runs a command in a fork of this process, and reads its exit status and its verdicts."""

import contextlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perfsuite.analysis.collect import collect
from perfsuite.cli.app import app
from perfsuite.errors import PerfsuiteError
from perfsuite.results.run_dir import RunDir
from tests import samples

LIMIT_S = 60  # a command that takes longer counts as hanging; on an idle machine, the slowest takes 2 s
MEMORY = 4 * 2**30  # maximum bytes of a command, in addition to those of this process
RED = ("failed", "failure", "regressed", "worse", "undecided", "inconclusive", "neutral", "unhealthy")
GREEN = ("waived", "known_issue", "out_of_memory", "recorded", "passed", "closed", "success", "improved")
ORDER = (*RED, *GREEN)
"""The words for verdicts in the output of a command, starting with the worst."""
ROWS: Mapping[tuple[str, ...], str] = {
    ("pytest",): r"^VERDICT (\w+)$",
    ("github",): r"^VERDICT (\w+)$",
    ("history", "add"): r"^VERDICT (\w+)$",
    ("history", "failures"): r'"verdict": "(\w+)|[0-9a-f]{8}  +(\w+)',
    ("history", "trend"): r'"open": (true)|\): (worse)$',
    ("judge",): r'^ *\d+  (\w+)|"outcome": "(\w+)"|^(regressed|passed|improved|inconclusive)  ',
}
"""Patterns of the verdicts in the output of some commands. A pattern matches once for each judged item.

In the output of any other command, each word of `ORDER` counts as a verdict.
"""


@dataclass(frozen=True)
class Said:
    """The result of a command."""

    status: int
    words: tuple[str, ...]  # words from `ORDER`
    output: str
    is_by_row: bool = False  # whether there is one word for each judged item

    @property
    def verdict(self) -> str | None:
        """The worst word."""
        return min(self.words, key=ORDER.index, default=None)

    @property
    def reds(self) -> int:
        """The number of red words."""
        return sum(word in RED for word in self.words)

    @property
    def is_of_pytest(self) -> bool:
        """Whether pytest itself broke down. It reads its ini file before it loads any plugin."""
        return "in determine_setup" in self.output and "/perfsuite/perfsuite/" not in self.output

    @property
    def is_traceback(self) -> bool:
        """Whether the user saw an error that was not meant to be shown."""
        return "Traceback (most recent call last)" in self.output or "INTERNALERROR" in self.output

    @property
    def is_killed(self) -> bool:
        """Whether the command hung, or was ended by a signal."""
        return self.status < 0

    def is_better_than(self, other: "Said") -> bool:
        """Whether the exit status, the worst verdict or the number of red words is better than in `other`."""
        if self.status == 0 and other.status != 0:
            return True
        if self.verdict is None or other.verdict is None:
            return self.status == 0 and other.verdict is not None
        if self.status not in (0, other.status):
            return False
        fewer = self.is_by_row and self.reds < other.reds
        return fewer or ORDER.index(self.verdict) > ORDER.index(other.verdict)

    def __str__(self) -> str:
        """Return the exit status and the verdict as text."""
        return f"{self.status} {self.verdict or ''}".strip()


def in_process(directory: Path, command: Sequence[str]) -> Said:
    """Run a command in a directory, in a fork of this process. This process has imported everything."""
    with tempfile.TemporaryFile("w+b") as output:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.setpgid(0, 0)
            os._exit(_run(directory, command))
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        end = time.monotonic() + LIMIT_S
        while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Said(-1, (), "hangs")
            time.sleep(0.01)
        output.seek(0)
        text = output.read().decode(errors="backslashreplace")
    words, is_by_row = words_of(command, text)
    return Said(os.waitstatus_to_exitcode(waited[1]), words, text, is_by_row)


def words_of(command: Sequence[str], text: str) -> tuple[tuple[str, ...], bool]:
    """Return the verdicts in the output of a command, and whether there is one for each judged item."""
    is_written = "report" in command[:1] and "--out" in command
    rows = next((row for name, row in ROWS.items() if tuple(command[: len(name)]) == name), None)
    if is_written or rows is not None:
        matches = re.finditer(ROWS["pytest",] if is_written or rows is None else rows, text, re.MULTILINE)
        spoken = [word for match in matches for word in match.groups() if word]
        return tuple("worse" if word == "true" else word for word in spoken if word in (*ORDER, "true")), True
    return tuple(re.findall(r"\b(?:" + "|".join(ORDER) + r")\b", text)), False


def _run(directory: Path, command: Sequence[str]) -> int:
    """Run a command of perfsuite, pytest or the reader of rank reports, and return its exit status."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    try:
        os.chdir(directory)
        os.environ["PATH"] = f"{directory}/bin:{os.environ['PATH']}"  # with the replacement for gh
        name = command[0] if command else ""
        if name == "pytest":
            status = int(pytest.main([*command[1:]]))
        elif name == "collect":
            status = _collect(Path(*command[1:]))
        else:
            status = _command(command)
        for word in _written(command):
            print(f"VERDICT {word.replace(' ', '_')}")
        return status
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _command(words: Sequence[str]) -> int:
    """Run a command of perfsuite with a separate `sys.stdout`, since the app can replace `sys.stdout`."""
    try:
        app([*words], prog_name="perfsuite")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _written(command: Sequence[str]) -> Iterator[str]:
    """Yield the verdicts that a command left in files or sent to `gh`."""
    name = command[0] if command else ""
    if name == "pytest":
        for file in Path().glob(".perfsuite/runs/*/results.json"):
            results = json.loads(file.read_text())["results"]
            yield from (result["excused"] or result["outcome"] for result in results)
    elif name == "report":  # a damaged command line can name any directory
        for file in Path().glob("*/summary.md"):
            yield from re.findall("|".join(ORDER), file.read_text().splitlines()[0])
    elif tuple(command[:2]) == ("history", "add"):
        for file in Path().glob("*/cpu*/*/*.json"):
            yield from (verdict["word"] for verdict in json.loads(file.read_text())["verdicts"].values())
    elif name == "github" and (calls := Path("bin/calls")).is_file():
        calls_made = calls.read_text()
        yield from re.findall(r'"conclusion": "(\w+)"', calls_made)
        yield from ("failed" for _ in re.findall("^issue (?:create|edit)", calls_made, re.MULTILINE))
        yield from ("closed" for _ in re.findall("^issue close", calls_made, re.MULTILINE))


def _collect(directory: Path) -> int:
    """Collect the files in a directory into a launch, like the driver.

    The exit status is 1 if the launch failed.
    """
    fields: dict[str, Any] = {"failure": None, "started_at": "2026-01-02T03:04:05+00:00", "duration_s": 1.0}
    try:
        run = collect(RunDir(directory), samples.make_machine(), **fields)
    except PerfsuiteError as error:
        print(error)
        return 1
    print(run.failure)
    return int(run.failure is not None)
