"""The files of one launch. No other module knows their names."""

from __future__ import annotations

import contextlib
import hashlib
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

# Placeholder for the path of `RunDir.files` in a script's arguments and variables.
LAUNCH_DIR = "{launch_dir}"
FILES = "PERFSUITE_LAUNCH_DIR"  # environment variable of every process of a job: the path of `RunDir.files`
RUN_DIR = "PERFSUITE_RUN_DIR"  # environment variable of a script's processes: the path of the `RunDir`
ANCESTOR_PID = "PERFSUITE_ANCESTOR_PID"
"""Environment variable: id of the process that this process must not outlive. An agent must not outlive the
driver, unless the driver is on another machine. A process that an agent starts must not outlive the agent."""
MOVED = "PERFSUITE_MOVED"  # environment variable of an arm at a commit: `TOP_OF_REPOSITORY:WORKTREE`
JOB_VARIABLES = "PERFSUITE_JOB_VARIABLES"
"""Environment variable of an agent: names of the variables that were set for the job. The agent does not
change these variables."""
NODE = "PERFSUITE_NODE"  # environment variable of every process of a job: the number of its node, from 0
RANK = "PERFSUITE_RANK"
"""Environment variable of each process that the agent starts as a rank of a script: the rank's number.
torch's variable `RANK` is not enough, because it is not set if a script runs as a single process."""
MODEL_CODE = "PERFSUITE_MODEL_CODE"  # environment variable: modules that an agent's fork server imports
CACHES = "compile-caches"  # the name of `RunDir.compile_caches`
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
EXTENSIONS = "torch_extensions"
COMPILE_CACHES = {
    INDUCTOR_CACHE: "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": EXTENSIONS,  # C++ code that is compiled on first use, for example by DeepSpeed
}
"""Directories below `RunDir.compile_caches`, by the environment variable that gives their path to a job. A
variable that the user has set is not changed."""
STACKS_SIGNAL = signal.SIGUSR1  # makes a process write its stacks into `RunDir.stacks`
FLIGHT_RECORDER_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch's variable: prefix of its flight recorder's files


@dataclass(frozen=True)
class Below:
    """A descriptor for a file or directory. It returns the path of `name` below the object's `path`."""

    name: str

    def __get__(self, directory: Any, _: type) -> Path:
        path: Path = directory.path
        return path / self.name


@dataclass(frozen=True)
class Numbered:
    """A descriptor that maps the number of a node or a rank to the path of its file."""

    name: str

    def __get__(self, directory: Any, _: type) -> Callable[[int], Path]:
        return lambda number: Path(directory.path / self.name.format(number))


