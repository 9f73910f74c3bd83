"""Launches real nights with a reference, on a machine that became slower. One case has slower code.

python -m tests.benchmarks.real_nights NEW_DIRECTORY [--sessions 4] [--nights 10]
    [--slower "cgexec -g cpu:slow"]

This clones the repository into a new directory, and adds five cases whose launches take about ten seconds.
On the unchanged machine, it measures and accepts baselines of several sessions. Then it makes the code of one
case 10% slower, and launches nights with the commit of the baselines as the reference. `--slower` is a
command that slows down all processes of a night, for example because it starts them in a control group with a
CPU quota.

Each night is a row of the output: the change of tokens/s that the reference shows, the verdict on each case
after how many launches, and the seconds that the night took. Only the changed case may be `regressed`.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.results.metric import STEP_S_P50, TOKENS_PER_S
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import Store
from tests.benchmarks import show_table
from tests.synthetic import commit, git

ROOT = Path(__file__).parents[2]
CASES = """
import pytest

from bench_cases.test_cpu import LLAMA
from perfsuite import FSDP2, Accelerate, Lightning

LONG = LLAMA.replace(sequence_length=128, steps=60)
CASES = [
    LONG,
    LONG.replace(framework=FSDP2()),
    LONG.replace(framework=Accelerate(strategy="ddp")),
    LONG.replace(framework=Lightning(strategy="ddp")),
    LONG.replace(framework=Lightning(strategy="fsdp2")),
]


@pytest.mark.parametrize("case", CASES)
def test_night(bench, case):
    bench(case)
"""
COLUMNS = {
    "ddp-": "DDP, 10% slower",
    "fsdp2-": "FSDP2",
    "accelerate-ddp-": "Accelerate",
    "lightning-ddp-": "Lightning, DDP",
    "lightning-fsdp2-": "Lightning, FSDP2",
}
"""The first letters of the cases' ids -> their columns in the table."""
FILE = Path("bench_cases", "test_nights.py")
CHANGED = Path("perfsuite", "frameworks", "ddp.py")
BEFORE = "        float8.convert(self.float8, whole, ranks.device)\n"
"""A line of `DDP.build`. After this line, the change adds a hook to the model."""
HOOK = "        whole.register_forward_hook(_work_more)\n"
WORK_MORE = """

def _work_more(*_: object) -> None:
    import time

    end = time.perf_counter() + {seconds}
    while time.perf_counter() < end:
        pass
"""
SLOWER_BY = 0.10  # share of the step time by which the changed case becomes slower
LAUNCHES = "5"  # launches of each case in a session of the baseline


class Clone:
    """A clone of this repository in which nights are launched."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory.with_suffix(".log")
        self.store = Store(directory / ".perfsuite")
        self.environment = {**os.environ, "PYTHONPATH": str(directory)}
        git(ROOT, "clone", "--quiet", str(ROOT), str(directory))
        (directory / FILE).write_text(CASES)
        commit(directory, "add the cases of the nights")

    def run(self, *words: str, prefix: Sequence[str] = ()) -> int:
        """Run a command of this environment in the clone, and return its status. Its output goes to a log."""
        program = Path(sys.executable).with_name(words[0])
        with self.log.open("a") as log:
            return subprocess.run(
                [*prefix, program, *words[1:]],
                cwd=self.directory,
                env=self.environment,
                stdout=log,
                stderr=log,
                check=False,
            ).returncode

    def session(self, *options: str, prefix: Sequence[str] = ()) -> SessionFile:
        """Measure the cases with these options, and return the session."""
        earlier = set(self.store.results())
        self.run("pytest", str(FILE), "-p", "no:cacheprovider", *options, prefix=prefix)
        (results,) = set(self.store.results()) - earlier
        return documents.read(results, SessionFile)


def accept_baselines(clone: Clone, sessions: int) -> str:
    """Accept baselines of this number of sessions, and return their commit."""
    for number in range(1, sessions + 1):
        clone.session(f"--perf-min-launches={LAUNCHES}", f"--perf-record-launches={LAUNCHES}")
        options = ("--sessions", str(number), "--reason", "nights")
        if clone.run("perfsuite", "baseline", "accept", "*-steps60-*", *options):
            raise RuntimeError(f"no baseline was accepted: see {clone.log}")
        accepted = commit(clone.directory, f"accept baselines of {number} sessions")
    return accepted


def step_s(clone: Clone) -> float:
    """Return the seconds of a step of the case that is to be changed, in the newest session."""
    session = documents.read(clone.store.results()[-1], SessionFile)
    runs = next(result.runs for result in session.results if result.case_id.startswith("ddp-"))
    seconds = STEP_S_P50.of(runs[-1].figures)
    if seconds is None:
        raise RuntimeError(f"the step time of {runs[-1].case.id} is unknown")
    return seconds


def slow_down(clone: Clone, seconds: float) -> None:
    """Make each step of DDP longer by this many seconds."""
    file = clone.directory / CHANGED
    text = file.read_text()
    if text.count(BEFORE) != 1:
        raise RuntimeError(f"{CHANGED} has changed: it must contain {BEFORE.strip()!r} once")
    file.write_text(text.replace(BEFORE, BEFORE + HOOK) + WORK_MORE.format(seconds=seconds))
    commit(clone.directory, "make DDP slower")


def night(clone: Clone, reference: str, prefix: Sequence[str]) -> list[str]:
    """Launch a night. Return the change of the machine's speed, and the verdict on each case."""
    options = (f"--perf-reference={reference}", "--perf-tolerance=3%")
    began = time.monotonic()
    session = clone.session(*options, prefix=prefix)
    took = f"{time.monotonic() - began:.0f} s"
    changes = () if session.reference is None else session.reference.changes
    moved = [
        f"{change.change:+.1%} ({change.interval[0]:+.1%} to {change.interval[1]:+.1%})"
        for change in changes
        if change.metric == TOKENS_PER_S.name
    ]
    by_case = {result.case_id: f"{result.outcome}, {result.verdict.launches}" for result in session.results}
    verdicts = [
        next((verdict for case, verdict in by_case.items() if case.startswith(begin)), "no result")
        for begin in COLUMNS
    ]
    return [" ".join(moved) or "unknown", *verdicts, took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sessions", type=int, default=4, help="sessions of the baselines, 1 or more")
    parser.add_argument("--nights", type=int, default=10)
    parser.add_argument("--slower", default="", help="command that slows down its arguments")
    given = parser.parse_args()
    clone = Clone(given.directory.absolute())
    reference = accept_baselines(clone, given.sessions)
    slow_down(clone, SLOWER_BY * step_s(clone))
    rows = (
        [str(number), *night(clone, reference, shlex.split(given.slower))]
        for number in range(1, given.nights + 1)
    )
    show_table(["night", "machine", *COLUMNS.values(), "time"], rows)


if __name__ == "__main__":
    main()
