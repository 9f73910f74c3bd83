"""The files of one launch: this class alone knows their names."""

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
from perfsuite.inputs import files

LAUNCH_DIR = "{launch_dir}"  # in the words and variables of a script: replaced by the path of `RunDir.files`
FILES = "PERFSUITE_LAUNCH_DIR"  # environment variable of every process of a job: the path of `RunDir.files`
RUN_DIR = "PERFSUITE_RUN_DIR"  # environment variable of a script's processes: `RunDir`'s path, with the case
ANCESTOR_PID = "PERFSUITE_ANCESTOR_PID"
"""Environment variable: the process that this one must not outlive. For an agent that is the driver, unless
it is on another machine; for every process that the agent starts it is the agent."""
MOVED = "PERFSUITE_MOVED"  # variable of an arm of another commit: top of the repository, `:`, worktree
JOB_VARIABLES = "PERFSUITE_JOB_VARIABLES"
"""Environment variable of an agent: names of the variables that the job has been given, which it leaves."""
NODE = "PERFSUITE_NODE"  # environment variable of every process of a job: the number of its node, from 0 on
RANK = "PERFSUITE_RANK"
"""Environment variable of a script's process that the agent starts as a rank: the number of that rank. A
launcher's RANK cannot say it: a single process starts without one."""
MODEL_CODE = "PERFSUITE_MODEL_CODE"  # of an agent: the modules with the model's code, for its fork server
CACHES = "compile-caches"  # the name of `RunDir.compile_caches`
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
COMPILE_CACHES = {INDUCTOR_CACHE: "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of a job, unless the user has set them: directories below `RunDir.compile_caches`."""
STACKS_SIGNAL = signal.SIGUSR1  # makes a process write its stacks into `RunDir.stacks`
FLIGHT_RECORDER_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch's: the file of its flight recorder, rank appended


@dataclass(frozen=True)
class Below:
    """A name in the directory `path` of an object: read from that object, it is a path."""

    name: str

    def __get__(self, directory: Any, _: type) -> Path:
        path: Path = directory.path
        return path / self.name


@dataclass(frozen=True)
class Numbered:
    """A name with the number of a node or a rank in it: read from an object, the path by that number."""

    name: str

    def __get__(self, directory: Any, _: type) -> Callable[[int], Path]:
        return lambda number: Path(directory.path / self.name.format(number))


@dataclass(frozen=True)
class RunDir:
    """A directory that driver, launcher and workers share; every file in it is written by one of them."""

    path: Path

    case = Below("case.json")  # `CaseFile`, by the driver
    run = Below("run.json")  # `Run`, by the driver
    scheduler_log = Below("scheduler.log")  # what the scheduler's command wrote, where one starts the agents
    lease = Below("lease")  # the driver's sign of life and what it wants (`perfsuite.node.lease`)
    endpoint = Below("endpoint")  # where ranks meet, `HOST:PORT`: made by the driver, written by node 0
    files = Below("files")
    """A directory for what a script writes, and would go on from if it found it. Made empty by the
    agent of node 0, kept with the launch's other files."""
    checkpoints = Below("checkpoints")  # that a framework goes on from: removed after the launch in any case
    progress = Below("progress")  # rank 0's `STEPS TOKENS_PER_STEP`, even before it steps, every 0.5 s
    launch = Numbered("launch-{}.json")  # `LaunchFile`, by the agent of that node
    agent_log = Numbered("agent-{}.log")  # what the agent of that node wrote to stdout and stderr
    rank = Numbered("rank-{}.json")  # `RankReport`, by that rank
    rank_log = Numbered("rank-{}.log")  # what that rank wrote to stdout and stderr
    profile = Numbered("profile-{}.json")  # `RankProfileFile`, by that rank of a launch that is profiled
    trace = Numbered("trace-{}.json.gz")  # what torch's profiler recorded in that rank: opens in Perfetto
    running = Numbered("running-{}")
    """The event or phase in which that rank has been for some seconds, by the rank; gone when it ends."""
    training = Numbered("training-{}")
    """Who trained as that rank (`worker.script.script_rank`); made empty by its agent."""
    flight_recorder = Below("nccl-flight-recorder-rank-")
    """What each rank, its number appended, last asked of NCCL: by torch, when its watchdog ends it."""

    @classmethod
    def of_launch(cls, directory: Path, number: int) -> RunDir:
        """Launch `number`, from 1 on, of the case whose launches are in `directory`."""
        return cls(directory / f"launch-{number}")

    @classmethod
    def of_profile(cls, directory: Path) -> RunDir:
        """The launch that is made for a profile of the case whose launches are in `directory`."""
        return cls(directory / "profile")

    @property
    def compile_caches(self) -> Path:
        """The directory of what compilers keep for later launches of the same case, session and arm."""
        return self.path.parent / CACHES

    @property
    def inductor_cache(self) -> Path:
        """The directory of inductor's cache, which is not there if the user has named another one.

        That one may hold what other trainings have compiled.
        """
        return self.compile_caches / COMPILE_CACHES[INDUCTOR_CACHE]

    @property
    def number(self) -> int | None:
        """The number of a launch that `of_launch` named; None of any other directory."""
        match = re.fullmatch(r"launch-(\d+)", self.path.name)
        return None if match is None else int(match[1])

    def all_launches(self, nodes: int) -> dict[int, Path]:
        """The `launch` of each of so many nodes that has one, by the number of the node."""
        # Each is asked for by its name: on NFS a listing of the directory may be some seconds old.
        return {node: self.launch(node) for node in range(nodes) if self.launch(node).exists()}

    def all_agent_logs(self) -> list[Path]:
        """The `agent_log` of every node that has one, by the number of the node."""
        return _by_number(self.path.glob("agent-*.log"))

    def steps_seen(self) -> int | None:
        """The steps of which `progress` tells, of at least as many; None before rank 0 trains."""
        try:
            steps, _ = files.read_text(self.progress, files.LARGEST_OWN).split()
            return int(steps)
        except (OSError, ValueError, FileError):
            return None

    def all_ranks(self) -> list[Path]:
        """Every `RankReport` that was written, in no particular order."""
        return list(self.path.glob("rank-*.json"))

    def all_running(self) -> dict[int, str]:
        """The event or phase in which each rank has been for some seconds, of those that are in one."""
        running = {}
        for file in _by_number(self.path.glob("running-*")):
            with contextlib.suppress(OSError, FileError):  # it has just ended
                running[int(file.name.rpartition("-")[2])] = files.read_text(file, files.LARGEST_OWN)
        return running

    def all_profiles(self) -> list[Path]:
        """Every trace and every `RankProfileFile` that was written, in no particular order."""
        return [*self.path.glob("trace-*"), *self.path.glob("profile-*.json")]

    def all_rank_logs(self) -> list[Path]:
        """The `rank_log` of every rank that has one, by the number of the rank."""
        return _by_number(self.path.glob("rank-*.log"))

    def stacks(self, rank: int | None, pid: int, node: int = 0) -> Path:
        """The file into which that process writes its stacks when asked (`perfsuite.worker.leash`)."""
        return self.path / f"stacks-{node}-{'unknown' if rank is None else rank}-{pid}.txt"

    def worker_batch(self, pid: int) -> Path:
        """`WorkerBatchFile`, by that process of this node, a worker of a data loader."""
        return self.path / f"worker-{os.environ.get(NODE, '0')}-{pid}.json"

    def all_stacks(self, node: int | None = None) -> list[tuple[int | None, int, Path]]:
        """Every file of `stacks`, or those of one node, as (rank, process id, file): unknown ranks first."""
        files = self.path.glob(f"stacks-{'*' if node is None else node}-*-*.txt")
        names = [(file.stem.split("-")[2:], file) for file in files]
        found = [(None if rank == "unknown" else int(rank), int(pid), file) for (rank, pid), file in names]
        return sorted(found, key=lambda each: (-1 if each[0] is None else each[0], each[1]))


def _by_number(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: int(file.stem.rpartition("-")[2]))


def drop_compile_caches(directory: Path) -> None:
    """Delete what compilers kept for the launches of a case, of both arms where there are two.

    It is as large as all else of a session, and nothing reads it again.
    """
    for caches in (directory / CACHES, *directory.glob(f"*/{CACHES}")):
        shutil.rmtree(caches, ignore_errors=True)


def launches_in(directory: Path) -> list[RunDir]:
    """The launches of the case whose launches are in `directory`, by number."""
    launches = [RunDir(path) for path in directory.glob("launch-*")]
    return sorted((each for each in launches if each.number is not None), key=lambda each: each.number or 0)
