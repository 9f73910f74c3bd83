"""The files of one launch: no other class knows their names."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.errors import FileError
from perfsuite.inputs.files import LARGEST_OWN, read_text

LAUNCH_DIR = "{launch_dir}"  # replaced with the path of `RunDir.files` in a script's arguments and variables
FILES = "PERFSUITE_LAUNCH_DIR"  # environment variable of every process of a job: the path of `RunDir.files`
RUN_DIR = "PERFSUITE_RUN_DIR"  # environment variable of a script's processes: `RunDir`'s path, with the case
ANCESTOR_PID = "PERFSUITE_ANCESTOR_PID"
"""Environment variable: the process that this one must not outlive. For an agent it is the driver, unless
that is on another machine; for every process that the agent starts it is the agent."""
MOVED = "PERFSUITE_MOVED"  # environment variable of an arm at a commit: repository's top, `:`, worktree
JOB_VARIABLES = "PERFSUITE_JOB_VARIABLES"
"""Environment variable of an agent: names of the variables given to the job, which the agent leaves alone."""
NODE = "PERFSUITE_NODE"  # environment variable of every process of a job: the number of its node, from 0
RANK = "PERFSUITE_RANK"
"""Environment variable of a script's process that the agent starts as a rank: the number of that rank. A
launcher's RANK cannot serve, because a single process starts without it."""
MODEL_CODE = "PERFSUITE_MODEL_CODE"  # environment variable of an agent: modules for its fork server
CACHES = "compile-caches"  # the name of `RunDir.compile_caches`
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
COMPILE_CACHES = {INDUCTOR_CACHE: "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of a job, unless the user set them: directories below `RunDir.compile_caches`."""
STACKS_SIGNAL = signal.SIGUSR1  # makes a process write its stacks into `RunDir.stacks`
FLIGHT_RECORDER_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch's variable: prefix of its flight recorder's files


@dataclass(frozen=True)
class Below:
    """A descriptor of a file name: read from an object, it is that name below the object's `path`."""

    name: str

    def __get__(self, directory: Any, _: type) -> Path:
        path: Path = directory.path
        return path / self.name


@dataclass(frozen=True)
class Numbered:
    """A descriptor of a file name with a node or rank: read from an object, it maps a number to a path."""

    name: str

    def __get__(self, directory: Any, _: type) -> Callable[[int], Path]:
        return lambda number: Path(directory.path / self.name.format(number))


@dataclass(frozen=True)
class RunDir:
    """A directory that driver, launcher and workers share. Each file in it has only one writer."""

    path: Path

    case = Below("case.json")  # `CaseFile`, by the driver
    run = Below("run.json")  # `Run`, by the driver
    scheduler_log = Below("scheduler.log")  # output of the scheduler's command, if one starts the agents
    lease = Below("lease")  # the driver's sign of life and its requests (`perfsuite.node.lease`)
    endpoint = Below("endpoint")  # the ranks' rendezvous, `HOST:PORT`: made by the driver, written by node 0
    files = Below("files")
    """A directory for files that a script writes, and would resume from. The agent of node 0 creates it
    empty; it is kept with the launch's other files."""
    checkpoints = Below("checkpoints")  # checkpoints that a framework resumes from: removed after the launch
    progress = Below("progress")  # rank 0's `STEPS TOKENS_PER_STEP` every 0.5 s, even before the first step
    launch = Numbered("launch-{}.json")  # `LaunchFile`, by the agent of that node
    agent_log = Numbered("agent-{}.log")  # stdout and stderr of the agent of that node
    rank = Numbered("rank-{}.json")  # `RankReport`, by that rank
    rank_log = Numbered("rank-{}.log")  # stdout and stderr of that rank
    profile = Numbered("profile-{}.json")  # `RankProfileFile`, by that rank of a profiled launch
    trace = Numbered("trace-{}.json.gz")  # the trace of torch's profiler in that rank: opens in Perfetto
    running = Numbered("running-{}")
    """The event or phase that has taken some seconds in that rank, by the rank; removed when it ends."""
    training = Numbered("training-{}")
    """The process that trained as that rank (`worker.script.script_rank`); its agent creates it empty."""
    flight_recorder = Below("nccl-flight-recorder-rank-")
    """Prefix of the files, each with a rank's number, in which torch's watchdog dumps recent NCCL calls."""

    @classmethod
    def of_launch(cls, directory: Path, number: int) -> RunDir:
        """Return launch `number`, from 1, of the case whose launches are in `directory`."""
        return cls(directory / f"launch-{number}")

    @classmethod
    def of_profile(cls, directory: Path) -> RunDir:
        """Return the launch for a profile of the case whose launches are in `directory`."""
        return cls(directory / "profile")

    @property
    def compile_caches(self) -> Path:
        """The directory of compile caches for later launches of the same case, session and arm."""
        return self.path.parent / CACHES

    @property
    def inductor_cache(self) -> Path:
        """The directory of inductor's cache. It does not exist if the user named another one.

        The user's cache may have entries of other trainings.
        """
        return self.compile_caches / COMPILE_CACHES[INDUCTOR_CACHE]

    @property
    def number(self) -> int | None:
        """The number of a launch that `of_launch` named; None for any other directory."""
        match = re.fullmatch(r"launch-(\d+)", self.path.name)
        return None if match is None else int(match[1])

    def all_launches(self, nodes: int) -> dict[int, Path]:
        """Return the existing `launch` files of the first nodes, by the number of the node."""
        # Look up each file by name: on NFS, a directory listing can be some seconds old.
        return {node: self.launch(node) for node in range(nodes) if self.launch(node).exists()}

    def all_agent_logs(self) -> list[Path]:
        """Return the existing `agent_log` files, sorted by the number of the node."""
        return _by_number(self.path.glob("agent-*.log"))

    def steps_seen(self) -> int | None:
        """Return the number of steps in `progress`, which may lag behind; None before rank 0 trains."""
        try:
            steps, _ = read_text(self.progress, LARGEST_OWN).split()
            return int(steps)
        except (OSError, ValueError, FileError):
            return None

    def all_ranks(self) -> list[Path]:
        """Return every `RankReport` that was written, in no particular order."""
        return list(self.path.glob("rank-*.json"))

    def all_running(self) -> dict[int, str]:
        """Return the event or phase that has taken some seconds, for each rank that is in one."""
        running = {}
        for file in _by_number(self.path.glob("running-*")):
            with contextlib.suppress(OSError, FileError):  # the event has just ended
                running[int(file.name.rpartition("-")[2])] = read_text(file, LARGEST_OWN)
        return running

    def all_profiles(self) -> list[Path]:
        """Return every trace and every `RankProfileFile` that was written, in no particular order."""
        return [*self.path.glob("trace-*"), *self.path.glob("profile-*.json")]

    def all_rank_logs(self) -> list[Path]:
        """Return the existing `rank_log` files, sorted by the number of the rank."""
        return _by_number(self.path.glob("rank-*.log"))

    def stacks(self, rank: int | None, pid: int, node: int = 0) -> Path:
        """Return the file into which a process writes its stacks on a signal (`perfsuite.worker.leash`)."""
        return self.path / f"stacks-{node}-{'unknown' if rank is None else rank}-{pid}.txt"

    def worker_batch(self, pid: int) -> Path:
        """Return the path of the `WorkerBatchFile` by that process of this node, a data loader's worker."""
        return self.path / f"worker-{os.environ.get(NODE, '0')}-{pid}.json"

    def all_stacks(self, node: int | None = None) -> list[tuple[int | None, int, Path]]:
        """Return the files of `stacks`, of all nodes or one, as (rank, pid, file): unknown ranks first."""
        files = self.path.glob(f"stacks-{'*' if node is None else node}-*-*.txt")
        names = [(file.stem.split("-")[2:], file) for file in files]
        stacks = [(None if rank == "unknown" else int(rank), int(pid), file) for (rank, pid), file in names]
        # pragma: no mutate -1 to -2: both come before every rank
        return sorted(stacks, key=lambda each: (-1 if each[0] is None else each[0], each[1]))


def _by_number(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: int(file.stem.rpartition("-")[2]))


def drop_compile_caches(directory: Path) -> None:
    """Delete the compile caches of a case's launches, in both arms if there are two.

    They are as large as everything else in a session, and nothing reads them again.
    """
    for caches in (directory / CACHES, *directory.glob(f"*/{CACHES}")):
        shutil.rmtree(caches, ignore_errors=True)


def launches_in(directory: Path) -> list[RunDir]:
    """Return the launches in the directory of a case, sorted by number."""
    launches = [RunDir(path) for path in directory.glob("launch-*")]
    # pragma: no mutate 0): it is for mypy, as no number is None here
    return sorted((each for each in launches if each.number is not None), key=lambda each: each.number or 0)
