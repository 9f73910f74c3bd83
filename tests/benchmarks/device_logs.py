"""Measures the logs of dry runs: their size, and the CPU seconds to record, write, read and replay them.

python -m tests.benchmarks.device_logs             # run some cases dry, with and without a log (15 minutes)
python -m tests.benchmarks.device_logs STORE       # only the logs below this directory, such as .perfsuite

A fresh dry run counts one step, and logs the same step. Without a log, nothing about kernels, collectives and
the host's calls is recorded or written. Each pair has one dry run of each kind. The ratio of their CPU
seconds is noisy, so recording and writing are also timed by themselves.
"""

import argparse
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from perfsuite import DDP, FSDP2, Case, Topology, documents
from perfsuite.analysis.step_time.expected import speeds
from perfsuite.analysis.step_time.prediction import by_host, step_time
from perfsuite.analysis.step_time.streams import reported_step
from perfsuite.dry.driver import dry_run
from perfsuite.errors import FileError, PredictionError
from perfsuite.launch.arm import HERE, Arm
from perfsuite.results import device_log_file
from perfsuite.results.device_log import Entry
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from tests.benchmarks import show_table
from tests.samples import make_case

PAIRS = 3
ON_A100 = make_case(
    precision="bf16-mixed",
    hardware="a100-80gb",
    topology=Topology(processes_per_node=8),
    timeout_s=3600,
)
CASES = {
    "DDP, GPT-2": ON_A100.replace(model="gpt2", framework=DDP(), sequence_length=1024),
    "FSDP2, Llama 3.2 1B, checkpointing": ON_A100.replace(
        model="llama-3.2-1b", framework=FSDP2(), sequence_length=2048, activation_checkpointing="full"
    ),
}
TIMED = """
spent_s = 0.0

def timed(function):
    def call(*args):
        global spent_s
        began = time.thread_time()
        function(*args)
        spent_s += time.thread_time() - began
    return call

def write_and_print(*args):
    write(*args)
    print("CPU seconds:", spent_s)

def change():
    from perfsuite.dry.operators import Operators
    for name in ("see_call", "see_wait", "see_wrapper"):
        setattr(Operators, name, timed(getattr(Operators, name)))
    device_log_file.write = write_and_print

write = timed(device_log_file.write)
"""
WITHOUT_LOG = """
def change():
    from perfsuite.dry import rank
    rank.Operators = lambda log: None
"""
INTERPRETER = """#!{python}
import runpy, sys, time
from perfsuite.dry import guard
from perfsuite.results import device_log_file
{changes}
def load_and_change():
    load()
    change()

load = guard.load
guard.load = load_and_change
sys.argv = sys.argv[2:]  # without "-m"
runpy.run_module("perfsuite.dry", run_name="__main__", alter_sys=True)
"""
"""An interpreter that runs `-m perfsuite.dry` with changes to the recording of the step's work."""


class LogCost(NamedTuple):
    """The size of a log, and the CPU seconds that it takes."""

    entries: int
    mb: float
    write_s: float
    read_s: float
    replay_s: float | None  # to predict the time of a step; None: the case cannot be predicted

    @property
    def use_s(self) -> float:
        """CPU seconds to read and replay the log."""
        return self.read_s + (self.replay_s or 0.0)


