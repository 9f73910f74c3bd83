"""Tests of a launcher's decisions before a launch, and of the files that it reads after a launch.

The launcher is in an allocation of a fake Slurm.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Topology
from perfsuite.errors import AllocationOverError, LaunchError, MachineError
from perfsuite.features.slurm.commands import SlurmError
from perfsuite.features.slurm.describe import Described
from perfsuite.features.slurm.launcher import SlurmLauncher, alike, refuse_other_gpus, said_by_slurm
from perfsuite.launch.base import Launcher
from perfsuite.launch.job import Job
from perfsuite.launch.launchers import launcher as launcher_of
from perfsuite.launch.local import LocalLauncher
from perfsuite.node import lease
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import RunDir
from tests.processes import executable
from tests.samples import make_case, make_machine


def described(name: str = "n2", *, granted: int | None = None, **machine: Any) -> Described:
    interconnect = machine.pop("interconnect", "8xib400")
    fields: dict[str, Any] = {"interconnect": interconnect, "granted_gpus": granted, "probe": None}
    return Described(name=name, machine=make_machine(**machine), **fields)


def test_names_a_node_that_sees_other_gpus() -> None:
    eight, seven = (described(granted=8, device="cuda", devices=seen) for seen in (8, 7))
    refuse_other_gpus([eight, described(device="cuda", devices=8)])
    with pytest.raises(
        MachineError, match=r"^n2: Slurm gave a step 8 GPUs, but the step sees 7\. .*--exclude"
    ):
        refuse_other_gpus([eight, seven])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": 1}, "devices 1 instead of 2"),
        ({"hardware_class": "cpu-d"}, "hardware_class 'cpu-d' instead of 'cpu-test-2c'"),
        ({"driver": "580"}, "driver '580' instead of None"),
        # One port of the node is down. NCCL would either use sockets, or make the other nodes wait for this
        # node.
        ({"interconnect": "7xib400"}, "interconnect '7xib400' instead of '8xib400'"),
        ({"interconnect": None}, "interconnect None instead of '8xib400'"),
    ],
)
def test_unlike_nodes_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MachineError, match=f"compared with n1, n2 has {words}\\."):
        alike([described("n1"), described(**changes)])
    assert alike([described("n1"), described()]) == make_machine(interconnect="8xib400")


KILLED = "srun: error: n2: task 1: Killed\n"
SIGNALLED = "srun: error: n2: task 1: Exited with exit code 143\n"
ABORTED = "srun: Job step aborted: Waiting up to 4 seconds for job step to finish.\n"
LIMIT = "*** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T07:34:28 DUE TO TIME LIMIT ***"
LOST = f"perfsuite: {lease.NO_SIGN} for 300 s\n"
BY_SLURM = f"slurmstepd: error: {LIMIT}\n"


@pytest.mark.parametrize(
    ("by_srun", "by_agent", "kind", "message"),
    [
        (KILLED, "", "crash", "an agent ended without a report: n2: task 1: Killed"),
        (
            KILLED,
            LOST,
            "error",
            "an agent ended the job: no sign of perfsuite's driver for 300 s, although the driver "
            "(this process) was running",
        ),
        # If Slurm kills the agents, srun can report the end of the agents before the abort, or no abort at
        # all.
        (KILLED + ABORTED, "", "cancelled", "Slurm ended the step: somebody cancelled it"),
        (ABORTED + KILLED, BY_SLURM, "cancelled", f"Slurm ended the step: {LIMIT}"),
        (KILLED, BY_SLURM, "cancelled", f"Slurm ended the step: {LIMIT}"),
        (SIGNALLED, "", "cancelled", "Slurm ended the step: somebody cancelled it"),
        ("srun: cluster configuration lacks support for cpu binding\n", "", None, None),
    ],
)
def test_distinguishes_an_aborted_step_from_a_dead_agent(
    tmp_path: Path, by_srun: str, by_agent: str, kind: str | None, message: str | None
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.scheduler_log.write_text(by_srun)
    run_dir.agent_log(0).write_text(by_agent)
    failure = said_by_slurm(run_dir, 2)
    said = (None, None) if failure is None else (failure.kind, failure.message.partition(". Check")[0])
    assert said == (kind, message)
    launch_file = LaunchFile(
        node=1, host="n2", failures=(Failure(kind="crash", message="exit code 1", rank=1),)
    )
    documents.write(run_dir.launch(1), launch_file.replace(is_over=False))
    failure = said_by_slurm(run_dir, 2)
    assert (failure is not None) is (kind == "cancelled"), "only an abort explains failed ranks"
    documents.write(run_dir.launch(1), launch_file)
    assert said_by_slurm(run_dir, 2) is None, "the agent's report is used instead"


def settings_of(launcher: Launcher) -> tuple[list[str], str]:
    """Return the launcher's additional options of srun, and its interpreter."""
    assert isinstance(launcher, SlurmLauncher)
    return [*launcher._options], launcher._python


def test_ini_file_sets_options_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", "/this/python")
    assert settings_of(launcher_of("slurm")) == ([], "/this/python")
    settings = "perf_slurm_srun_options = --image='a b.sqsh' -v\nperf_slurm_python = /opt/python\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}")
    assert settings_of(launcher_of("slurm")) == (["--image=a b.sqsh", "-v"], "/opt/python")


def test_no_launcher_outside_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(MachineError, match=r"needs an allocation, .* sbatch --wait"):
        launcher_of("slurm")


