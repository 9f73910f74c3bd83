"""Run each job as one step of the Slurm allocation around this process, with an agent on each node.

`srun` passes its stdin on to the agents. When stdin closes, each agent ends its ranks. If this process and
`srun` are killed together, agents notice that the text in `RunDir.lease` no longer changes. As long as
this process lives, it ends each job itself: it finds the job's step by name, and cancels the step again and
again until Slurm no longer lists it. The exit status of `srun` does not prove that the step has ended.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from perfsuite import documents
from perfsuite.case.hardware import AllocatedNode, Allocation, Machine
from perfsuite.errors import AllocationOverError, LaunchError, MachineError
from perfsuite.features.slurm import commands
from perfsuite.features.slurm.commands import POLL_S, SlurmError, patiently
from perfsuite.features.slurm.describe import GRANTED_GPUS, Described
from perfsuite.inputs.files import read_text
from perfsuite.inputs.setting import Setting, words
from perfsuite.launch.base import Launcher
from perfsuite.launch.driving import agent_command, drive, environment, prepare, started
from perfsuite.launch.hang import HangDetector
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.node import lease
from perfsuite.node.agent import NODE_VARIABLE
from perfsuite.node.processes import JOB_MARK, KILL_S, wait_for
from perfsuite.results.environment import variables
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import RunDir

JOB_ID = "SLURM_JOB_ID"
NODES = "SLURM_JOB_NUM_NODES"
END_S = 90.0  # time limit for Slurm to end a step, which takes over 30 s if slurmstepd was killed
# Seconds that `srun` waits for the other agents after the first has ended, because the ranks of a script can
# take different times.
WAIT_S = 120
DESCRIBE_S = 300.0
SHORTEST_S = 60.0  # minimum assumed duration of a launch
LARGEST_LOG = 2_000_000_000  # maximum size of a log of `srun` or of an agent, in bytes
BAD_END = re.compile(r"^srun: error: (\S+: tasks? .*)", re.MULTILINE)
"""The message of `srun` about an agent that ended badly. This process, and not `srun`, then ends the other
agents. Such an agent does not make `srun` abort the step. So a message about an aborted step means that Slurm
aborted the step for another reason."""
ENDED_BY_SLURM = re.compile(r"\*\*\* (STEP|JOB) .*? \*\*\*")
"""slurmstepd's message when a step is cancelled, runs out of time, or loses a node. It can be missing."""
ABORTED = re.compile(rf"^srun: Job step aborted|exit code {128 + signal.SIGTERM}$", re.MULTILINE)
"""The message of `srun` about a step that Slurm aborted, or about an agent that got SIGTERM from Slurm."""
REQUESTS = frozenset(
    [
        *(
            "SLURM_CPUS_PER_TASK",
            "SRUN_CPUS_PER_TASK",
        ),  # `srun` would give our one task per node only this many cores
        *("SLURM_CPUS_PER_GPU", "SLURM_GPUS", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK"),
        *("SLURM_GPU_BIND", "SLURM_MEM_PER_GPU", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"),
        GRANTED_GPUS,  # the step must have its own value, not the value of the job's script
    ]
)
"""Variables that Slurm sets from the options of an allocation, and that `srun` reads as options of a step.
They must be removed, because our step has one task per node for all GPUs and cores. See "Input environment
variables" in https://slurm.schedmd.com/srun.html.
"""


class SlurmLauncher(Launcher):
    """Runs jobs on the nodes of this allocation. Each job uses the first nodes."""

    settings: ClassVar[Sequence[Setting]] = (
        Setting(
            name="slurm-srun-options",
            metavar="WORDS",
            parse=words,
            ini=True,
            help="additional srun options for each launch; they override those of perfsuite",
            page="See [Settings](slurm.md#settings)",
        ),
        Setting(
            name="slurm-python",
            metavar="PROGRAM",
            ini=True,
            help="the Python interpreter on the nodes, with the same perfsuite (default: pytest's own)",
            page="See [Settings](slurm.md#settings)",
        ),
    )

    def __init__(
        self,
        srun_options: Sequence[str] | None = None,
        python: str | None = None,
        *,
        new_detector: Callable[[], HangDetector] = HangDetector,
        end_s: float = END_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raise `MachineError` if this process is not in an allocation.

        `new_detector` returns the detector that decides whether a job hangs. Slurm must end a step within
        `end_s` seconds. `sleep` waits between two queries.
        """
        job_id = os.environ.get(JOB_ID)
        if job_id is None:
            raise MachineError(
                f"the launcher slurm needs an allocation, but {JOB_ID} is not set. Use salloc or sbatch, "
                "such as: sbatch --wait --exclusive --nodes=2 --wrap='pytest bench_cases -m h100'"
            )
        self.job_id = job_id
        self._options = srun_options or ()
        self._python = python or sys.executable
        self._new_detector = new_detector
        self._end_s = end_s
        self._sleep = sleep
        self._longest_s = 0.0
        self._left_over: str | None = None

    @classmethod
    def is_default(cls) -> bool:
        """Return whether this process is in an allocation of several nodes."""
        nodes = os.environ.get(NODES, "1")
        return JOB_ID in os.environ and nodes.isdigit() and int(nodes) > 1

    @cached_property
    def _allocated(self) -> commands.SlurmJob:
        until = time.monotonic() + self._end_s
        return patiently(until, commands.job, self.job_id, sleep=self._sleep)

    @property
    def lock(self) -> str:
        """The lock for sessions in this allocation. Sessions in other allocations use other nodes."""
        return f"/tmp/perfsuite-slurm-{self.job_id}.lock"

    def machine(self, shared: Path) -> Machine:
        """Query all nodes, and return the machine that they have in common. See `Launcher.machine`."""
        self._refuse_if_over()
        if self._allocated.spreads_gpus:
            raise MachineError(
                f"the Slurm job {self.job_id} did not request GPUs per node, so no launch could use all of "
                "them. Request GPUs with --gres=gpu:8 of salloc or sbatch"
            )
        probe = shared / f"probe-{uuid.uuid4().hex}"
        word = secrets.token_hex(8)
        documents.write_text(probe, word)
        try:
            descriptions = self._describe(probe)
        finally:
            probe.unlink()
        blind = [node.name for node in descriptions if node.probe != word]
        if blind:
            raise MachineError(
                f"{', '.join(blind)} cannot see the file that this process has just written in {shared}. "
                "Every node must see this directory. Give a directory of a shared file system with "
                "--perf-store=DIR (for a command, --store)"
            )
        refuse_other_gpus(descriptions)
        nodes = (
            AllocatedNode(
                name=node.name,
                interface=node.interface,
                cores=node.cores,
                cores_of_machine=node.cores_of_machine,
            )
            for node in descriptions
        )
        network = {n: value for n, value in variables(os.environ).items() if n.startswith(("NCCL_", "GLOO_"))}
        allocation = Allocation(job_id=self.job_id, nodes=tuple(nodes), variables=network)
        return alike(descriptions).replace(nodes=len(descriptions), allocation=allocation)

    def _describe(self, probe: Path) -> list[Described]:
        words = [self._python, "-m", "perfsuite.features.slurm.describe", str(probe.resolve())]
        srun = self._srun(len(self._allocated.nodes), "perfsuite-describe", "--input=none")
        done = commands.ask(*srun, *words, answer_s=DESCRIBE_S, environment=_for_srun(os.environ))
        descriptions = [
            Described.model_validate_json(line) for line in done.splitlines() if line.startswith("{")
        ]
        missing = set(self._allocated.nodes) - {node.name for node in descriptions}
        if missing:
            raise MachineError(f"no description from {', '.join(sorted(missing))}: {done[-2000:]}")
        return sorted(descriptions, key=lambda node: self._allocated.nodes.index(node.name))

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        """Run a job to its end on the first nodes of the allocation. See `Launcher.launch`."""
        self._refuse_if_over(job.case.timeout_s)
        if self._left_over is not None:
            self._end_step(self._left_over)
        mark = f"perfsuite-{uuid.uuid4().hex}"
        began = time.monotonic()
        nodes = job.case.topology.nodes
        if job.python == sys.executable:
            job = replace(job, python=self._python)
        # These variables are set only for the agents. An agent that ends its job kills all processes with the
        # same `JOB_MARK`. If srun had it, srun would be killed too, and would then signal the other agents.
        ours = f"{JOB_MARK}={mark},{NODE_VARIABLE}=SLURM_NODEID,{lease.LEASE_S}={lease.LOST_S:g}"
        # slurmstepd writes the log, so the output does not go through srun.
        log = f"{job.run_dir.path.resolve()}/agent-%n.log"
        options = ("--unbuffered", "--input=all", f"--output={log}", f"--export=ALL,{ours}")
        command = [*self._srun(nodes, mark, *options), *agent_command(job)]
        prepare(job.run_dir)
        given = _for_srun(environment(job))

        def is_broken() -> bool:
            return _bad_end(job.run_dir) is not None

        with started(command, job.run_dir.scheduler_log, given, job.directory) as srun:
            try:
                failure = drive(job, srun, on_progress, is_broken, hang=self._new_detector())
            finally:
                self._longest_s = max(self._longest_s, time.monotonic() - began)
                said = self._end(job, srun, mark)
        if not _has_reported(job):  # if all ranks have reported, the job was measured
            self._refuse_if_over()
        return said if failure is None and srun.returncode else failure

    def _srun(self, nodes: int, name: str, *options: str) -> list[str]:
        return [
            *("srun", f"--jobid={self.job_id}", f"--job-name={name}"),
            *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
            f"--nodelist={','.join(self._allocated.nodes[:nodes])}",
            *("--overlap", "--mem=0", "--mpi=none", "--cpu-bind=none", "--gpu-bind=none"),
            *("--kill-on-bad-exit=0", f"--wait={WAIT_S}"),  # see `BAD_END`
            *options,
            *self._options,  # these come last, because srun uses the last of several equal options
        ]

    def _refuse_if_over(self, most_s: float = 0.0) -> None:
        until = time.monotonic() + self._end_s
        job = patiently(until, commands.job, self.job_id, sleep=self._sleep)
        while job.is_completing and time.monotonic() < until:
            self._sleep(POLL_S)  # only the final state shows why the job ended
            job = patiently(until, commands.job, self.job_id, sleep=self._sleep)
        if job.is_over:
            raise AllocationOverError(f"the Slurm job {self.job_id} is over: {job.why_over}")
        needed_s = min(most_s, max(SHORTEST_S, 2 * self._longest_s))
        if job.left_s is not None and job.left_s < needed_s:
            raise AllocationOverError(
                f"the Slurm job {self.job_id} ends in {job.left_s} s, but a launch can take {needed_s:.0f} s"
            )

    def _end(self, job: Job, srun: subprocess.Popen[bytes], mark: str) -> Failure | None:
        """End the job's step and its `srun`.

        Return the failure that Slurm had reported before the step was ended here, or None.
        """
        assert srun.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                srun.stdin.close()
            wait_for(srun, 5)
            said = said_by_slurm(job.run_dir, job.case.topology.nodes)
            self._end_step(mark)
            return said
        except (LaunchError, SlurmError):
            # If the job was measured, its result is kept, and the next launch raises the error.
            self._left_over = mark
            if not _has_reported(job):
                self._refuse_if_over()  # a step can remain on a lost node
                raise
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(srun.pid, signal.SIGKILL)
            wait_for(srun, KILL_S)

    def _end_step(self, mark: str) -> None:
        """End a step on every node.

        Raises `LaunchError` if the step still exists after `end_s`, and `SlurmError` if Slurm does not
        answer.
        """

        def kill(mark: str) -> list[str]:
            left = commands.steps(self.job_id, mark)
            for step in left:
                commands.cancel(step, "--signal=KILL")
            return left

        until = time.monotonic() + self._end_s
        while left := patiently(until, kill, mark, sleep=self._sleep):
            if time.monotonic() > until:
                raise LaunchError(
                    f"Slurm did not end step {', '.join(left)} within {self._end_s:.0f} s. The next launch "
                    "would share the nodes with it. Check its nodes (scontrol show step)"
                )
            self._sleep(POLL_S)
        self._left_over = None


def _has_reported(job: Job) -> bool:
    return job.run_dir.has_reports(job.case.topology.world_size)


def alike(nodes: Sequence[Described]) -> Machine:
    """Return the machine description that is the same for all nodes.

    Raises `MachineError` if a node differs.
    """
    machines = [node.machine.replace(interconnect=node.interconnect) for node in nodes]
    first = machines[0]
    for node, machine in zip(nodes, machines, strict=True):
        unlike = [
            f"{field} {getattr(machine, field)!r} instead of {getattr(first, field)!r}"
            for field in ("hardware_class", "devices", "driver", "interconnect")
            if getattr(machine, field) != getattr(first, field)
        ]
        if unlike:
            raise MachineError(
                f"the nodes differ: compared with {nodes[0].name}, {node.name} has {', '.join(unlike)}. "
                "These nodes have no common hardware class, so nothing can be measured on them. Leave one "
                "out (--exclude of salloc or sbatch)"
            )
    return first


def said_by_slurm(run_dir: RunDir, nodes: int) -> Failure | None:
    """Return the failure that Slurm reports about the end of a step, or None if an agent explains the end.

    `srun` can report the end of an agent before the abort of its step, or never report the abort. So if an
    agent ended without a report, this function blames the agent only if no log mentions an abort.

    A failure in an agent's final report explains an abort. A failure in an earlier report, written while
    ranks were still running, does not. It can be a consequence of the abort: ranks fail when the ranks of
    another node are gone.
    """
    logs = [
        read_text(log, LARGEST_LOG, errors="replace")
        for log in (run_dir.scheduler_log, *run_dir.all_agent_logs())
    ]
    reasons = map(ENDED_BY_SLURM.search, logs)
    why = next((reason[0] for reason in reasons if reason), None)
    is_aborted = why is not None or ABORTED.search(logs[0]) is not None
    launch_files = [documents.read_or_none(file, LaunchFile) for file in run_dir.all_launches(nodes).values()]
    if any(
        launch_file and launch_file.failures and (launch_file.is_over or not is_aborted)
        for launch_file in launch_files
    ):
        return None
    if is_aborted:
        message = f"Slurm ended the step: {why or 'somebody cancelled it'}"
        return Failure(kind="cancelled", message=message, at=time.time())
    if any(f"perfsuite: {lease.NO_SIGN}" in log for log in logs):
        message = (
            f"an agent ended the job: {lease.NO_SIGN} for {lease.LOST_S:g} s, although the driver "
            f"(this process) was running. Check that the node of this process can write {run_dir.path}"
        )
        return Failure(kind="error", message=message, at=time.time())
    task = _bad_end(run_dir)
    if task is not None:
        return Failure(kind="crash", message=f"an agent ended without a report: {task[1]}", at=time.time())
    return None


def _bad_end(run_dir: RunDir) -> re.Match[str] | None:
    """Return the message of `srun` about the first agent that ended badly. None if no agent did."""
    return BAD_END.search(read_text(run_dir.scheduler_log, LARGEST_LOG, errors="replace"))


def _for_srun(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in REQUESTS}


def refuse_other_gpus(nodes: Sequence[Described]) -> None:
    """Raise `MachineError` if the number of GPUs that a node sees is not the number that Slurm gave it."""
    for node in nodes:
        seen = node.machine.devices if node.machine.device == "cuda" else 0
        if node.granted_gpus not in (None, seen):
            note = "" if node.machine.note is None else f" ({node.machine.note})"
            raise MachineError(
                f"{node.name}: Slurm gave a step {node.granted_gpus} GPUs, but the step sees {seen}{note}. "
                "Check nvidia-smi on that node, and leave the node out (--exclude of salloc or sbatch). If "
                "you do not need GPUs, request none"
            )
