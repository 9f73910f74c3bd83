"""Damages files that perfsuite reads, and looks for tracebacks, hangs and verdicts that improve as a result.

Each file is damaged in many ways. For example, bits are flipped, the end is cut off, keys are lost or
repeated, types are swapped, numbers become huge or NaN, the encoding changes, or a FIFO, a device or a
directory replaces the file. Each command that reads the file then runs in its own process. Its exit status
and verdicts are compared with those for the undamaged file. The undamaged files are chosen so that their
verdicts are bad. Any improvement is a *wrong green*, even if only one of several verdicts improves. A verdict
that disappears while the exit status is 0 is also a wrong green. Command lines that end badly are damaged as
well.

Only two kinds of improvement are excused. They are counted separately, and the number of each such trial is
printed:

- `equal`: the damaged file means the same as the original, because both are parsed to equal documents. This
  happens, for example, if a comment or the end of a line is damaged.
- `shown`: the damaged file is another complete and valid document of a kind that people write (a reviewed
  baseline, waivers, settings of pytest, traces and logs of `judge`), *and* the output shows each value that
  differs. The pytest commands that judge cases run with `GITHUB_BASE_REF` set, as in a CI job of a pull
  request. So their output has a section about the files that decide how the branch is judged. This section
  has to name each changed setting, each changed field of a waiver, and each changed number of a baseline
  that is judged. `history trend` has to report that a regression is accepted. `judge` has to print a row for
  each line of its input. The row of a changed line must show the line's tolerance, and must differ from the
  row before the damage.

A document that only perfsuite writes (results, a history, a trend, recorded baselines, the files of ranks and
agents) is only excused with `equal`. A command line with `--help` is excused because it judges nothing.

    python -m tests.benchmarks.damaged              # 2,000 files and 300 command lines
    python -m tests.benchmarks.damaged 200 30 7     # fewer, with another seed
"""

import contextlib
import gc
import io
import os
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np  # noqa: F401  # otherwise, each fork that looks for trends would import it
import pytest

from perfsuite.launch.lock import LOCK_FILE
from perfsuite.results.environment import installed
from tests import simulated
from tests.benchmarks.damaged import damages, world
from tests.benchmarks.damaged.damages import DAMAGES, SPECIAL, damaged_line, invented_line, put
from tests.benchmarks.damaged.running import Said, in_process
from tests.benchmarks.damaged.shown import excuse
from tests.benchmarks.damaged.world import Target

ALONE = ("-p", "no:perfsuite")  # pytest without perfsuite
NO_END = ("fifo", "device", "sparse")  # pytest would never stop reading these if they replaced its ini file
BAD = ("tracebacks", "hangs or killed", "wrong greens")
EXCUSED = ("excused: equal", "excused: shown", "excused: help")
COLUMNS = ("trials", "same status", *BAD, *EXCUSED, "pytest itself breaks down")


class Counts:
    """The number of trials of each command, and their results."""

    def __init__(self) -> None:
        self.by_command = defaultdict[str, Counter[str]](Counter)
        self.excused = defaultdict[str, list[int]](list)

    def add(self, command: str, what: str, number: int = -1) -> None:
        """Count one trial."""
        self.by_command[command][what] += 1
        if what.startswith("excused"):
            self.excused[what].append(number)

    def show(self) -> bool:
        """Print a table of all trials, and return whether none was bad."""
        print(f"\n| command | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|")
        total = Counter[str]()
        for command, counts in sorted(self.by_command.items()):
            total.update(counts)
            print(f"| {command} | {' | '.join(str(counts[name]) for name in COLUMNS)} |")
        print(f"| all | {' | '.join(str(total[name]) for name in COLUMNS)} |")
        for what, numbers in sorted(self.excused.items()):
            print(f"{what}: {', '.join(map(str, numbers))}")
        return not any(total[name] for name in BAD)