def test_sessions_of_an_allocation_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert launcher_of("slurm").lock == "/tmp/perfsuite-slurm-7.lock"


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, LocalLauncher),
        ({"SLURM_JOB_ID": "7"}, LocalLauncher),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, LocalLauncher),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, SlurmLauncher),
        ({"SLURM_JOB_NUM_NODES": "2"}, LocalLauncher),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2-4"}, LocalLauncher),
    ],
)
def test_is_the_default_over_several_nodes(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launcher: type[Launcher]
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert type(launcher_of()) is launcher


RUNNING = "JobId=7 JobState=RUNNING NodeList=n[1-2]"
"""What `scontrol` prints about a job that runs."""
BUSY = "!controller busy"
"""The answer of a controller that has no time."""
CASE = make_case(topology=Topology(nodes=2, processes_per_node=1))
NEXT = """\
next() {
    head -n 1 "$1"
    if [ "$(wc -l < "$1")" -gt 1 ]; then sed -i 1d "$1"; fi
}"""
"""A shell function that prints the next line of a file. After the last line, it repeats the last line."""


class Slurm:
    """Programs on PATH that replace those of Slurm. Their answers are lines of files."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        here = f"cd '{directory}'"
        executable(
            directory / "scontrol",
            here,
            NEXT,
            'if [ "$2" = hostnames ]; then echo n1 n2; else next jobs; fi',
        )
        executable(
            directory / "squeue",
            here,
            NEXT,
            "answer=$(next left)",
            'case "$answer" in',
            '!*) echo "$answer" >&2; exit 1;;',
            '?*) echo "$answer $(tail -n 1 started)";;',
            "esac",
        )
        executable(directory / "scancel", here, 'echo "$*" >> cancelled')
        self.jobs(RUNNING)
        self.left("")
        self.srun()

    def jobs(self, *answers: str) -> None:
        """Answer like this when `scontrol` is asked about the job. The last answer is repeated."""
        self._answer("jobs", answers)

    def left(self, *answers: str) -> None:
        """Answer like this when `squeue` is asked for the step of the last launch.

        An answer is the id of the step, empty if the step is gone, or an error that begins with "!".
        """
        self._answer("left", answers)

    def _answer(self, name: str, answers: Sequence[str]) -> None:
        (self._directory / name).write_text("".join(f"{answer}\n" for answer in answers))

    def srun(self, script: str = "touch $directory/rank-0.json $directory/rank-1.json") -> None:
        """Make `srun` run this script instead of starting agents. By default, all ranks report."""
        executable(
            self._directory / "srun",
            "for word; do",
            f"    case $word in --job-name=*) echo ${{word#*=}} >> '{self._directory}/started';; esac",
            "done",
            "directory=$word",
            script,
        )

    @property
    def started(self) -> list[str]:
        """The names of the steps that `srun` has started."""
        return (self._directory / "started").read_text().splitlines()

    @property
    def cancelled(self) -> list[str]:
        """The arguments of each call of `scancel`."""
        return (self._directory / "cancelled").read_text().splitlines()

    def launch(self, launcher: SlurmLauncher, name: str, **changes: Any) -> Failure | None:
        """Launch in the directory `name`, and return the failure that the launcher reports."""
        run_dir = RunDir(self._directory / name)
        run_dir.path.mkdir()
        return launcher.launch(Job(run_dir=run_dir, case=CASE.replace(**changes), machine=make_machine()))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path, monkeypatch)


def make_launcher(**how: Any) -> SlurmLauncher:
    """Return a launcher that does not wait between two queries."""
    return SlurmLauncher(sleep=lambda seconds: None, **how)


def test_refuses_gpus_not_requested_per_node(slurm: Slurm, tmp_path: Path) -> None:
    slurm.jobs(f"{RUNNING} TresPerJob=gres/gpu:16")
    with pytest.raises(MachineError, match="did not request GPUs per node"):
        make_launcher().machine(tmp_path)


@pytest.mark.fault("allocation is about to end")
def test_does_not_start_in_an_ending_allocation(slurm: Slurm) -> None:
    slurm.jobs(f"{RUNNING} TimeLimit=00:10:00 RunTime=00:09:10")
    with pytest.raises(AllocationOverError, match="ends in 50 s, but a launch can take 60 s"):
        slurm.launch(make_launcher(), "long")
    assert slurm.launch(make_launcher(), "short", timeout_s=40) is None


def test_keeps_results_when_the_allocation_ends(slurm: Slurm) -> None:
    over = RUNNING.replace("RUNNING", "CANCELLED")
    slurm.jobs(RUNNING, RUNNING, over)  # two answers are used before the first launch
    ours = make_launcher()
    assert slurm.launch(ours, "first") is None
    with pytest.raises(AllocationOverError, match="the Slurm job 7 is over: CANCELLED"):
        slurm.launch(ours, "second")


def test_asks_a_busy_controller_again(slurm: Slurm) -> None:
    slurm.left(BUSY, BUSY, "7.1", "7.1", "")
    assert slurm.launch(make_launcher(), "launch") is None
    assert slurm.cancelled == ["--signal=KILL 7.1"] * 2


def test_next_launch_waits_for_a_lingering_step(slurm: Slurm) -> None:
    ours = make_launcher(end_s=0.05)
    slurm.left(BUSY)
    assert slurm.launch(ours, "kept") is None
    with pytest.raises(SlurmError, match="controller busy"):
        slurm.launch(ours, "next")
    assert len(slurm.started) == 1, "no second step was started"
    slurm.left("7.1")
    with pytest.raises(LaunchError, match=r"Slurm did not end step 7\.1 within 0 s. .*scontrol show step"):
        slurm.launch(ours, "later")
    slurm.left("")
    assert slurm.launch(ours, "then") is None
    slurm.left(BUSY)
    slurm.srun("exit 1")
    with pytest.raises(SlurmError, match="controller busy"):
        slurm.launch(ours, "failed")