@dataclass(frozen=True)
class RunDir:
    """A directory that driver, launcher and workers share. Each file in it has only one writer."""

    path: Path

    case = Below("case.json")  # `CaseFile`, written by the driver
    run = Below("run.json")  # `Run`, written by the driver
    # Output of the scheduler's command, if a scheduler starts the agents.
    scheduler_log = Below("scheduler.log")
    lease = Below("lease")  # the driver's sign of life and its requests (`perfsuite.node.lease`)
    endpoint = Below("endpoint")  # rendezvous of the ranks, `HOST:PORT`: created by the driver, set by node 0
    files = Below("files")
    """A directory for the files that a script writes. A script that finds its files there at the start
    resumes from them. The agent of node 0 creates the directory empty. It is kept with the launch's other
    files."""
    checkpoints = Below("checkpoints")  # checkpoints that a framework resumes from; removed after the launch
    progress = Below("progress")
    """`STEPS TOKENS_PER_STEP`. Rank 0 writes the file before the first step, then at the end of a step but at
    most every 0.5 s, and after the last step."""
    launch = Numbered("launch-{}.json")  # `LaunchFile`, written by the agent of that node
    agent_log = Numbered("agent-{}.log")  # stdout and stderr of the agent of that node
    rank = Numbered("rank-{}.json")  # `RankReport`, written by that rank
    rank_log = Numbered("rank-{}.log")  # stdout and stderr of that rank
    profile = Numbered("profile-{}.json")  # `RankProfileFile`, written by that rank of a profiled launch
    trace = Numbered("trace-{}.json.gz")  # trace of that rank from torch's profiler; opens in Perfetto
    device_log = Numbered("device-log-{}.json.gz")  # log of that rank's simulated GPU (`device_log_file`)
    running = Numbered("running-{}")
    """The event or phase that the rank has been in for a few seconds. The rank writes the file, and removes
    it when the event ends."""
    injected = Below("injected")
    """Empty file that the rank with the highest number writes before it injects a fault that ends the
    launch."""
    training = Numbered("training-{}")
    """Lists the processes that trained as one rank (`worker.script.script_rank`). The rank's agent creates
    the file empty."""
    flight_recorder = Below("nccl-flight-recorder-rank-")
    """Prefix of the files into which torch's watchdog writes recent NCCL calls. The rank's number
    follows."""

    @classmethod
    def of_launch(cls, directory: Path, number: int) -> RunDir:
        """Return the files of launch `number` (from 1) of the case whose launches are in `directory`."""
        return cls(directory / f"launch-{number}")

    @classmethod
    def of_profile(cls, directory: Path) -> RunDir:
        """Return the files of the profiled launch of the case whose launches are in `directory`."""
        return cls(directory / "profile")

    @classmethod
    def of_prediction(cls, directory: Path) -> RunDir:
        """Return the files of the dry run that predicts the speed of the case in `directory`."""
        return cls(directory / "prediction")

    @property
    def compile_caches(self) -> Path:
        """The directory of compile caches, which later launches of the same case, session and arm use."""
        return self.path.parent / CACHES

    @property
    def inductor_cache(self) -> Path:
        """The directory of inductor's cache.

        It does not exist if the user chose another directory. The user's directory is not read, because it
        can contain entries from other training runs.
        """
        return self.compile_caches / COMPILE_CACHES[INDUCTOR_CACHE]

    def all_extension_locks(self) -> list[Path]:
        """Return the locks of builds of C++ extensions. A build that was killed leaves its lock behind."""
        return sorted(self.compile_caches.glob(f"{EXTENSIONS}*/*/lock"))

    @property
    def number(self) -> int | None:
        """The number of the launch in the directory's name; None for any other kind of directory."""
        match = re.fullmatch(r"launch-(\d+)", self.path.name)
        return None if match is None else int(match[1])

    def all_launches(self, nodes: int) -> dict[int, Path]:
        """Return the existing `launch` files of nodes 0 to `nodes` - 1, by node number."""
        # Look up each file by name, because a directory listing on NFS can be several seconds old.
        return {node: self.launch(node) for node in range(nodes) if self.launch(node).exists()}

    def all_agent_logs(self) -> list[Path]:
        """Return the existing `agent_log` files, sorted by node number."""
        return _by_number(self.path.glob("agent-*.log"))

    def steps_seen(self) -> int | None:
        """Return the number of completed steps from the file `progress`.

        The number can be too low. Returns None if rank 0 does not train yet.
        """
        try:
            steps, _ = read_text(self.progress, LARGEST_OWN).split()
            return int(steps)
        except (OSError, ValueError, FileError):
            return None

    def all_ranks(self) -> list[Path]:
        """Return the existing `RankReport` files, in no particular order."""
        return list(self.path.glob("rank-*.json"))

    def all_running(self) -> dict[int, str]:
        """Return the event or phase that each rank has been in for a few seconds, by rank."""
        running = {}
        for file in _by_number(self.path.glob("running-*")):
            with contextlib.suppress(OSError, FileError):  # the event has just ended
                running[int(file.name.rpartition("-")[2])] = read_text(file, LARGEST_OWN)
        return running

    def all_profiles(self) -> list[Path]:
        """Return the existing traces and `RankProfileFile` files, in no particular order."""
        return [*self.path.glob("trace-*"), *self.path.glob("profile-*.json")]

    def has_reports(self, ranks: int) -> bool:
        """Return whether ranks 0 to `ranks` - 1 have written their `RankReport`.

        Opening the directory makes an NFS client ask the server whether the directory has changed. If the
        client does not ask, a file that was missing before can seem to be missing for another minute.
        """
        with os.scandir(self.path):
            return all(self.rank(rank).exists() for rank in range(ranks))

    def all_rank_logs(self) -> list[Path]:
        """Return the existing `rank_log` files, sorted by rank."""
        return _by_number(self.path.glob("rank-*.log"))

    def stacks(self, rank: int | None, pid: int, node: int = 0) -> Path:
        """Return the file into which a process writes its stacks on a signal (`perfsuite.worker.leash`)."""
        return self.path / f"stacks-{node}-{'unknown' if rank is None else rank}-{pid}.txt"

    def collectives(self, pid: int, node: int = 0) -> Path:
        """Return the path of the `CollectiveCallsFile` that a process writes on request."""
        return self.path / f"collectives-{node}-{pid}.json"

    def all_collectives(self) -> list[Path]:
        """Return the existing `CollectiveCallsFile` files, in no particular order."""
        return list(self.path.glob("collectives-*-*.json"))

    def request_address(self, pid: int) -> str:
        """Return the address of the socket on which a process waits for a request to write its `collectives`.

        The leading NUL makes it an abstract address (unix(7)), so that no file is left behind and the
        path of the directory can have any length.
        """
        return f"\0perfsuite-{hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:32]}-{pid}"

    def worker_batch(self, pid: int) -> Path:
        """Return the `WorkerBatchFile` of a data loader's worker process on this node."""
        return self.path / f"worker-{os.environ.get(NODE, '0')}-{pid}.json"

    def all_stacks(self, node: int | None = None) -> list[tuple[int | None, int, Path]]:
        """Return the `stacks` files of one node or all nodes as (rank, pid, file), unknown ranks first."""
        files = self.path.glob(f"stacks-{'*' if node is None else node}-*-*.txt")
        names = [(file.stem.split("-")[2:], file) for file in files]
        stacks = [(None if rank == "unknown" else int(rank), int(pid), file) for (rank, pid), file in names]
        # pragma: no mutate -1 to -2: both come before every rank
        return sorted(stacks, key=lambda entry: (-1 if entry[0] is None else entry[0], entry[1]))


def _by_number(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: int(file.stem.rpartition("-")[2]))


def drop_compile_caches(directory: Path) -> None:
    """Delete the compile caches of a case's launches, for both arms in a comparison.

    They can be as large as everything else in a session, and they are not used again.
    """
    for caches in (directory / CACHES, *directory.glob(f"*/{CACHES}")):
        shutil.rmtree(caches, ignore_errors=True)


def launches_in(directory: Path) -> list[RunDir]:
    """Return the launches below the directory of a case, sorted by number."""
    launches = [RunDir(path) for path in directory.glob("launch-*")]
    return sorted(
        (launch for launch in launches if launch.number is not None),
        # pragma: no mutate 0: no number is None here, and the 0 only satisfies mypy
        key=lambda launch: launch.number or 0,
    )