def main(count: int = 2000, commands: int = 300, seed: int = 39) -> int:
    """Print every trial that is bad or excused, and the number of trials of each kind."""
    draw = random.Random(seed)
    counts = Counts()
    with (
        contextlib.suppress(KeyboardInterrupt),  # after Ctrl-C, the numbers are still printed
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        simulated.patch(patch)
        patch.setattr("cpuinfo.get_cpu_info", dict)
        for name in [variable for variable in os.environ if variable.startswith("GITHUB_")]:
            patch.delenv(name)
        patch.setenv("GITHUB_BASE_REF", "main")
        patch.setenv(LOCK_FILE, f"{directory}/lock")
        patch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -W ignore")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        _warm_up(Path(directory) / "empty")
        root = Path(directory) / "world"
        targets = world.make(root)
        usual: dict[tuple[str, Sequence[str]], Said] = {}
        for target in targets:
            for words in target.commands:
                if (target.project, words) not in usual:
                    usual[target.project, words] = said = _tried(root, target.project, words)
                    print(f"undamaged {target.project}: {' '.join(words)}: {said}", flush=True)
                    assert not said.is_traceback, said.output
        for number in range(count):
            target = targets[number % len(targets)]
            words = target.commands[number // len(targets) % len(target.commands)]
            try_file(number, root, target, words, usual[target.project, words], draw, counts)
        bad = [(project, words) for (project, words), said in usual.items() if said.reds or said.status]
        red = [failed_try for failed_try in bad if failed_try[1][0] != "collect"]  # collect is not a command
        for number in range(count, count + commands):
            if number % 2:
                try_invented(number, root, draw, counts)
            else:
                project, words = draw.choice(red)
                try_line(number, root, project, words, usual[project, words], draw, counts)
    return 0 if counts.show() else 1


def _warm_up(empty: Path) -> None:
    """Import the modules that every fork needs, and make the garbage collector skip their objects."""
    empty.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={empty}", str(empty)])
    installed()
    gc.collect()
    gc.freeze()


def _tried(root: Path, project: str, words: Sequence[str], damage: Mapping[str, bytes | str] = {}) -> Said:
    """Run a command in a copy of a project. Some files of the copy are damaged."""
    there = root.parent / "trial"
    try:
        shutil.copytree(root / project, there, symlinks=True)
        os.mkfifo(there / "fifo")  # a FIFO that some command lines name
        for file, damaged in damage.items():
            put(there / file, damaged)
        return in_process(there, words)
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(there)


def try_file(
    number: int,
    root: Path,
    target: Target,
    words: Sequence[str],
    usual: Said,
    draw: random.Random,
    counts: Counts,
) -> None:
    """Damage a file, and run a command that reads it."""
    content = (root / target.project / target.file).read_bytes()
    (damage,) = draw.choices([damage for _, damage in DAMAGES], [weight for weight, _ in DAMAGES])
    damaged = damage(draw, content)
    while target.is_printed and damaged in SPECIAL:
        damaged = damages.whole(draw, content)
    said = _tried(root, target.project, words, {target.file: damaged})
    command = f"{_name(words)}: {target.kind if target.kind == 'sealed' else Path(target.file).name}"
    if words == world.GATE:
        command = f"pytest: {target.project} ({Path(target.file).suffix.removeprefix('.')})"
    row = f"{number} {damage.__name__} of {target.name}: {' '.join(words)}: {usual} -> {said}"
    counts.add(command, "trials")
    if said.status == usual.status:
        counts.add(command, "same status")
    is_settings = target.kind == "settings" and words == world.GATE
    if said.is_of_pytest or (damaged in NO_END and is_settings):
        counts.add(command, "pytest itself breaks down")
        return
    _count_broken(command, row, said, counts)
    if damaged != content and said.is_better_than(usual):
        why = excuse(target.kind, target.file, content, damaged, said.output, usual.output)
        counts.add(command, "wrong greens" if why is None else f"excused: {why}", number)
        print(f"{'WRONG GREEN' if why is None else f'excused ({why})'} {row}", flush=True)
        if isinstance(damaged, bytes):
            _show_difference(content, damaged)
        if why is None:
            print(said.output[-1500:])


def _count_broken(command: str, row: str, said: Said, counts: Counts) -> None:
    if said.is_killed:
        counts.add(command, "hangs or killed")
        print(f"HANG {row}", flush=True)
    elif said.is_traceback:
        counts.add(command, "tracebacks")
        print(f"TRACEBACK {row}\n{said.output[-2500:]}", flush=True)


def try_invented(number: int, root: Path, draw: random.Random, counts: Counts) -> None:
    """Run a damaged command line."""
    project = draw.choice(("session", "judged", "slower", "history"))
    words = invented_line(draw)
    said = _tried(root, project, words)
    counts.add("invented command line", "trials")
    _count_broken("invented command line", f"{number} in {project}: {words}: {said}", said, counts)


def try_line(
    number: int,
    root: Path,
    project: str,
    words: Sequence[str],
    usual: Said,
    draw: random.Random,
    counts: Counts,
) -> None:
    """Damage a command line that ends badly or reports a bad result."""
    damaged = damaged_line(draw, words)
    said = _tried(root, project, damaged)
    command = f"damaged command line of {_name(words)}"
    if "--json" in words and "--json" not in damaged:  # this only changes the form of the output
        usual = _tried(root, project, [word for word in words if word != "--json"])
    if said.is_killed and words[0] == "pytest" and _tried(root, project, [*damaged, *ALONE]).is_killed:
        counts.add(command, "trials")
        counts.add(command, "pytest itself breaks down")
        return
    row = f"{number} in {project}: {' '.join(words)} -> {damaged}: {usual} -> {said}"
    counts.add(command, "trials")
    if said.status == usual.status:
        counts.add(command, "same status")
    _count_broken(command, row, said, counts)
    if damaged != list(words) and said.is_better_than(usual):
        is_help = "--help" in damaged and "usage" in said.output.lower()
        counts.add(command, "excused: help" if is_help else "wrong greens", number)
        print(f"{'excused (help)' if is_help else 'WRONG GREEN'} {row}\n{said.output[-800:]}", flush=True)


def _name(words: Sequence[str]) -> str:
    is_group = words[0] in ("baseline", "history", "github")
    return " ".join(words[: 2 if is_group else 1]) + (" --json" if "--json" in words else "")


def _show_difference(before: bytes, after: bytes) -> None:
    at = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
    print(f"   {before[max(0, at - 40) : at + 40]!r}\n-> {after[max(0, at - 40) : at + 40]!r}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
