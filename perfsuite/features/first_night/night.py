"""Provide what all steps of a first night use: the machine, directories, launches, and common rows."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, unknown
from perfsuite.errors import CaseError, FileError
from perfsuite.features.first_night.cases import Size
from perfsuite.launch.quiet import Neighbours, see_gpus
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.measure import Launching, launch_once, measure
from perfsuite.node.machine import detect
from perfsuite.node.processes import captured
from perfsuite.report.progress import silent
from perfsuite.results.counts import numbers
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir, launches_in

FOLDER = "steps"  # folder of the files of all steps, in the directory of a first night
MARKER = ".perfsuite-step"
"""Empty file in the folder of a step. A folder without it belongs to the user, and is never emptied."""
NAMED = 3  # maximum number of names in a message about files that could not be removed
NOT_RUN = "not run: "  # prefix in the row of a check that did not run
NOT_REACHED = f"{NOT_RUN}not reached: "  # prefix if an incomplete step did not get to the check
LOST_ADVICE = "look at nvidia-smi and dmesg: has a GPU fallen off the bus?"
ASK_S = 60  # deadline, in seconds, of a program that only prints information, such as nvidia-smi


@dataclass(frozen=True, kw_only=True)
class Night:
    """The machine, the options and the functions that the steps of a first night use."""

    machine: Machine
    size: Size
    out: Path
    cases: Path  # directory of the user's cases
    image: str | None = None  # a container image to compare with this environment
    wait_quiet_s: float = 0
    say: Callable[[str], None] = field(default=silent)
    left_s: Callable[[], float] = lambda: float("inf")  # seconds until the step must end
    is_continued: bool = False  # False: an earlier attempt is complete, so the step starts anew
    measure: Callable[..., tuple[list[Run], Verdict]] = measure
    launch: Callable[..., Run] = launch_once
    detect: Callable[[], Machine] = detect
    see_gpus: Callable[[int], list[str]] = see_gpus  # number of GPUs -> the users of their memory
    sleep: Callable[[float], None] = time.sleep

    def directory(self, step: str) -> Path:
        """Return the directory with the files of a step."""
        return self.out / FOLDER / step

    def new_directory(self, step: str) -> Path:
        """Return the directory of a step, without the files of an earlier attempt.

        Raises `FileError` if the directory cannot be created, or exists and is not a directory of a step.
        """
        directory = self.directory(step)
        if directory.exists() or directory.is_symlink():
            empty_step(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / MARKER).touch()
        except OSError as error:
            raise FileError(f"{directory} cannot be created: {error.strerror}") from error
        return directory

    def continued_directory(self, step: str) -> Path:
        """Return the directory of a step. An earlier attempt that is not complete keeps its files.

        Raises `FileError`, like `new_directory`.
        """
        directory = self.directory(step)
        is_kept = self.is_continued and (directory / MARKER).is_file()
        return directory if is_kept else self.new_directory(step)

    def neighbours(self) -> Neighbours:
        """Return an object that names the other users of the machine, and waits until they are quiet."""
        return Neighbours(self.say, silent, self.wait_quiet_s, see_gpus=self.see_gpus, sleep=self.sleep)

    def launching(self) -> Launching:
        """Return how to launch.

        If `wait_quiet_s` is above 0, launches on GPUs wait for other users. Launches on a CPU never wait.
        """
        waits = self.machine.device == "cuda" and self.wait_quiet_s > 0
        return Launching(
            neighbours=self.neighbours(),
            when_shared="wait" if waits else "again",
            on_launch=lambda case, number: self.say(f"launch {number} of {case.id}"),
        )


def empty_step(directory: Path) -> None:
    """Remove everything in the directory of an earlier attempt of a step, except its marker.

    Raises `FileError` if no step created the directory, or if a file in it cannot be removed.
    """
    marker = directory / MARKER
    if directory.is_symlink() or not marker.is_file():
        raise FileError(
            f"{directory} was not created by first-night, so its files are kept. Move it away, or give "
            "another --out"
        )
    kept = []
    for folder, folders, files in os.walk(directory, topdown=False):
        for path in (Path(folder, name) for name in (*files, *folders)):
            if path != marker and not _is_removed(path):
                kept.append(str(path))
    if kept:
        more = f" and {len(kept) - NAMED} more" if len(kept) > NAMED else ""
        raise FileError(
            f"the files of an earlier attempt cannot be removed: {', '.join(kept[:NAMED])}{more}. Who owns "
            "them? Remove them, or give another --out"
        )


def _is_removed(path: Path) -> bool:
    """Try to remove a file, a link or an empty folder."""
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    except OSError:
        return False
    return True


def not_run(check: str, reason: str, advice: str | None = None) -> Row:
    """Return the row of a check that did not run. Such a check never counts as a success."""
    return unknown(check, f"{NOT_RUN}{reason}", advice)


def not_reached(check: str, reason: str, advice: str | None = None) -> Row:
    """Return the row of a check that a step did not reach. The next attempt then continues the step."""
    return unknown(check, f"{NOT_REACHED}{reason}", advice)


def answer_of(command: Sequence[str], file: Path, *, deadline_s: float = ASK_S) -> str | None:
    """Run a program, keep its output in a file, and return the output. None if the program failed.

    A program that does not end in time also counts as failed. After a failure, the file has the reason.
    """
    try:
        done = captured(command, timeout=deadline_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"no answer in {deadline_s:g} s"
        documents.write_text(file, f"{why}\n")
        return None
    documents.write_text(file, done.stdout + done.stderr)
    return done.stdout if done.returncode == 0 else None


def healthy_launches(directory: Path, case: Case) -> list[Run]:
    """Return the launches of a case in the directory of a step, except for failed and interrupted ones."""
    runs = []
    for launch in launches_in(directory):
        try:
            run = documents.read(RunDir(launch.path).run, Run)
        except FileError:  # the launch was interrupted
            continue
        if run.failure is None and run.case == case:
            runs.append(run)
    return runs


def why_not(case: Case, night: Night) -> str | None:
    """Return why a case cannot run here, or None."""
    try:
        return unsupported(case, night.machine) or wrong_torch(case, night.machine)
    except CaseError as error:
        return str(error)


def changed(night: Night) -> str | None:
    """Return how the GPUs changed after the night began. None if they are the same.

    Raises `MachineError` if NVML cannot read a GPU.
    """
    machine = night.machine
    now = night.detect()
    if (now.devices, now.hardware_class) == (machine.devices, machine.hardware_class):
        return None
    before = f"{machine.devices} x {machine.hardware_class}"
    seen = f"{now.devices} x {now.hardware_class}" if now.device == "cuda" else "no GPU"
    return f"the machine has changed: it had {before}, and now has {seen}"


def numa_nodes(root: Path = Path("/")) -> list[frozenset[int]]:
    """Return the cores of each NUMA node that has cores."""
    files = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    texts = [file.read_text().strip() for file in files]  # such as `0-2,8`, which `numbers` can parse
    return [frozenset(numbers(text)) for text in texts if text]