def cpu_s(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call in this process."""
    before = time.process_time()
    call()
    return time.process_time() - before


def cost_of(file: Path, run: Run) -> LogCost:
    """Read a log, replay its reported step and write it again. Raises `FileError`."""
    entries: Sequence[Entry] = ()

    def read() -> None:
        nonlocal entries
        entries = device_log_file.read(file)

    def replay() -> None:
        step = reported_step(entries)
        machine = speeds(run.machine, run.case)
        step_time(step, machine)
        by_host(step, machine)

    read_s = cpu_s(read)
    try:
        replay_s = cpu_s(replay)
    except PredictionError:
        replay_s = None
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, file.name)
        write_s = cpu_s(lambda: device_log_file.write(copy, entries))
        size = copy.stat().st_size
    return LogCost(len(entries), size / 1e6, write_s, read_s, replay_s)


def ran(case: Case, directory: Path, arm: Arm) -> tuple[float, Run]:
    """Run the first rank of a case dry, and return the CPU seconds of its process.

    Raises `RuntimeError` if it fails.
    """
    before = os.times()
    run = dry_run(case, directory, ranks=(0,), arm=arm)
    after = os.times()
    if run.failure is not None:
        raise RuntimeError(run.failure.message)
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, run


def arm_of(program: Path, changes: str) -> Arm:
    """Return an arm whose dry runs make these changes to the recording."""
    program.write_text(INTERPRETER.format(python=sys.executable, changes=changes))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return replace(HERE, python=str(program))


def recording_s(directory: Path) -> float:
    """Return the CPU seconds to record and write a log. The rank of the dry run printed them."""
    printed = RunDir(directory).rank_log(0).read_text()
    match = re.search(r"^CPU seconds: (.*)$", printed, re.MULTILINE)
    assert match is not None, printed
    return float(match[1])


def fresh(pairs: int) -> None:
    """Run each case dry in pairs, with and without a log, and print both costs."""
    logs: dict[str, LogCost] = {}
    headings = (
        "case",
        "dry run without a log",
        "with / without, in pairs",
        "recording and writing",
        "reading and replaying",
    )
    with tempfile.TemporaryDirectory() as root:
        show_table(headings, _rows(Path(root), pairs, logs))
    print()
    show_logs(logs.items())


def _rows(root: Path, pairs: int, logs: dict[str, LogCost]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each case, and add the costs of its log to `logs`."""
    arms = {"with": arm_of(root / "with", TIMED), "without": arm_of(root / "without", WITHOUT_LOG)}
    for number, (label, case) in enumerate(CASES.items()):
        took: dict[str, list[float]] = {"with": [], "without": []}
        recording: list[float] = []
        for pair in range(pairs):
            for kind in ("with", "without") if pair % 2 else ("without", "with"):
                directory = root / f"{number}-{pair}-{kind}"
                seconds, run = ran(case, directory, arms[kind])
                took[kind].append(seconds)
                file = RunDir(directory).device_log(0)
                assert file.exists() == (kind == "with")
                if kind == "with":
                    recording.append(recording_s(directory))
                    logs[label] = cost_of(file, run)
        ratios = sorted(more / less for more, less in zip(took["with"], took["without"], strict=True))
        yield (
            label,
            f"{median(took['without']):.1f} s",
            f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            f"{median(recording):.2f} s",
            f"{logs[label].use_s:.2f} s",
        )


def stored(store: Path) -> None:
    """Print the costs of the logs below a directory."""
    logs = []
    for file in sorted(store.rglob("device-log-*.json.gz")):
        rank = file.name.removeprefix("device-log-").partition(".")[0]
        try:
            run = documents.read(RunDir(file.parent).run, Run)
            logs.append((f"{run.case.id}, rank {rank}", cost_of(file, run)))
        except FileError as error:
            print(f"left out: {error}", file=sys.stderr)
    if not logs:
        sys.exit(f"{store} has no log of a dry run")
    show_logs(logs)
    costs = [cost for _, cost in logs]
    use = [cost.use_s for cost in costs]
    print(
        f"\n{len(logs)} logs, at most {max(cost.mb for cost in costs):.2f} MB and "
        f"{max(cost.entries for cost in costs):,} entries. Reading and replaying a log: {sum(use):.1f} CPU "
        f"seconds in total, {min(use):.1f} to {max(use):.1f} for each. Writing it: at most "
        f"{max(cost.write_s for cost in costs):.2f} CPU seconds"
    )


def show_logs(logs: Iterable[tuple[str, LogCost]]) -> None:
    """Print the size and the costs of each log. A dash: the time of the step cannot be predicted."""
    rows = (
        (
            label,
            f"{cost.entries:,}",
            f"{cost.mb:.2f} MB",
            f"{cost.write_s:.2f} s",
            f"{cost.read_s:.2f} s",
            "-" if cost.replay_s is None else f"{cost.replay_s:.2f} s",
        )
        for label, cost in logs
    )
    show_table(("log", "entries", "size", "write", "read", "replay"), rows)


def main() -> None:
    """Print the costs of fresh logs, or of those in a store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", nargs="?", type=Path)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    if given.store is None:
        fresh(given.pairs)
    else:
        stored(given.store)


if __name__ == "__main__":
    main()
